"""Gradients asked for by name, ``backward(inputs=...)`` and ``torch.autograd.grad``: those of one process, or refused alike."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise._torch.dtensor import local_tensor
from shardwise.parallel import runtime_of

LAYOUTS = {"dp_replicate=2": 2, "dp_shard=2": 2, "dp_replicate=2,dp_shard=2": 4, "dp_shard=1": 1, "dp_shard=1,tp=2": 2}


class Probed(nn.Module):
    """Blocks with a probe behind each, which learns to read them and must not change them. The head is tied to the input layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)])
        self.probes = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 6)
        self.head.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        h, found = self.embed(x), []
        for block, probe in zip(self.blocks, self.probes, strict=True):
            h = h + block(h)
            found.append(probe(h))
        return self.scale * self.head(h), found


def build(precision=None):
    torch.manual_seed(0)
    return Probed() if precision else Probed().double()


def micros(window: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(window)
    return [{"x": torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype)} for n in (2, 3, 1, 4)]


def count(batch):
    return len(batch["x"])


def main_loss(output, given):
    return (output[0].double() - given["x"].double()).square().sum()


def probe_loss(output, i=slice(None)):
    return sum((p.double() - 0.3).square().sum() for p in output[1][i])


def probes_after(model, given, num):
    """Probes behind the model's own backward."""
    output = model(given["x"])
    (main_loss(output, given) / num).backward(retain_graph=True)
    (probe_loss(output) / num).backward(inputs=list(model.probes.parameters()))


def probes_before(model, given, num):
    output = model(given["x"])
    torch.autograd.backward([probe_loss(output) / num], inputs=list(model.probes.parameters()), retain_graph=True)
    (main_loss(output, given) / num).backward()


def nothing_else(model, given, num):
    """The only backward: of one block in the middle, and one bias before it."""
    chosen = [*model.blocks[1].parameters(), model.blocks[0][0].bias]
    (main_loss(model(given["x"]), given) / num).backward(inputs=chosen)


def scalar_and_activation(model, given, num):
    """A 0-dim parameter, a weight, and an input of the model."""
    x = given["x"].clone().requires_grad_()
    (main_loss(model(x), given) / num).backward(inputs=[model.scale, x, model.head.weight])
    assert x.grad is not None and x.grad.any()


def one_by_one(model, given, num):
    """Three losses, each to its own probe."""
    output = model(given["x"])
    for i, probe in enumerate(model.probes):
        (probe_loss(output, slice(i, i + 1)) / num).backward(inputs=list(probe.parameters()), retain_graph=i < 2)


def with_allowed(model, given, num):
    """What has no way to the loss stays without a gradient."""
    output = model(given["x"])
    (probe_loss(output, slice(0, 1)) / num).backward(inputs=[*model.probes[0].parameters(), model.head.bias])


def by_edges(model, given, num):
    """Edges of the graph in place of parameters."""
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in model.probes.parameters()]
    (probe_loss(model(given["x"])) / num).backward(inputs=edges)


LOOPS = [by_edges, probes_after, probes_before, nothing_else, scalar_and_activation, one_by_one, with_allowed]


def one_process(loop, precision=None):
    model, dtype = build(precision), torch.float32 if precision else torch.float64
    for window in range(2):
        for given in micros(window, dtype):
            loop(model, given, 10)
    return {name: param.grad for name, param in model.named_parameters()}


def sharded(layout, loop, how="window", **options):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        dtype = torch.float32 if "precision" in options else torch.float64
        if "tp" in layout:
            options["example"] = {"x": torch.randn(4, 6, dtype=dtype)}
        model = sw.parallelize(
            build(options.get("precision")),
            world,
            sharding=sw.Sharding(min_unit_bytes=0, engine=options.pop("engine", "auto")),
            **options,
        )
        axis = world.axis("dp")
        for window in range(2):
            own = micros(window, dtype)[axis.rank :: axis.size]
            if how == "window":
                with sw.window(model, own, count=count) as w:
                    for given in w:
                        loop(model, given, 10)
            else:
                for i, given in enumerate(own):
                    with sw.accumulate(model, is_last=i == len(own) - 1):
                        loop(model, given, 10)
        runtime = runtime_of(model)
        return {
            name: None
            if param.grad is None
            else [(piece.full_index, part) for piece, part in runtime.parts(name, local_tensor(param.grad))]
            for name, param in runtime.parameters.items()
        }


@pytest.mark.quick(
    "dp_replicate=2-by_edges",
    "dp_replicate=2-with_allowed",
    "dp_replicate=2,dp_shard=2-probes_before",
    "dp_shard=1-nothing_else",
    "dp_shard=1,tp=2-scalar_and_activation",
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_name_are_those_of_one_process(ranks, layout, loop):
    wanted = one_process(loop)
    for found in ranks.run(sharded, LAYOUTS[layout], layout, loop):
        assert_same(found, wanted, 1e-12)


@pytest.mark.quick(
    "nothing_else-dp_shard=2-options1",
    "nothing_else-dp_replicate=2-options3",
    "one_by_one-dp_shard=2-options2",
    "one_by_one-dp_replicate=2-options4",
    "probes_after-dp_shard=1-options0",
)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp_shard=1", {"engine": "fsdp2"}),
        ("dp_shard=2", {"remat": "full"}),
        ("dp_shard=2", {"how": "accumulate"}),
        ("dp_replicate=2", {"how": "accumulate"}),
        ("dp_replicate=2", {"remat": "full"}),
    ],
)
@pytest.mark.parametrize("loop", [probes_after, nothing_else, one_by_one])
def test_with_other_options_too(ranks, layout, options, loop):
    wanted = one_process(loop)
    for found in ranks.run(sharded, LAYOUTS[layout], layout, loop, **options):
        assert_same(found, wanted, 1e-12)


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_shard=2"])
def test_with_a_precision(ranks, layout):
    """bf16: the gradients of each step's own backward, where each parameter gets the one it is asked for."""
    wanted = one_process(probes_after, "bf16")
    for found in ranks.run(sharded, LAYOUTS[layout], layout, probes_after, precision="bf16"):
        assert_same(found, wanted, 0.05)
        assert found["probes.0.weight"][0][1].dtype == torch.float32


def assert_same(found, wanted, tolerance) -> None:
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert (found[name] is None) == (reference is None), name
        limit = tolerance * max(1.0, float(reference.abs().max())) if reference is not None else 0.0
        for index, part in found[name] or ():
            assert part.numel() == 0 or (part.double() - reference[index].double()).abs().max() <= limit, name


def gradient_of_grad(layout, allow_unused, inside):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        example = {"example": {"x": torch.randn(4, 6).double()}} if "tp" in layout else {}
        model = sw.parallelize(build(), world, sharding=sw.Sharding(min_unit_bytes=0), **example)
        given = micros(0)[world.axis("dp").rank]
        params = list(model.probes[1].parameters())
        try:
            if inside:
                with sw.window(model, [given], count=count) as w:
                    for each in w:
                        return torch.autograd.grad(probe_loss(model(each["x"])), params, allow_unused=allow_unused)
            return torch.autograd.grad(probe_loss(model(given["x"])), params, allow_unused=allow_unused)
        except sw.ShardwiseError as error:
            return type(error).__name__, error.given, error.name, str(error)


@pytest.mark.quick("dp_shard=2-*-True", "dp_replicate=2,dp_shard=2-False-False", "dp_shard=1,tp=2-True-False")
@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2,dp_shard=2", "dp_shard=1,tp=2"])
def test_grad_of_shards_is_refused_by_name(ranks, layout, inside, allow_unused):
    for found in ranks.run(gradient_of_grad, LAYOUTS[layout], layout, allow_unused, inside):
        assert found[:3] == ("UnsupportedError", "torch.autograd.grad of the model's parameters", "probes.1.weight")


def test_grad_of_one_plain_rank_is_that_of_one_process(ranks):
    model = build()
    wanted = torch.autograd.grad(probe_loss(model(micros(0)[0]["x"])), list(model.probes[1].parameters()))
    found = ranks.run(gradient_of_grad, 1, "dp_shard=1", False, False)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
