"""A parameter is one object: what a user keeps of ``model.parameters()`` is what the model computes with, whatever ran before.

FSDP2 shows other objects after a forward until the next backward, so an optimizer made there, or an average kept up through them,
trains tensors that nothing reads.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.stacks import WIDTH, Stack
from techniques.data.skips import MICRO, ORDERS, At, loss_of
from torch import Tensor, nn

from shardwise import Sharding
from shardwise.errors import UsageError
from shardwise.parallel import parallelize
from shardwise.state import full_state_dict, gathered, load_full_state_dict, load_weights, save_weights
from shardwise.step.evaluate import evaluate
from shardwise.step.local_optimizer import local_optimizer
from shardwise.step.own_loop import accumulate
from shardwise.step.window import window
from shardwise.world import World, init

WHERE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one unit": ("dp_shard=2", 2, {}),
    "many units": ("dp_shard=2", 2, {"min_unit_bytes": 0}),
    "many units, kept": ("dp_shard=2", 2, {"min_unit_bytes": 0, "reshard_after_forward": False}),
    "offload": ("dp_shard=2", 2, {"min_unit_bytes": 0, "offload": True}),
    "replicas": ("dp_replicate=2", 2, {}),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4, {"min_unit_bytes": 0}),
}
ORDER = ORDERS["drawn anew each time"]


class Side:
    """A loop's view of one process (``world`` is None) or of a rank: the model, its batches, what it holds as a whole."""

    def __init__(self, world: World | None, size: int, sharding: dict[str, Any]):
        self.world, self.size, self.sharding = world, size, sharding

    def build(self, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        model = Stack().double()
        return model if self.world is None else parallelize(model, self.world, sharding=Sharding(**self.sharding))

    def batches(self, step: int, num: int = MICRO) -> list[At]:
        ranks = range(self.size) if self.world is None else [self.world.rank]
        return [At(rank, step, micro) for micro in range(num) for rank in ranks]

    def train(self, model: nn.Module, step: int, loss: Callable[[At], Tensor], num: int = MICRO) -> None:
        """Forward and backward of a window."""
        given = self.batches(step, num)
        if self.world is None:
            for at in given:
                (loss(at) / sum(each.num_tokens for each in given)).backward()
            return
        batches = [{"number": torch.tensor(i)} for i in range(len(given))]
        with window(model, batches, count=lambda b: given[int(b["number"])].num_tokens) as w:
            for b in w:
                (loss(given[int(b["number"])]) / w.num_tokens).backward()

    def run(self, model: nn.Module, step: int, num: int = 1) -> list[Tensor]:
        return [model(at.x, ORDER(at)) for at in self.batches(step, num)]


def whole(tensor: Tensor | None) -> Tensor | None:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if found is None else found.detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(param) for name, param in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(param.grad) for name, param in model.named_parameters()}


def differences(found: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> list[str]:
    largest = max((float(value.abs().max()) for value in want.values() if value is not None), default=0.0)
    faults = []
    for name, value in want.items():
        other = found[name]
        if value is None or other is None:
            faults += [] if other is value else [f"{name}: {'None' if other is None else 'not None'}"]
            continue
        error = float((other - value).abs().max()) / max(float(value.abs().max()), 1e-6 * largest, 1e-300)
        faults += [] if error < 1e-12 else [f"{name}: {error:.1e}"]
    return faults


# ---- what users write ------------------------------------------------------------------------------------------------


def loss_on(model: nn.Module) -> Callable[[At], Tensor]:
    return lambda at: loss_of(model(at.x, ORDER(at)), at)


def optimizer_after_a_look(side: Side, grad: bool) -> dict[str, Any]:
    model = side.build()
    with torch.set_grad_enabled(grad):
        side.run(model, 0)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = weights(model)
    for step in range(3):
        side.train(model, step, loss_on(model))
        optim.step()
        optim.zero_grad()
    moved = [name for name, value in weights(model).items() if not torch.equal(value, before[name])]
    return {**weights(model), "moved": torch.tensor(float(len(moved)))}


def teacher(side: Side, pairs_are_made: str) -> dict[str, Any]:
    """An average of weights kept up through parameters that were looked up once."""
    model, average = side.build(), side.build(seed=4)
    if pairs_are_made == "after a look":
        with torch.no_grad():
            side.run(average, 0)
        side.run(model, 0)
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for step in range(3):

        def loss(at: At) -> Tensor:
            with torch.no_grad():
                target = average(at.x, ORDER(at))
            outputs.append(target.square().sum())
            y = model(at.x, ORDER(at))
            return loss_of(y, at) + (y - target).square().sum()

        side.train(model, step, loss)
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for mine, other in pairs:
                mine.lerp_(other, 0.5)
    sums = torch.stack(outputs).sum()
    return {**{f"teacher.{k}": v for k, v in weights(average).items()}, **weights(model), "outputs": summed(side, sums)}


def target_network(side: Side) -> dict[str, Any]:
    """Q-learning: a copy that is set to the model every second step, and looked at before."""
    model, target = side.build(), side.build(seed=4)
    copies = dict(target.named_parameters())
    with torch.no_grad():
        side.run(target, 0)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step % 2 == 0:
            with torch.no_grad():
                for name, param in model.named_parameters():
                    copies[name].copy_(param)

        def loss(at: At) -> Tensor:
            with torch.no_grad():
                best = target(at.x, ORDER(at)).max(1).values
            return (model(at.x * 0.9, ORDER(at))[:, 0] - best).square().sum()

        side.train(model, step, loss)
        optim.step()
        optim.zero_grad()
    return {**weights(model), **{f"target.{name}": value for name, value in weights(target).items()}}


def edited_after_a_probe(side: Side, grad: bool) -> dict[str, Any]:
    model = side.build()
    with torch.set_grad_enabled(grad):
        side.run(model, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    if side.world is None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
    else:
        mine = weights(model)
        state = full_state_dict(model) or mine  # nothing on other ranks than the first
    with torch.no_grad():
        y = torch.cat(side.run(model, 1)).square().sum()
    return {**state, "output": summed(side, y)}


def probe_before_the_step(side: Side, grad: bool) -> dict[str, Any]:
    model = side.build()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        side.train(model, step, loss_on(model))
        with torch.set_grad_enabled(grad):
            side.run(model, step + 1)
        optim.step()
        optim.zero_grad()
    return weights(model)


def summed(side: Side, value: Tensor) -> Tensor:
    return value if side.world is None else side.world.axis("dp").reduce(value.detach().clone(), "sum")


SCRIPTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = {
    "an optimizer after a forward without gradients": (optimizer_after_a_look, (False,)),
    "an optimizer after a forward": (optimizer_after_a_look, (True,)),
    "a teacher": (teacher, ("at once",)),
    "a teacher that was looked at": (teacher, ("after a look",)),
    "a target network": (target_network, ()),
    "weights edited after a look": (edited_after_a_probe, (False,)),
    "weights edited after a forward": (edited_after_a_probe, (True,)),
    "a look before the step": (probe_before_the_step, (False,)),
    "a forward before the step": (probe_before_the_step, (True,)),
}


def scripts(where: str) -> dict[str, dict[str, Any]]:
    layout, size, sharding = WHERE[where]
    with init(layout, device="cpu", timeout_s=30) as world:
        return {name: run(Side(world, size, sharding), *args) for name, (run, args) in SCRIPTS.items()}


def _soak(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.mark.quick("many units", "replicas")
@pytest.mark.parametrize("where", ["many units", "offload", "replicas", *_soak("one unit", "many units, kept", "hsdp")])
def test_what_is_kept_of_a_models_parameters_is_the_models(ranks, where):
    size = WHERE[where][1]
    found = ranks.run(scripts, size, where)
    for name, (run, args) in SCRIPTS.items():
        want = run(Side(None, size, {}), *args)
        for mine in found:
            assert not differences(mine[name], want), (name, differences(mine[name], want))


# ---- what is written between a forward and its backward --------------------------------------------------------------


def optimizer(kind: str) -> Callable[[nn.Module], Any]:
    def write(model: nn.Module) -> None:
        params = list(model.parameters())
        if "AdamW" not in kind:
            optim: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, foreach="foreach" in kind)
        else:
            optim = torch.optim.AdamW(params, lr=0.1, **{word: True for word in ("foreach", "fused") if word in kind})
        (local_optimizer(optim) if "local" in kind else optim).step()

    return write


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.lerp_(param * 2, 0.5)


@torch.no_grad()
def detached(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().mul_(0.5)


@torch.no_grad()
def local(model: nn.Module) -> None:
    for param in model.parameters():
        param.to_local().mul_(0.5)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    **{kind: optimizer(kind) for kind in ("SGD", "foreach SGD", "foreach AdamW", "fused AdamW", "local AdamW")},
    "in place": in_place,
    "detached": detached,
    "local": local,
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "load_full_state_dict": lambda model: load_full_state_dict(model, full_state_dict(model)),
}


def written_in_between(where: str) -> dict[str, tuple[str, list[str]]]:
    """Name of a write -> the error of a backward after it; and what is wrong with the gradients of the next window."""
    layout, size, sharding = WHERE[where]
    found = {}
    with init(layout, device="cpu", timeout_s=30) as world:
        sides = [Side(world, size, sharding), Side(None, size, {})]
        for name, write in WRITES.items():
            model, plain = (side.build() for side in sides)
            sides[0].train(model, 0, loss_on(model))
            before = weights(model)
            loss = sum(y.square().sum() for y in sides[0].run(model, 1))
            write(model)
            try:
                with accumulate(model, is_last=True):
                    loss.backward()
                text = "no error"
            except UsageError as error:
                text = str(error)
            model.zero_grad()
            plain.load_state_dict(weights(model))
            if "load" not in name and all(torch.equal(value, before[key]) for key, value in weights(plain).items()):
                text = "nothing was written"
            for side, each in zip(sides, (model, plain), strict=True):
                side.train(each, 2, loss_on(each))
            found[name] = text, differences(gradients(model), gradients(plain))
        return found


@pytest.mark.quick("many units, kept")
@pytest.mark.parametrize("where", ["many units", "many units, kept", *_soak("one unit")])
def test_a_write_between_a_forward_and_its_backward_is_refused(ranks, where):
    """Of operations on a DTensor the tensor within knows nothing, and of those on lists the DTensor does not either."""
    for found in ranks.run(written_in_between, 2, where):
        for name, (text, wrong) in found.items():
            assert "computed with other parameters" in text, (name, text)
            assert not wrong, (name, wrong)


def a_block_by_itself(where: str) -> list[list[str]]:
    """What a block of its own gives after a write, while a forward of the whole model waits for a backward that never comes."""
    layout, size, sharding = WHERE[where]
    found = []
    with init(layout, device="cpu", timeout_s=30) as world:
        sides = [Side(world, size, sharding), Side(None, size, {})]
        model, plain = (side.build() for side in sides)
        for grad in (True, False):
            kept = sides[0].run(model, 0)
            in_place(model)
            plain.load_state_dict(weights(model))
            x = torch.ones(3, WIDTH, dtype=torch.float64)
            with torch.set_grad_enabled(grad):
                mine, one = (each.blocks[1](x) for each in (model, plain))
            found.append([] if torch.allclose(mine, one, rtol=1e-12) else [f"{grad}: {(mine - one).abs().max():.1e}"])
            del kept
        return found


@pytest.mark.parametrize("where", ["many units", "many units, kept"])
def test_a_block_called_by_itself_sees_what_was_written(ranks, where):
    for found in ranks.run(a_block_by_itself, 2, where):
        assert found == [[], []]


# ---- anything in any order -------------------------------------------------------------------------------------------


class Walk:
    """The same calls, drawn at random, on a sharded model and on one process's."""

    def __init__(self, world: World, size: int, sharding: dict[str, Any], seed: int, folder: Path):
        self.draw, self.world, self.folder = random.Random(seed), world, folder
        self.sides = [Side(world, size, sharding), Side(None, size, {})]
        self.models = [side.build() for side in self.sides]
        self.optims = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in self.models]
        self.shown = [id(param) for param in self.models[0].parameters()]
        self.number = 0
        self.waiting: list[list[Tensor]] | None = None  # losses of a forward whose backward is to come
        self.saved: list[dict[str, Tensor]] = []
        self.calls = [value for name, value in sorted(vars(Walk).items()) if name.startswith("do_")]

    def go(self, num: int) -> list[str]:
        done: list[str] = []
        for _ in range(num):
            self.number += 1
            call = self.draw.choice(self.calls)
            done.append(call.__name__.removeprefix("do_"))
            call(self)
            self.check(done)
        return done

    def check(self, done: list[str]) -> None:
        model, plain = self.models
        assert [id(param) for param in model.parameters()] == self.shown, (done, "other objects")
        assert not differences(weights(model), weights(plain)), (
            done,
            "weights",
            differences(weights(model), weights(plain)),
        )
        wrong = differences(gradients(model), gradients(plain))
        assert not wrong, (done, "gradients", wrong)

    def do_window(self) -> None:
        num = self.draw.choice([1, MICRO])
        looks = self.draw.random() < 0.5
        self.waiting = None if looks else self.waiting
        for side, model in zip(self.sides, self.models, strict=True):

            def loss(at: At, model: nn.Module = model, side: Side = side) -> Tensor:
                y = model(at.x, ORDER(at))
                if looks:
                    with torch.no_grad():
                        side.run(model, self.number)
                    list(model.parameters())
                return loss_of(y, at)

            side.train(model, self.number, loss, num)
        self.waiting = None

    def do_backward_by_itself(self) -> None:
        for side, model in zip(self.sides, self.models, strict=True):
            with self._summing(model):
                for at in side.batches(self.number, 1):
                    (loss_of(model(at.x, ORDER(at)), at) / 7).backward()
        self.waiting = None

    def _summing(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return accumulate(model, is_last=True) if model is self.models[0] else contextlib.nullcontext()

    def do_forward(self) -> None:
        self.waiting = [
            [loss_of(model(at.x, ORDER(at)), at) / 7 for at in side.batches(self.number, 1)]
            for side, model in zip(self.sides, self.models, strict=True)
        ]

    def do_backward_of_it(self) -> None:
        for losses, model in zip(self.waiting or [], self.models, strict=False):
            with self._summing(model):
                torch.stack(losses).sum().backward()
        self.waiting = None

    def do_look_without_gradients(self) -> None:
        with torch.no_grad():
            mine, one = (side.run(model, self.number) for side, model in zip(self.sides, self.models, strict=True))
        torch.testing.assert_close(mine[0], one[self.world.axis("dp").rank], rtol=1e-11, atol=1e-13)

    def do_step(self) -> None:
        self._refused_if_waiting(lambda: [optim.step() for optim in self.optims])
        if self.draw.random() < 0.7:
            for optim in self.optims:
                optim.zero_grad()

    def do_edit(self) -> None:
        def edit() -> None:
            with torch.no_grad():
                for model in self.models:
                    for param in model.parameters():
                        param.mul_(0.9)

        self._refused_if_waiting(edit)

    def _refused_if_waiting(self, write: Callable[[], Any]) -> None:
        before = [p.detach().clone() for p in self.models[1].parameters()]
        write()
        changed = any(not torch.equal(a, b) for a, b in zip(before, self.models[1].parameters(), strict=True))
        if self.waiting is not None and changed and self.sides[0].sharding.get("engine") != "ddp":
            with pytest.raises((UsageError, RuntimeError)) as caught, self._summing(self.models[0]):
                self.waiting[0][0].backward()
            assert isinstance(caught.value, UsageError) or "inplace operation" in str(caught.value), caught.value
        self.waiting = None

    def do_evaluate(self) -> None:
        model, batches = self.models[0], [{"i": torch.tensor(i)} for i in range(1 + self.world.rank)]
        at = At(self.world.rank, self.number, 0)
        evaluate(
            model,
            batches,
            loss=lambda out, _: loss_of(out, at),
            count=lambda _: at.num_tokens,
            forward=lambda m, b: m(at.x, ORDER(at)),
        )

    def do_one_rank_looks(self) -> None:
        if self.world.rank != self.draw.randrange(self.world.size):
            return
        model = self.models[0]
        model.state_dict()
        dict(model.named_parameters())
        list(model.blocks[1].parameters())
        repr(model)
        [param.shape for param in model.parameters()]

    def do_save(self) -> None:
        save_weights(self.models[0], self.folder / str(len(self.saved)))
        self.saved.append({name: value.clone() for name, value in self.models[1].state_dict().items()})

    def do_load(self) -> None:
        if not self.saved:
            return
        i = self.draw.randrange(len(self.saved))
        load_weights(self.models[0], self.folder / str(i))
        self.models[1].load_state_dict(self.saved[i])
        self.waiting = None

    def do_full_state_dict(self) -> None:
        state = full_state_dict(self.models[0])
        if self.world.is_main:
            assert not differences(state, self.models[1].state_dict())
        if self.draw.random() < 0.3:
            load_full_state_dict(self.models[0], state)
            self.waiting = None

    def do_gather(self) -> None:
        with gathered(self.models[0]):
            found = {name: param.detach().clone() for name, param in self.models[0].named_parameters()}
        assert not differences(found, dict(self.models[1].named_parameters()))
        self.waiting = None

    def do_zero(self) -> None:
        for model in self.models:
            model.zero_grad()


def walk(where: str, seeds: list[int], num: int, folder: str) -> list[list[str]]:
    layout, size, sharding = WHERE[where]
    with init(layout, device="cpu", timeout_s=30) as world:
        walks = []
        for seed in seeds:
            walks.append(Walk(world, size, sharding, seed, Path(folder) / str(seed)).go(num))
        return walks


def walk_everywhere(ranks, where: str, seeds: list[int], num: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for walks in ranks.run(walk, WHERE[where][1], where, seeds, num, folder, timeout_s=30 + 10 * len(seeds)):
            assert all(len(done) == num for done in walks)


@pytest.mark.quick("many units, kept")
@pytest.mark.parametrize("where", ["many units, kept", "one unit", *_soak("many units")])
def test_calls_in_any_order(ranks, where):
    walk_everywhere(ranks, where, [1, 2], 30)


@pytest.mark.soak
@pytest.mark.parametrize("where", list(WHERE))
def test_many_calls_in_any_order(ranks, where):
    walk_everywhere(ranks, where, list(range(10, 40)), 60)
