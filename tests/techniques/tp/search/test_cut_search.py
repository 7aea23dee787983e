"""The regions of deep models: searched in two blocks of each kind, and what is found holds for the others."""

import functools
from unittest import mock

import models
import pytest
import torch
from kept_tensors import bytes_in_memory
from models.linears import WIDTH, Attention, Decoder, Mlp
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from shardwise.errors import UnsupportedError
from shardwise.model.block_kinds import block_kinds
from shardwise.model.calling import run_on
from shardwise.model.trial import Trial
from shardwise.techniques.tp.search.cut_search import find_certified, search


def both(build, call, degree=2):
    """Regions and reasons by a search of all blocks, and of some."""
    torch.manual_seed(0)
    module = build()
    whole = find_certified(Trial(module, call), degree)
    found = search(module, call, degree)
    for what in ("layers", "callers", "shares_input"):
        assert getattr(found, what) == getattr(whole, what)
    return whole, found


def same(whole, found) -> bool:
    tables = {table.weight for table in found.tables}  # which only a search looks for
    left = {weight: why for weight, why in whole.left.items() if weight not in tables}
    return sorted(whole.regions, key=repr) == sorted(found.regions, key=repr) and left == found.left


def run(module):
    return module(torch.arange(12).view(2, 6) % 19)


class Deep(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(19, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 19)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(functional.layer_norm(x, (WIDTH,)))
        return self.head(x)


class Counts(Deep):
    """Its code counts its blocks."""

    def forward(self, ids):
        x = self.embed(ids)
        for number in range(5):
            x = x + self.blocks[number](functional.layer_norm(x, (WIDTH,)))
        return self.head(x)


class HandsOn(Deep):
    """Each block also gets the hidden values of the one before it."""

    def forward(self, ids):
        x, hidden = self.embed(ids), 0
        for block in self.blocks:
            hidden = torch.relu(block.up(functional.layer_norm(x, (WIDTH,)))) + hidden
            x = x + block.down(hidden)
        return self.head(x)


class Numbered(Mlp):
    def __init__(self, number: int, groups: int = 3):
        super().__init__()
        self.layer_idx, self.num_groups = number, groups


QUICK = ("llama", "bloom", "convnext")
LONGER = ("gpt2", "t5", "mamba", "whisper", "gemma2", "swin", "clip")


@pytest.mark.quick("llama", "convnext")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in LONGER)])
def test_what_some_blocks_show_is_what_all_do(name):
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    whole, found = both(model.build, lambda module: model.forward(module, batch))
    assert same(whole, found) and whole.regions


@pytest.mark.parametrize(
    "build",
    [
        lambda: Deep(*(Mlp() for _ in range(5))),
        lambda: Deep(Mlp(), *(x for _ in range(3) for x in (Attention(), Mlp("gated")))),
        lambda: Counts(*(Mlp() for _ in range(5))),
        lambda: HandsOn(*(Mlp() for _ in range(5))),
    ],
    ids=["one kind", "in turns", "counts", "hands on"],
)
def test_lists_of_blocks(build):
    whole, found = both(build, run)
    assert same(whole, found) and whole.regions


def test_some_blocks_are_searched_and_all_are_run_at_the_end():
    called = mock.Mock()  # what the function itself keeps, a search puts back
    module = Deep(*(Mlp() for _ in range(50)))
    search(module, lambda m: (called(len(m.blocks)), run(m))[1], 2)
    calls = [call.args[0] for call in called.call_args_list]
    # Whole, and as both ranks in training; whole in eval mode, which makes no difference.
    assert set(calls[:-4]) == {2} and calls[-4:] == [50] * 4
    assert len(module.blocks) == 50


def test_a_search_keeps_no_tensors_as_large_as_outputs():
    module = Deep(Mlp(), Mlp())
    run(module)
    before = bytes_in_memory()
    search(module, lambda copy: copy(torch.arange(60_000).view(200, 300) % 19), 2)  # 9 MB
    assert bytes_in_memory() - before < 2**20


def test_kinds_of_blocks():
    def kinds(*blocks):
        return [[int(name.rpartition(".")[2]) for name in names] for names in block_kinds(Deep(*blocks))]

    assert kinds(*(Mlp() for _ in range(4))) == [[0, 1, 2, 3]]
    assert kinds(Mlp(), Mlp("gated"), Mlp(), Mlp("gated")) == [[0, 2], [1, 3]]
    # The number of a block is no difference, and no other number is taken for it.
    assert kinds(*(Numbered(number) for number in range(5))) == [[0, 1, 2, 3, 4]]
    assert kinds(*(Numbered(number, groups=3 if number < 3 else 4) for number in range(5))) == [[0, 1, 2], [3, 4]]
    wider = Mlp(layer=functools.partial(nn.Linear, bias=False))
    assert kinds(Mlp(), Mlp(), wider) == [[0, 1], [2]]


def test_a_model_that_does_not_run_is_refused_by_what_it_said():
    with pytest.raises(UnsupportedError, match="a run of Decoder without its linear layers") as caught:
        search(Decoder(), lambda module: module("words"), 2)
    assert "must be Tensor, not str" in caught.value.why and "linears.py, line" in caught.value.why


@pytest.mark.parametrize("samples", [1, 2, 16])
def test_relu_hides_outputs_at_few_samples_and_they_are_found_all_the_same(samples):
    module = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 4))
    found = search(module, lambda copy: copy(torch.ones(samples, 4, dtype=torch.float64)), 2)
    assert [region.layers for region in found.regions] == [["0.weight", "2.weight"]], found.left


class OfLong(Mlp):
    """Uses a number of its own for long inputs alone."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        h = functional.relu(self.up(x))
        return self.down(h * self.number if x.shape[1] > 64 else h)


def test_what_the_example_does_not_use_may_be_used_in_training():
    found = search(Deep(OfLong()), run, 2)
    assert "blocks.0.number beside it was not used for the example" in found.left["blocks.0.down.weight"]
    long = search(Deep(OfLong()), lambda module: module(torch.arange(130).view(2, 65) % 19), 2)
    assert "blocks.0.number" in long.regions[0].tensors


def test_a_search_leaves_generators_of_devices_alone(monkeypatch):
    """One rank searches: on the others they would go on from another state."""
    for device in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(device, "manual_seed_all" if device is not torch.mps else "manual_seed", pytest.fail)
    module, before = Deep(*(Mlp() for _ in range(3))), torch.get_rng_state()
    assert search(module, run, 2).regions
    assert torch.equal(torch.get_rng_state(), before)


class Computed(nn.Module):
    """An MLP beside a convolution; ``made`` makes the convolution and the MLP's first layer other ones."""

    def __init__(self, made):
        super().__init__()
        self.conv, self.up, self.down = made(nn.Conv1d(6, 6, 1)), made(nn.Linear(6, 8)), nn.Linear(8, 6)

    def forward(self, x):
        return self.conv(x.mT).mT + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("made", [None, parametrizations.weight_norm])
def test_a_linear_layer_whose_weight_is_computed_is_cut_and_a_convolution_is_not(made):
    found = search(Computed(made or (lambda layer: layer)), run_on({"x": torch.randn(3, 5, 6)}), 2)
    assert [region.layers for region in found.regions] == [["up.weight", "down.weight"]]
    if made is None:
        assert found.left == {"conv.weight": "it is used by conv1d, and not as the weight of a linear layer"}
    else:
        name = next(name for name in found.left if name.startswith("conv.parametrizations.weight.original"))
        assert found.left[name] == "the weight of its layer is computed from it, by torch.nn.utils.parametrize"


def test_functions_that_modules_keep_run_the_modules_of_the_copy():
    """As in minGPT: self.mlpf = lambda x: ..."""
    found = search(models.get("linears: kept-function").build(), run_on(None), 2)
    assert ["blocks.0.mlp.mlp.up.weight", "blocks.0.mlp.mlp.down.weight"] in [region.layers for region in found.regions]
    assert found.left == {}


@pytest.mark.parametrize(("heads", "degree", "works"), [(3, 2, "3"), (6, 4, "2, 3, 6")])
def test_heads_that_the_ranks_do_not_divide_are_named_with_the_degrees_that_work(heads, degree, works):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_head, self.qkv, self.out = heads, nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    found = search(nn.Sequential(Heads()), run_on({"input": torch.randn(2, 5, 12)}), degree)
    assert not found.regions
    for name in ("0.qkv.weight", "0.out.weight"):
        assert found.left[name] == f"0.n_head is {heads}, which {degree} ranks do not divide (works: {works})"
