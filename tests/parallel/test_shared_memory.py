"""Parameters that share memory with another tensor, without being the same object: refused by name where they would come apart."""

import collections

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError
from shardwise.model.shared_memory import overlapping


class Two(nn.Module):
    """``share``: what its constructor does last."""

    def __init__(self, share):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        share(self)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def tied_by_data(model):
    model.b.weight.data = model.a.weight.data


def transposed(model):
    model.b.weight = nn.Parameter(model.a.weight.data.t())


def buffer(model):
    model.register_buffer("live", model.a.weight.data)


def attribute(model):
    model.live = model.a.weight.detach()


def within_a_list(model):
    model.lives = [{"w": model.a.weight.detach()[1:]}]


def graph(model):
    model.view = model.a.weight.t()


def flat_buffer(model):
    flat = torch.randn(32)
    model.register_buffer("flat", flat)
    model.a.weight, model.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))


def partly(model):
    flat = torch.randn(24)
    model.a.weight, model.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))


def crossed(model):
    both = torch.randn(4, 8)
    model.a.weight, model.b.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 3:7])


def array(model):
    model.live = [model.a.weight.detach().numpy()[::-1]]


APART = {  # what is said of each
    tied_by_data: ("a.weight", "in the memory of b.weight", "tie them as one Parameter"),
    transposed: ("a.weight", "in the memory of b.weight", "let forward compute it"),
    buffer: ("a.weight", "whose memory live, a buffer, shares", ".clone()"),
    attribute: ("a.weight", "whose memory live, an attribute, shares", ".clone()"),
    within_a_list: ("a.weight", "whose memory lives.0.w, an attribute, shares", ".clone()"),
    graph: ("a.weight", "whose memory view, an attribute, shares", "let forward compute it"),
    flat_buffer: ("a.weight", "whose memory flat, a buffer, shares", ".clone()"),
    partly: ("a.weight", "in the memory of b.weight", "let forward compute it"),
    crossed: ("a.weight", "in the memory of b.weight", "let forward compute it"),
}


def side_by_side(model):
    both = torch.randn(32)
    model.a.weight, model.b.weight = nn.Parameter(both[:16].view(4, 4)), nn.Parameter(both[16:].view(4, 4))


def columns(model):
    both = torch.randn(4, 8)
    model.a.weight, model.b.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


def one_parameter(model):
    model.b.weight = model.a.weight
    model.kept = [model.a.weight]


def empty(model):
    model.register_buffer("none", model.a.weight.detach()[:0])
    model.nothing = torch.empty(0), torch.empty(0).numpy()


def lstm(model):
    model.rnn = nn.LSTM(4, 4, num_layers=2)


def normed(model):
    nn.utils.spectral_norm(model.a)


def frozen_buffers(model):
    table = torch.ones(4)
    model.register_buffer("one", table)
    model.register_buffer("other", table[:2])


FINE = [side_by_side, columns, one_parameter, empty, lstm, normed, frozen_buffers]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_overlaps(device):
    for share in (*APART, *([array] if device == "cpu" else [])):
        with torch.device(device):
            found = overlapping(Two(share))
        assert found is not None and found[0].name == "a.weight", share.__name__
    for share in FINE:
        if (device, share) != ("meta", empty):
            with torch.device(device):
                assert overlapping(Two(share)) is None, share.__name__


def refused(layout):
    found = collections.defaultdict(list)
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        for share in APART:
            for model in (Two(share), lambda share=share: Two(share)):
                try:
                    sw.parallelize(model, world, example={"x": torch.ones(4, 4)})
                    found[share.__name__].append(None)
                except UnsupportedError as error:
                    found[share.__name__].append(str(error))
    return dict(found)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2", pytest.param("tp=2", marks=pytest.mark.soak)])
def test_refused_where_they_come_apart(ranks, layout):
    """They were given memory of their own without a word: ties by .data came apart in the first step."""
    for found in ranks.run(refused, 2, layout):
        for share, (name, what, fix) in APART.items():
            as_module, as_function = found[share.__name__]
            assert name in as_function and what in as_function and fix in as_function, as_function
            assert (as_module is None) == (layout == "dp_replicate=2"), (share.__name__, as_module)


def built_on_rank_0():
    found = []
    with sw.init("dp_replicate=2", device="cpu", timeout_s=20) as world:
        for share in (tied_by_data, buffer):
            try:
                sw.parallelize(lambda share=share: Two(share), world, init="rank0")
            except UnsupportedError as error:
                found.append(str(error))
    return found


def test_built_on_rank_0(ranks):
    """Its tensors are moved off, and the ties with them, before the module is read."""
    for first, second in ranks.run(built_on_rank_0, 2):
        assert "in the memory of b.weight" in first and "whose memory live, a buffer, shares" in second
