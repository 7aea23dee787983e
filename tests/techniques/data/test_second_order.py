"""Gradients of gradients: where parameters are whole, and over tp, those of one process; where they are cut over the data ranks, refused when
they are asked for. torch would read freed memory for most layers, which ends the process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.testing import RankPool


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 3)).unsqueeze(0).transpose(1, 2)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)[0])


LAYERS = {
    "Linear": lambda: nn.Linear(6, 6),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "PReLU": lambda: nn.PReLU(6),
    "SDPA": Attention,
}


class Block(nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer, self.linear = LAYERS[layer](), nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.linear(torch.tanh(self.layer(x))))


class Net(nn.Module):
    """``forces``: takes the gradient by its input in its own forward."""

    def __init__(self, layer: str, forces: bool = False) -> None:
        super().__init__()
        self.forces, self.inner = forces, nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(layer) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x.detach().requires_grad_() if self.forces else x
        first = h = self.inner(x)
        for block in self.blocks:
            h = block(h)
        output = self.head(h)
        if not self.forces:
            return output, first
        return output, torch.autograd.grad(output.square().sum(), x, create_graph=True)[0]


def rows(sizes=(2, 3, 1, 4)):
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(n, 6, generator=generator).double(), "labels": torch.randint(3, (n,), generator=generator)}
        for n in sizes
    ]


def run_backward(model, batch, num, by: str) -> None:
    """A cross entropy and a penalty on a gradient by ``by``, divided by ``num``."""
    x = batch["x"].clone().requires_grad_()
    output, other = model(x)
    loss = F.cross_entropy(output, batch["labels"], reduction="sum")
    if by == "forces":
        return ((loss + other.square().sum()) / num).backward()
    if by == "nothing":  # a graph that nothing uses
        return (loss / num).backward(create_graph=True)
    value, inputs = {
        "input": (output.square().sum(), [x]),
        "loss by input": (loss, [x]),
        "activation": (output.square().sum(), [other]),
        "output": (loss, [output]),
        "parameters": (loss, list(model.parameters())),
    }[by]
    slopes = torch.autograd.grad(value, inputs, create_graph=True)
    return ((loss + sum(slope.square().sum() for slope in slopes)) / num).backward()


def one_process(layer: str, by: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(layer, by == "forces").double()
    for batch in rows():
        run_backward(model, batch, 10, by)
    return {name: param.grad.detach() for name, param in model.named_parameters()}


def outcome(world, layer: str, by: str, loop: str, options):
    """The largest difference of a gradient to one process; or the class, the name and the first words of an error."""
    torch.manual_seed(0)
    example = {"example": {"x": rows()[3]["x"]}} if world.axis("tp").size > 1 else {}
    model = sw.parallelize(Net(layer, by == "forces").double(), world, **options, **example)
    axis = world.axis("dp")
    micros = rows()[axis.rank :: axis.size]
    try:
        if loop == "window":
            with sw.window(model, micros) as w:
                for batch in w:
                    run_backward(model, batch, w.num_tokens, by)
        else:
            for i, batch in enumerate(micros):
                with sw.accumulate(model, is_last=i == len(micros) - 1):
                    run_backward(model, batch, 10, by)
    except sw.ShardwiseError as error:
        return type(error).__name__, error.name, error.given
    want = one_process(layer, by)
    with torch.no_grad():
        return max(float((sw.full_tensor(p.grad) - want[name]).abs().max()) for name, p in model.named_parameters())


def outcomes(layout: str, cases, options):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        return [outcome(world, *case, options) for case in cases]


THROUGH = ["input", "loss by input", "activation"]
CASES = [(layer, by, "window") for layer in LAYERS for by in (*THROUGH, "parameters")]
CASES += [("LayerNorm", by, loop) for by in ("input", "output") for loop in ("accumulate", "window")]


def is_right(found) -> bool:
    return isinstance(found, float) and found < 1e-12


def test_where_parameters_are_whole_they_are_those_of_one_process(ranks: RankPool):
    cases = [*CASES, ("Linear", "forces", "window")]
    for found in ranks.run(outcomes, 2, "dp_replicate=2", cases, {}):
        assert all(map(is_right, found)), dict(zip(cases, found, strict=True))


@pytest.mark.quick("dp_shard=1,tp=2-2")
@pytest.mark.parametrize(("layout", "size"), [("dp_shard=1,tp=2", 2), ("dp_replicate=2,tp=2", 4)])
def test_over_tp_too(ranks: RankPool, layout, size):
    cases = [case for case in CASES if case[2] == "window"]
    for found in ranks.run(outcomes, size, layout, cases, {}):
        for case, each in zip(cases, found, strict=True):
            if case[1] == "parameters":
                assert each[0] == "UnsupportedError" and "torch.autograd.grad of the model's parameters" in each[2], (
                    case
                )
            else:
                assert is_right(each), (case, each)


@pytest.mark.quick("0")
@pytest.mark.parametrize("unit", [None, 0])
def test_where_they_are_cut_they_are_refused_when_they_are_asked_for(ranks: RankPool, unit):
    options = {} if unit is None else {"sharding": sw.Sharding(min_unit_bytes=unit)}
    for found in ranks.run(outcomes, 2, "dp_shard=2", CASES, options):
        for case, each in zip(CASES, found, strict=True):
            if case[1] == "output":  # reaches no parameter
                assert is_right(each), (case, each)
            elif case[1] == "parameters":
                assert each[0] == "UnsupportedError" and each[1] == "inner.weight", case
            else:
                assert each[0] == "UnsupportedError" and "a gradient of a gradient" in each[2], (case, each)


def test_forces_in_the_models_own_forward(ranks: RankPool):
    cases = [(layer, "forces", "window") for layer in ("Linear", "LayerNorm", "PReLU")]
    for found in ranks.run(outcomes, 2, "dp_shard=2", cases, {}):
        assert all(map(is_right, found)), found
    for found in ranks.run(outcomes, 2, "dp_shard=2", cases, {"sharding": sw.Sharding(min_unit_bytes=0)}):
        assert all(each[2] == "a gradient taken inside the model's own forward" for each in found), found


def test_gradients_that_are_graphs_themselves_are_refused_over_replicas(ranks: RankPool):
    cases = [("Linear", "nothing", loop) for loop in ("window", "accumulate")]
    for found in ranks.run(outcomes, 2, "dp_replicate=2", cases, {}):
        assert all(each[2] == "backward(create_graph=True) of a model that each rank holds whole" for each in found), (
            found
        )
    assert all(map(is_right, ranks.run(outcomes, 1, "dp_shard=1", cases, {})[0]))


class Scale(nn.Module):
    """Its kernel reads what it multiplies with, whether there is memory or not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * self.w


INSIDE = {**LAYERS, "Scale": Scale, "LSTM": lambda: nn.LSTM(6, 6), "Embedding": lambda: nn.Embedding(4, 6)}


class Catching(nn.Module):
    """Keeps what its layer returns, before the rest of its forward."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer, self.linear = INSIDE[layer](), nn.Linear(6, 6)

    def forward(self, x):
        found = self.layer(x.long().clamp(0, 3)[:, 0] if isinstance(self.layer, nn.Embedding) else x)
        self.feature = found[0] if isinstance(found, tuple) else found
        return torch.tanh(self.linear(self.feature))


def of_a_feature(layer, layout, beside):
    """Gradients of a feature's own loss, with the output's in it if ``beside``; or the error."""
    torch.manual_seed(5)
    values = nn.Sequential(Catching(layer), Catching("Linear")).double().state_dict()
    x = torch.arange(48, dtype=torch.float64).reshape(8, 6).sin()
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = nn.Sequential(Catching(layer), Catching("Linear")).double()
        model.load_state_dict(values)
        model = sw.parallelize(model, world, sharding=sw.Sharding(min_unit_bytes=0))
        batch = {"x": x.tensor_split(world.axis("dp").size)[world.axis("dp").rank]}
        try:
            with sw.window(model, [batch], count=lambda batch: len(batch["x"])) as window:
                for given in window:
                    out = model(given["x"])
                    loss = model[0].feature.pow(2).sum() + (out.sum() if beside else 0)
                    (loss / window.num_tokens).backward()
        except sw.ShardwiseError as error:
            return str(error)
        return {name: sw.full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layer", INSIDE)
def test_a_backward_that_begins_inside_of_a_unit_is_refused_before_it_reads_freed_memory(ranks, layer):
    for text in ranks.run(of_a_feature, 2, layer, "dp_shard=2", False):
        assert text.startswith("0: a backward that reaches a unit whose parameters are not gathered")


@pytest.mark.parametrize(("layer", "beside"), [("Scale", True), ("PReLU", True), ("LSTM", True)])
def test_a_feature_in_a_loss_beside_the_output_is_right(ranks, layer, beside):
    wanted, _ = ranks.run(of_a_feature, 2, layer, "dp_replicate=2", beside)  # whole parameters, as in one process
    for found in ranks.run(of_a_feature, 2, layer, "dp_shard=2", beside):
        assert found.keys() == wanted.keys()
        assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-12
