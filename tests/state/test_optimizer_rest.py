"""Optimizers that keep more than the state of each parameter: it goes through checkpoints and state dicts, or is refused by name."""

import warnings
from unittest import mock

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


class Own(torch.optim.Optimizer):
    """Gradient descent whose rate falls with a count; a subclass says where that is."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.t = 0

    def advance(self):
        self.t += 1
        return self.t

    @torch.no_grad()
    def step(self, closure=None):
        count = self.advance()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * (group["lr"] / count))


class ByText(Own):
    def advance(self):
        values = self.state["all"]
        values["t"] = values.get("t", 0) + 1
        values["seen"] = torch.tensor([3.0, values["t"]])
        assert int(values["seen"][1]) == values["t"]
        return values["t"]


class ByAttribute(Own):
    def state_dict(self):
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state):
        state = dict(state)
        self.t = state.pop("t")
        super().load_state_dict(state)


class ByHook(Own):
    def __init__(self, params):
        super().__init__(params)
        self.register_state_dict_post_hook(lambda optim, state: {**state, "t": optim.t})
        self.register_load_state_dict_pre_hook(lambda optim, state: setattr(optim, "t", state["t"]))


class InGroups(Own):
    """As Prodigy: the step adds a key to the groups."""

    def advance(self):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
        return self.param_groups[0]["t"]


class NumberOfLayer(Own):
    """As NovoGrad: a number a parameter, of all its elements."""

    is_whole = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                square = param.grad.square().sum()
                values = self.state[param]
                square = whole(square) if self.is_whole else square
                values["v"] = values["v"] * 0.9 + square if "v" in values else square
                param.sub_(param.grad / (values["v"].sqrt() + 1e-8) * group["lr"])


class Share(NumberOfLayer):
    is_whole = False


class Wrapper(torch.optim.Optimizer):
    """As Lookahead: every second step goes half of the way from slow weights."""

    shares = True

    def __init__(self, params):
        self.base, self.t = torch.optim.Adam(list(params), lr=0.05), 0
        super().__init__(self.base.param_groups, {})
        self.take_over()

    def take_over(self):
        self.param_groups = self.base.param_groups
        if self.shares:
            self.state = self.base.state

    def state_dict(self):
        return {"base": self.base.state_dict(), "t": self.t}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.t = state["t"]
        self.take_over()

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        if self.t == 0:
            for param in params:
                self.state[param]["slow"] = param.clone()
                if self.shares:
                    zeros = torch.zeros_like(param), torch.zeros_like(param)
                    self.state[param] |= {"step": torch.tensor(0.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        self.base.step()
        self.t += 1
        if self.t % 2 == 0:
            for param in params:
                self.state[param]["slow"].lerp_(param, 0.5)
                param.copy_(self.state[param]["slow"])


class Apart(Wrapper):
    shares = False


class Unsaid(Own):
    """Its state dict has state of a parameter that ``state`` has not."""

    def state_dict(self):
        state = super().state_dict()
        return {**state, "state": {0: {"slow": torch.zeros(2)}}}


class UnsaidOfGroup(Own):
    def state_dict(self):
        state = super().state_dict()
        return {**state, "param_groups": [{**group, "t": 1} for group in state["param_groups"]]}


class ByNumber(Own):
    def advance(self):
        self.state[1] = {"t": 1}
        return 1


class Beside(Own):
    """Its count is the state of a parameter too."""

    def advance(self):
        count = self.state[self.param_groups[0]["params"][0]].setdefault("t", torch.tensor(0.0))
        count += 1
        return float(count)

    def state_dict(self):
        state = super().state_dict()
        return {**state, "t": state["state"][0]["t"]}


KINDS = (ByText, ByAttribute, ByHook, InGroups, NumberOfLayer, Wrapper)


def build(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return sw.parallelize(model, world, sharding=sw.Sharding(min_unit_bytes=0))


def loss(out, batch):
    return (out - 1).square().sum()


def advance(step, optims, world, numbers):
    """Windows of the model of ``step``, and of the others by a loop of their own."""
    axis = world.axis("dp")
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        rows = [{"x": torch.randn(2 + i, 4, generator=generator, dtype=torch.float64)} for i in range(2)]
        step(rows[axis.rank :: axis.size])
        for model, optim in optims:
            with sw.accumulate(model, is_last=True):
                sum(loss(model(row["x"]), row) for row in rows[axis.rank :: axis.size]).backward()
            optim.step()
            optim.zero_grad()


def made(kind, world):
    """A step, and the optimizer of a second model."""
    model, other = build(world), build(world)
    step = sw.TrainStep(model, kind(model.parameters()), loss=loss, count=lambda row: len(row["x"]))
    return step, (other, kind(other.parameters()))


def trained(kinds, layout, root, way):
    """Each kind: the parameters after four windows, in one go or in two."""
    found = {}
    with sw.init(layout, device="cpu") as world:
        for kind in kinds:
            step, other = made(kind, world)
            if way != "after":
                advance(step, [other], world, (1, 2))
            with sw.CheckpointManager(
                f"{root}/{kind.__name__}", step, extra={"more": other[1], "model": other[0]}
            ) as manager:
                if way == "before":
                    manager.save()
                if way == "after":
                    assert manager.load() == 2
            if way == "dict":
                step, other = through_dict(step), (other[0], through_dict_of(*other))
            if way != "before":
                advance(step, [other], world, (3, 4))
            models = step.model, other[0]
            found[kind.__name__] = [sw.full_tensor(p.detach()).clone() for m in models for p in m.parameters()]
    return found


def through_dict_of(model, optim):
    state = sw.full_optimizer_state_dict(model, optim)
    again = type(optim)(model.parameters())
    sw.load_full_optimizer_state_dict(model, again, state)
    return again


def through_dict(step):
    optim = through_dict_of(step.model, step.optim)
    return sw.TrainStep(step.model, optim, loss=loss, count=lambda row: len(row["x"]))


def test_what_an_optimizer_keeps_besides_goes_through_checkpoints_and_state_dicts(ranks, tmp_path):
    straight = ranks.run(trained, 1, KINDS, "dp_replicate=1", tmp_path / "one", "straight")[0]
    shard, replicate = LAYOUTS["fsdp-2"][0], LAYOUTS["ddp-2"][0]
    ranks.run(trained, 2, KINDS, shard, tmp_path, "before")
    ways = {
        "resumed": ranks.run(trained, 2, KINDS, shard, tmp_path, "after")[0],
        "elsewhere": ranks.run(trained, 2, KINDS, replicate, tmp_path, "after")[0],
        "a state dict": ranks.run(trained, 2, KINDS, shard, tmp_path / "none", "dict")[0],
    }
    for way, found in ways.items():
        for name, values in straight.items():
            for one, two in zip(values, found[name], strict=True):
                assert (one - two).abs().max() < 1e-12, (way, name)


def back_to_the_beginning():
    with sw.init("dp_shard=1", device="cpu") as world:
        step, other = made(ByText, world)
        state = sw.full_optimizer_state_dict(step.model, step.optim)
        assert "rest" not in state
        advance(step, [other], world, (1, 2))
        step.optim.state[torch.ones(1)]["m"] = 1  # of a parameter that is in no group any more
        assert sw.full_optimizer_state_dict(step.model, step.optim)["rest"]["given"]["state"]["all"]["t"] == 2
        sw.load_full_optimizer_state_dict(step.model, step.optim, state)
        return list(step.optim.state)


def test_state_from_before_the_first_step_leaves_nothing_behind(ranks):
    assert ranks.run(back_to_the_beginning, 1) == [[]]


def from_an_earlier_version(root):
    with sw.init("dp_shard=1", device="cpu") as world:
        step, other = made(ByAttribute, world)
        advance(step, [other], world, (1,))
        with sw.CheckpointManager(root, step) as manager:
            with mock.patch("shardwise.state.optimizer.rest_of", return_value=None):
                manager.save()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                manager.load()
        return [str(warning.message) for warning in seen]


def test_a_checkpoint_without_what_the_optimizer_keeps_is_told(ranks, tmp_path):
    assert any("ByAttribute keeps more than" in text for text in ranks.run(from_an_earlier_version, 1, tmp_path)[0])


def refused(kind, layout, root):
    with sw.init(layout, device="cpu") as world:
        step, other = made(kind, world)
        advance(step, [other], world, (1,))
        errors = []
        with sw.CheckpointManager(root, step) as manager, pytest.raises(sw.ShardwiseError) as caught:
            manager.save()
        errors.append(str(caught.value))
        with pytest.raises(sw.ShardwiseError) as caught:
            sw.full_optimizer_state_dict(step.model, step.optim)
        return [*errors, str(caught.value)]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (Share, ("0.weight", "'v'", "number.full_tensor()")),
        (Apart, ("base/state/0/exp_avg", "self.state = self.base.state")),
        (Unsaid, ("0.weight", "'slow'", "optim.state[param]")),
        (UnsaidOfGroup, ("'t' of group 0", "self.param_groups[0][name]")),
        (Beside, ("state_dict()/t", "take it from optim.state[param]")),
        (ByNumber, ("under the key 1", "self.state['all']")),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(ranks, tmp_path, kind, texts):
    for message in ranks.run(refused, 2, kind, LAYOUTS["fsdp-2"][0], tmp_path)[0]:
        assert all(text in message for text in texts)


def whole_into_parts(root, layout, way):
    with sw.init(layout, device="cpu") as world:
        step, other = made(Apart, world)
        if way == "save":
            advance(step, [other], world, (1, 2))
        with sw.CheckpointManager(root, step) as manager:
            if way == "save":
                manager.save()
                return None
            if way == "same":
                advance(step, [other], world, (1,))
                manager.load()
                advance(step, [], world, (3,))
                return step.optim.t
            with pytest.raises(sw.CheckpointError, match=r"(?s)base/state.*were not where it was saved"):
                manager.load()
            return True


def test_whole_tensors_that_are_saved_under_replicas_are_not_put_beside_shards(ranks, tmp_path):
    shard, replicate = LAYOUTS["fsdp-2"][0], LAYOUTS["ddp-2"][0]
    ranks.run(whole_into_parts, 2, tmp_path, replicate, "save")
    assert ranks.run(whole_into_parts, 2, tmp_path, replicate, "same") == [3, 3]
    assert ranks.run(whole_into_parts, 2, tmp_path, shard, "other") == [True, True]
