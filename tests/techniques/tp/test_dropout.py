"""Dropout under tensor parallelism: equal where ranks have the same values, different where each has a part of its own."""

import pytest
import torch
from techniques.tp.dropping import HEADS, HIDDEN, WIDTH, train
from torch import nn
from torch.nn import functional

from shardwise.techniques.tp.probe import facts_of
from shardwise.techniques.tp.search.cut_search import search

DEGREE = 2
PART = {(2, HEADS // DEGREE, 8, 8), (2, 8, HIDDEN // DEGREE)}  # of scores, of hidden values
WHOLE = {(2, 8, WIDTH)}


@pytest.fixture(scope="module")
def runs(ranks):
    plain = ranks.run(train, DEGREE, "tp=2", False)
    again = ranks.run(train, DEGREE, "tp=2", False, remat="full")
    return plain, again


def test_masks_are_equal_where_values_are_and_differ_where_parts_are(runs):
    (one, other), _ = runs
    assert {shape for shape, _ in one[0]} == PART | WHOLE
    assert len(one[0]) == len(other[0]) == 2 * 2 * 3 * 5  # steps, micro-batches, blocks, calls in each
    for (shape, mask), (its_shape, its_mask) in zip(one[0], other[0], strict=True):
        assert shape == its_shape
        assert (mask == its_mask) == (shape in WHOLE)
        assert 0.2 < sum(mask) / len(mask) < 0.95
    everything = [str(mask) for found in (one, other) for shape, mask in found[0] if shape in PART]
    assert len(set(everything)) == len(everything)  # no place, layer, micro-batch, step or rank repeats another's


def test_ranks_stay_in_step(runs):
    for one, other in runs:
        assert one[1:] == other[1:]  # losses, and gradients of what every rank has whole, to the bit


def test_a_block_that_runs_again_draws_the_same_numbers(runs):
    plain, again = runs
    for one, twice in zip(plain, again, strict=True):
        assert twice[1:] == one[1:]
        assert len(twice[0]) == 2 * len(one[0])
        assert {str(mask) for _, mask in twice[0]} == {str(mask) for _, mask in one[0]}


def test_a_block_that_stops_its_second_run_between_cut_layers(ranks):
    """After 16 runs a block's second run ends with the last tensor that its backward needs."""
    steps = 12
    plain = ranks.run(train, DEGREE, "tp=2", False, steps, True)
    again = ranks.run(train, DEGREE, "tp=2", False, steps, True, remat="full")
    assert [run[1:] for run in again] == [run[1:] for run in plain]


def test_a_second_run_draws_the_same_numbers(ranks, runs):
    assert ranks.run(train, DEGREE, "tp=2", False) == runs[0]


def test_attention_that_drops_out_by_itself(ranks):
    one, other = ranks.run(train, DEGREE, "tp=2", True)
    again = ranks.run(train, DEGREE, "tp=2", True, remat="full")
    assert one[1:] == other[1:] and [run[1:] for run in again] == [one[1:]] * 2


def test_dropout_between_cut_layers_is_not_compiled(ranks):
    with pytest.raises(Exception, match="Compile of a block with dropout between layers that are cut over tp"):
        ranks.run(train, DEGREE, "tp=2", False, compile="blocks")


class DropsAfterNorms(nn.Module):
    """Its last layers before dropout are norms over the whole width, of q and k."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm_q, self.norm_k = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.norm_q(q), self.norm_k(k), v))
        weights = functional.dropout((q @ k.mT).softmax(-1), 0.5, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_dropout_after_a_norm_over_the_width_draws_numbers_of_a_rank():
    torch.manual_seed(0)
    module = DropsAfterNorms()
    found = search(module, lambda copy: copy(torch.randn(2, 5, 8, dtype=torch.float64)), 2)
    edits = facts_of(found, dict(module.named_parameters()))["edits"]
    assert [name for name, _, values in edits if values.get("drops_part")] == ["norm_k"]
