"""What people do with several models, methods and averages of weights: refused by name, and what the fix names has the numbers of
one process."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError

pytestmark = [pytest.mark.timeout(60)]

LAYOUTS = {  # layout, and options of sharding
    "one unit": ("dp_shard=2", {"units": "none"}),
    "many units": ("dp_shard=2", {"min_unit_bytes": 0}),
    "replicas": ("dp_replicate=2", {}),
}
BATCHES = [{"x": torch.full((2, 4), 0.5 + rank, dtype=torch.float64)} for rank in range(2)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def build(kind: Any = Net) -> Any:
    torch.manual_seed(0)
    return kind().double()


def said_of(call: Any) -> ShardwiseError | None:
    try:
        call()
    except ShardwiseError as error:
        return error
    return None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


# ---- two models that share a module -----------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two models over one encoder, as the fix says: one module that holds both."""

    def __init__(self):
        super().__init__()
        encoder = nn.Linear(4, 4)
        self.first = nn.Sequential(encoder, nn.Tanh(), nn.Linear(4, 3))
        self.second = nn.Sequential(encoder, nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def loss_of_two(model: Two, batch: dict[str, Tensor]) -> Tensor:
    first, second = model(batch["x"])
    return first.square().sum() + second.square().sum()


def shared(layout: str, options: dict) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        sharding = sw.Sharding(**options)
        apart = build(Two)
        sw.parallelize(apart.first, world, sharding=sharding)
        said = said_of(lambda: sw.parallelize(apart.second, world, sharding=sharding))
        model = sw.parallelize(build(Two), world, sharding=sharding)
        with sw.window(model, [BATCHES[world.rank]], count=len) as w:
            for batch in w:
                loss_of_two(model, batch).backward()
        return said, {name: whole(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_models_that_share_a_module(ranks, layout):
    """It was said to be another library's, or to have a hook that the user had not put there."""
    plain = build(Two)
    for batch in BATCHES:
        loss_of_two(plain, batch).backward()
    for said, grads in ranks.run(shared, 2, *LAYOUTS[layout]):
        assert said.given == "a part of a model that was parallelized already" and said.name == "0.weight", said
        assert "into one module" in said.fix
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


def flattened(layout: str) -> tuple:
    """What is said of LBFGS, which flattens parameters; and of the layout in its fix."""
    said = []
    for each in (layout, "dp_replicate=-1"):
        with sw.init(each, device="cpu", timeout_s=20) as world:
            model = sw.parallelize(nn.Linear(4, 5).double(), world)  # of 5 rows no rank has half
            optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

            def closure(model=model, world=world, optim=optim):
                optim.zero_grad()
                with sw.window(model, [BATCHES[world.rank]], count=len) as w:
                    for batch in w:
                        model(batch["x"]).square().sum().backward()
                return 0.0

            said.append(said_of(lambda: optim.step(closure)))  # noqa: B023
    return tuple(said)


def test_an_optimizer_that_flattens_parameters(ranks):
    """The way out was one of the user's own code, and the view is the optimizer's."""
    for said, replicated in ranks.run(flattened, 2, "dp_shard=2"):
        assert "torch.optim.LBFGS" in said.fix and "dp_replicate=-1" in said.fix
        assert replicated is None


# ---- another method than forward ---------------------------------------------------------------------------------------------


def methods(layout: str, options: dict) -> tuple:
    def loss(output: Tensor, _batch: Any) -> Tensor:
        return output.square().sum()

    with sw.init(layout, device="cpu", timeout_s=20) as world:
        sharding = sw.Sharding(**options)
        model = sw.parallelize(build(), world, sharding=sharding)
        x = BATCHES[world.rank]["x"]
        said = [said_of(lambda: model.forward(x)), said_of(lambda: model.encode(x))]
        task = sw.TaskModel(build(), loss, forward=lambda model, batch: model.encode(batch["x"]))
        task = sw.parallelize(task, world, sharding=sharding)
        step = sw.TrainStep(task, torch.optim.SGD(task.parameters(), lr=0.1), loss=None, count=lambda batch: 1)
        step([BATCHES[world.rank]])
        return said, {name: whole(param) for name, param in task.model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_method_that_is_not_forward(ranks, layout):
    """The fix said to call the model, and not how to train by another method."""
    plain = build()
    sum(plain.encode(batch["x"]).square().sum() / 2 for batch in BATCHES).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for said, params in ranks.run(methods, 2, *LAYOUTS[layout]):
        for error in said:
            if layout == "replicas":
                assert error is None
            else:
                assert "not model.forward(...)" in error.fix and "sw.TaskModel(model, loss, forward=" in error.fix, (
                    error
                )
        assert_close(params, dict(plain.named_parameters()))


# ---- averages of weights and second networks ---------------------------------------------------------------------------------


def train(model: nn.Module, target: nn.Module, optim: Any, batches: Any) -> list[Tensor]:
    """Two steps towards a target that follows slowly, with an average of the weights beside it."""
    averages = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        for batch in batches(model):
            with torch.no_grad():
                aim = target(batch["x"])
            (model(batch["x"]) - aim - 1).square().sum().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.lerp_(p, 0.1)
            for p, q in zip(target.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
    return averages


def averaged(layout: str, options: dict) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:

        def batches(model: nn.Module) -> Any:
            with sw.window(model, [BATCHES[world.rank]], count=len) as w:
                yield from w

        sharding = sw.Sharding(**options)
        model, target = (sw.parallelize(build(), world, sharding=sharding) for _ in range(2))
        target.load_state_dict(model.state_dict())
        said = [
            said_of(lambda: copy.deepcopy(model)),
            said_of(lambda: torch.optim.swa_utils.AveragedModel(model)),
            said_of(lambda: torch.save(model, io.BytesIO())),
        ]
        averages = train(model, target, torch.optim.SGD(model.parameters(), lr=0.05), batches)
        names = [name for name, _ in model.named_parameters()]
        return said, dict(zip(names, map(whole, averages), strict=True)), sw.full_state_dict(target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_average_of_weights_and_a_target(ranks, layout):
    """A copy is refused; its fix named neither a way to an average nor one to a second network."""
    plain, target = build(), build()
    averages = train(plain, target, torch.optim.SGD(plain.parameters(), lr=0.05), lambda _: BATCHES)
    names = [name for name, _ in plain.named_parameters()]
    for rank, (said, found, state) in enumerate(ranks.run(averaged, 2, *LAYOUTS[layout])):
        *of_copies, of_pickling = said
        for error in of_copies:
            assert "p.detach().clone()" in error.fix and "target.load_state_dict" in error.fix, error
        assert "torch.save or pickle of a sharded module" in of_pickling.given and "sw.save_weights" in of_pickling.fix
        assert_close(found, dict(zip(names, averages, strict=True)))
        assert_close(state, dict(target.named_parameters()) if rank == 0 else {})


# ---- a micro-batch that one rank alone leaves out ------------------------------------------------------------------------------


def left_out(layout: str, options: dict) -> dict[str, Tensor]:
    """Rank 1 leaves out its first micro-batch, rank 0 its last."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(build(), world, sharding=sw.Sharding(**options))
        with sw.window(model, [BATCHES[0], BATCHES[1]], count=len) as w:
            for i, batch in enumerate(w):
                loss = model(batch["x"]).square().sum()
                (loss * 0 if i != world.rank else loss).backward()
        return {name: whole(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_that_one_rank_alone_leaves_out(ranks, layout):
    """By ``loss * 0``, as the page on training says: with ``continue`` the other rank would wait for good."""
    plain = build()
    for batch in BATCHES:
        plain(batch["x"]).square().sum().backward()
    for grads in ranks.run(left_out, 2, *LAYOUTS[layout]):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


# ---- noise on parameters -------------------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """Layers that tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _ in range(2):
            for param in model.parameters():
                noise = torch.randn(sw.full_tensor(param).shape, dtype=param.dtype, generator=generator)
                param.add_(sw.shard_like(noise, param))


def noisy(layout: str, options: dict) -> dict[str, Tensor]:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(build(Feed), world, sharding=sw.Sharding(**options), example={"x": BATCHES[0]["x"]})
        assert ("tp" in layout) == (model.up.weight.shape != (6, 4))
        add_noise(model)
        said = said_of(lambda: sw.shard_like(torch.zeros(2), model.up.weight))
        assert "shard_like() of a tensor [2] for one that is [6, 4] as a whole" in str(said)
        return {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS.values(),
        ("dp_replicate=2,dp_shard=2", {"min_unit_bytes": 0}),
        ("tp=2", {}),
        ("dp_shard=2,tp=2", {"min_unit_bytes": 0}),
    ],
    ids=lambda pair: pair[0],
)
def test_noise_on_parameters_is_that_of_one_process(ranks, layout):
    plain = build(Feed)
    add_noise(plain)
    for found in ranks.run(noisy, 4 if "," in layout[0] else 2, *layout):
        assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
