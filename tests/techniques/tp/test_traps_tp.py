"""How tensor parallelism goes silently wrong elsewhere, each by name: here the numbers are those of one process.

Each test first shows that its layers are cut: nothing that stays whole can go wrong in these ways.
"""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from models.batches import VOCAB
from models.linears import HEAD, HEADS, WIDTH, Decoder
from techniques.tp import traps
from techniques.tp.searches import run_searched_once
from torch import nn

import shardwise as sw
from shardwise.model.calling import run_on
from shardwise.techniques.tp.search.cut_search import search


def trains(ranks, model, cut, layout="tp=2", **options):
    """Asserts that the parameters ``cut`` are cut, and that training is that of one process."""
    assert {*cut} <= cut_of(model.name)
    run = run_searched_once(ranks.run, model.name)
    assert sw.verify(model.build, layout, batches=model.windows(2, 3), run=run, **options)


@functools.cache
def cut_of(name):
    """The weights of a model that are cut over two ranks."""
    found = search(models.get(name).build(), run_on(None), 2)
    regions = {weight for region in found.regions for weight in region.layers}
    return regions | {table.weight for table in found.tables}


def test_the_bias_of_a_row_parallel_layer_is_added_once(ranks):
    """Added before the sum, it counts once for each rank."""
    trains(ranks, models.get("linears: apart"), ["blocks.0.attention.out.weight", "blocks.0.mlp.down.weight"])


@pytest.mark.parametrize("name", ["linears: qkv-kv-2", "linears: per-head"])
def test_a_fused_layer_is_cut_by_what_it_holds(ranks, name):
    """q, k and v, or gate and up, in one layer: a rank with the first half of the rows has queries alone."""
    trains(ranks, models.get(name), ["blocks.0.attention.projections.0.weight", "blocks.1.mlp.up.weight"])


def test_a_rank_has_rows_of_its_heads(ranks):
    one, other = ranks.run(traps.rows_of_ranks, 2)
    q, k, v = torch.arange(3 * HEADS * HEAD).view(3, HEADS, HEAD)
    for mine, heads in ((one, [0, 1]), (other, [2, 3])):
        assert torch.equal(mine, torch.cat([q[heads].flatten(), k[heads].flatten(), v[heads].flatten()]))


def test_gradients_of_norms_between_cut_layers_are_summed_once(ranks):
    """Each rank has a part of them: without a sum ranks drift apart; summed per micro-batch, sums are summed again."""
    trains(ranks, models.get("qwen3"), ["model.layers.0.self_attn.q_proj.weight"])


def test_fewer_key_value_heads_than_ranks(ranks):
    trains(ranks, models.get("linears: kv-1"), ["blocks.0.attention.projections.0.weight"])


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_the_ranks_do_not_divide(ranks, tied):
    """Rows that fill up the last rank's part must not be in the softmax; and a tie stays a tie."""
    assert VOCAB % 2
    model = models.get(f"vocabularies: {'tied, with a bias' if tied else 'untied'}")
    trains(ranks, model, ["embed.weight"])
    assert ranks.run(traps.is_tied, 2, model.name) == [tied] * 2


@pytest.mark.quick("last")
@pytest.mark.parametrize("where", ["first", "last"])
def test_the_padding_row_gets_no_gradient_on_the_rank_that_has_it(ranks, where):
    trains(ranks, models.get(f"vocabularies: padding on the {where} rank"), ["embed.weight"])


@pytest.mark.quick("2.0", "inf")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_gradients_counts_each_parameter_once(ranks, norm_type):
    """Those that every rank has whole count once; of the others each rank has a part."""
    options = {"max_grad_norm": 0.05, "norm_type": norm_type, "optimizer": "sgd"}
    trains(ranks, models.get("linears: kv-1"), ["head.weight"], "dp_shard=2,tp=2", **options)


def test_replicas_sum_over_the_data_ranks_alone(ranks):
    """The ranks along tp have the same data: a sum over all ranks has each sample twice."""
    trains(ranks, models.get("linears: kv-1"), ["head.weight"], "dp_replicate=2,tp=2")


def test_a_loss_needs_no_context_around_its_backward(ranks):
    """It may be computed anywhere, by torch's own functions."""
    loss, grads = traps.plain_loss()
    for mine, its in ranks.run(traps.loss_in_a_loop, 2):
        assert mine == pytest.approx(loss, rel=1e-12)
        assert its.keys() == grads.keys()
        assert all(float((its[name] - grad).abs().max()) < 1e-12 for name, grad in grads.items())


class ThreeHeads(Decoder):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = Three()


class Three(nn.Module):
    """Attention of three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*y.shape[:2], 3, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads_that_the_ranks_do_not_divide(ranks):
    """Cut evenly, 36 rows would be a head and a half each: they stay whole, and it is said why."""
    model = models.get("linears: apart")
    found = search(ThreeHeads(), run_on(None), 2)
    assert "blocks.0.attention.qkv.weight" in found.left
    assert "blocks.0.mlp.up.weight" in {weight for region in found.regions for weight in region.layers}
    assert sw.verify(ThreeHeads, "tp=2", batches=model.windows(2, 3), run=ranks.run)


def test_ranks_that_were_given_other_values_start_equal(ranks):
    """Norms and biases that every rank has whole: those of rank 0."""
    one, other = ranks.run(traps.values_of_replicated, 2)
    assert one.keys() == other.keys() and len(one) > 4
    assert all(torch.equal(value, other[name]) for name, value in one.items())
