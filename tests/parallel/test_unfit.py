"""Modules that cannot be sharded as they are, and errors of torch's own: each told in our words, with what to do."""

import pytest
import torch
from torch import Tensor, nn

from shardwise import Sharding
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.step.penalty import parameter_penalty
from shardwise.step.window import window
from shardwise.world import init

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8))


@pytest.mark.parametrize("how", ["module", None, "rank0"])
def test_a_lazy_module_is_refused_by_name(how):
    with init("dp_shard=1", device="cpu") as world, pytest.raises(UnsupportedError) as caught:
        parallelize(lazy() if how == "module" else lazy, world, init=None if how == "module" else how)
    assert caught.value.name == "1.weight" and "LazyLinear" in caught.value.given


@pytest.mark.parametrize("how", ["module", "callable"])
def test_a_compiled_module_is_refused(how):
    def build() -> nn.Module:
        return torch.compile(nn.Linear(4, 4))

    with init("dp_shard=1", device="cpu") as world, pytest.raises(UsageError) as caught:
        parallelize(build() if how == "module" else build, world)
    assert "torch.compile" in caught.value.given and "compile=" in caught.value.fix


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_of_torch_jit_is_refused_by_name(make):
    with init("dp_shard=1", device="cpu") as world, pytest.raises(UnsupportedError) as caught:
        parallelize(nn.Sequential(nn.Linear(4, 4), make(nn.Linear(4, 4))), world)
    assert caught.value.name == "1" and caught.value.given.endswith("a Linear")


def test_a_model_compiled_after_sharding_is_told_so():
    with init("dp_shard=1", device="cpu") as world, pytest.raises(UsageError) as caught:
        runtime_of(torch.compile(parallelize(nn.Linear(4, 4), world)))
    assert "torch.compile" in caught.value.given and "compile=" in caught.value.fix


class Net(nn.Module):
    def __init__(self, layer=nn.Linear):
        super().__init__()
        sizes = (4, 4) if layer is nn.Linear else (4,)
        self.blocks = nn.ModuleList([nn.Sequential(layer(*sizes), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def not_gathered(what: str, layout: str):
    """What is said of a gradient penalty, or of a feature caught inside a block that the loss uses alone."""
    with init(layout, device="cpu", timeout_s=20) as world:
        keep = {} if "replicate" in layout else {"min_unit_bytes": 0}
        layer = nn.LayerNorm if what == "feature of a norm" else nn.Linear
        model = parallelize(Net(layer), world, sharding=Sharding(**keep))
        caught = []
        model.blocks[1][0].register_forward_hook(lambda _m, _a, output: caught.append(output))
        try:
            with window(model, [{"x": torch.ones(2, 4)}], count=len) as w:
                for batch in w:
                    x = batch["x"].clone().requires_grad_()
                    y = model(x).pow(2).sum()
                    if what == "penalty":
                        (slope,) = torch.autograd.grad(y, x, create_graph=True)
                        y = slope.pow(2).sum()
                    else:
                        y = caught[0].pow(2).sum()
                    y.backward()
        except ShardwiseError as error:
            return type(error).__name__, error.given
        return None


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("penalty", "a gradient of a gradient (create_graph=True) through a module whose parameters are cut"),
        ("feature", "a backward that reaches a unit whose parameters are not gathered"),
        ("feature of a norm", "a backward that reaches a unit whose parameters are not gathered"),
    ],
)
def test_a_backward_of_what_is_freed_is_explained(ranks, what, given):
    assert ranks.run(not_gathered, 2, what, "dp_replicate=2") == [None, None]
    assert ranks.run(not_gathered, 2, what, "dp_shard=2") == [("UnsupportedError", given)] * 2


def weight_penalty(options: dict):
    """Gradients of a step whose loss has a weight penalty, as the error's fix says; and what is said of one in the loss itself."""
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = parallelize(Net().double(), world, sharding=Sharding(**options))
        batches = [{"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}]

        def penalty() -> Tensor:
            return sum(param.square().sum() for param in model.parameters())

        with pytest.raises(UsageError) as caught, window(model, batches, count=len) as w:
            for batch in w:
                (model(batch["x"]).sum() + penalty()).backward()
        with window(model, batches, count=len) as w:
            for batch in w:
                model(batch["x"]).sum().backward()
            parameter_penalty(model, penalty())
        return caught.value, {name: param.grad.full_tensor() for name, param in model.named_parameters()}


@pytest.mark.parametrize("options", [{"min_unit_bytes": 0}, {"units": "none"}])
def test_a_weight_penalty_in_the_loss_is_told_what_adds_one(ranks, options):
    """The fix was units="none", under which the same error came with the same fix."""
    torch.manual_seed(0)
    plain = Net().double()
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).sum().backward()
    sum(param.square().sum() for param in plain.parameters()).backward()
    for said, grads in ranks.run(weight_penalty, 2, options):
        assert said.fix.startswith("a penalty on weights: sw.parameter_penalty(model, penalty)"), said
        assert 'units="none"' not in said.fix or options != {"units": "none"}, said
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)


class Keeps(nn.Module):
    """Keeps a function that uses a parameter by itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        weight = self.inner.weight
        self.call = lambda x: torch.tanh(x @ weight.T)

    def forward(self, x):
        return self.inner(self.call(x))


def _keeping(layout):
    with init(layout, device="cpu") as world:
        try:
            parallelize(Keeps(), world, example={"x": torch.ones(4, 6)})
        except UnsupportedError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(("layout", "is_right"), [("dp_shard=2", False), ("dp_replicate=2", True), ("tp=2", True)])
def test_a_function_that_keeps_a_parameter_which_is_replaced(ranks, layout, is_right):
    """It was without a gradient, and without an error. Under tp its layer stays whole."""
    for text in ranks.run(_keeping, 2, layout):
        assert (
            text == "no error"
            if is_right
            else "inner.weight: call, a function that keeps a parameter which another one replaces" in text
        )
