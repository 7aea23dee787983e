"""An optimizer that steps on local shards: the numbers of stock stepping, and everything the user sees of it unchanged."""

import warnings

import pytest
import torch
from step.plain import assert_close, batch, build, mine, shard, sum_loss, values
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import UnsupportedError, UsageError

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 1},
}


def _backward(world, model, turn):
    with sw.window(model, mine([batch(i + 4 * turn) for i in range(4)], world)) as w:
        for b in w:
            (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()


def _whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _whole_state(optim):
    return [{key: _whole(value) for key, value in state.items()} for state in optim.state_dict()["state"].values()]


def _groups(model):
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return [{"params": weights}, {"params": others, "lr": 0.02}]


def _train(name, options, layout, local, schedule, engine="fsdp2"):
    """Three steps; the optimizer local or stock, its scheduler made before or after it became local."""
    world, model = shard(layout, engine=engine)
    with world:
        optim = getattr(torch.optim, name)(_groups(model), **options)
        scheduler = None
        if schedule == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        if local:
            assert sw.local_optimizer(sw.local_optimizer(optim)) is optim
        if schedule == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        for turn in range(3):
            _backward(world, model, turn)
            optim.step()
            if scheduler is not None:
                scheduler.step()
            optim.zero_grad()
        kept = [[p is q for p, q in zip(group["params"], other["params"], strict=True)] for group, other in zip(optim.param_groups, _groups(model), strict=True)]  # fmt: skip
        kinds = {
            key: isinstance(value, DTensor)
            for p, state in optim.state.items()
            for key, value in state.items()
            if isinstance(p, DTensor) and isinstance(value, torch.Tensor) and value.dim()
        }
        assert all(all(row) for row in kept)
        return values(model), _whole_state(optim), [group["lr"] for group in optim.param_groups], kinds


_RARE = ("RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop")  # in soak


@pytest.mark.quick("AdamW")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n in _RARE else ()) for n in OPTIMIZERS if n != "Rprop"]
)
def test_bit_equal_to_stock_stepping(ranks, name):
    stock = ranks.run(_train, 2, name, OPTIMIZERS[name], "dp_shard=2", False, "before")[0]
    for schedule in ("before", "after"):
        for found in ranks.run(_train, 2, name, OPTIMIZERS[name], "dp_shard=2", True, schedule):
            assert found[2] == stock[2]
            assert all(torch.equal(found[0][n], tensor) for n, tensor in stock[0].items())
            for got, wanted in zip(found[1], stock[1], strict=True):
                assert got.keys() == wanted.keys()
                for key, value in wanted.items():
                    same = torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
                    assert same, key
            assert found[3] and all(found[3].values()), "state of sharded parameters is seen as DTensors"


def test_rprop_which_has_no_stock_stepping_on_shards(ranks):
    """DTensor cannot run it at all; the reference is a world of one."""
    (one,) = ranks.run(_train, 1, "Rprop", OPTIMIZERS["Rprop"], "dp_shard=1", False, "before", engine=None)
    for found in ranks.run(_train, 2, "Rprop", OPTIMIZERS["Rprop"], "dp_shard=2", True, "after"):
        assert_close(found[0], one[0])


def _schedules(schedule, is_local_again):
    """The first turn of a scheduler made before or after the optimizer became local; every warning is an error."""
    world, model = shard("dp_shard=2")
    with world, warnings.catch_warnings():
        warnings.simplefilter("error")
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        if schedule == "after":
            sw.local_optimizer(optim)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        if schedule == "before" or is_local_again:
            sw.local_optimizer(optim)
        _backward(world, model, 0)
        optim.step()
        scheduler.step()
        return optim.param_groups[0]["lr"]


@pytest.mark.parametrize("is_local_again", [False, True])
@pytest.mark.parametrize("schedule", ["before", "after"])
def test_a_scheduler_does_not_take_a_local_step_for_a_missing_one(ranks, schedule, is_local_again):
    assert ranks.run(_schedules, 2, schedule, is_local_again) == [0.05, 0.05]


def _schedules_too_early(schedule):
    """A scheduler that really comes before the first step: torch's own warning is still there."""
    world, model = shard("dp_shard=2")
    with world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        if schedule == "after":
            sw.local_optimizer(optim)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        if schedule == "before":
            sw.local_optimizer(optim)
        scheduler.step()
        return [str(w.message) for w in caught if "lr_scheduler.step()" in str(w.message)]


@pytest.mark.parametrize("schedule", ["before", "after"])
def test_a_scheduler_that_comes_before_the_first_step_is_still_told(ranks, schedule):
    for texts in ranks.run(_schedules_too_early, 2, schedule):
        assert len(texts) == 1 and "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in texts[0]


def _stale():
    world = sw.init("dp_shard=2", device="cpu", timeout_s=20)
    with world:
        module = build()
        optim = torch.optim.SGD(module.parameters(), lr=0.1)
        sw.parallelize(module, world)
        sw.local_optimizer(optim)
        with pytest.raises(UsageError) as caught:
            optim.step()
        return str(caught.value)


def test_one_built_before_sharding_is_refused(ranks):
    for text in ranks.run(_stale, 2):
        assert "built before the module was sharded" in text and "after parallelize" in text


def _resumes(layout, loads_into_local):
    """Two steps, state into another optimizer (local already or not yet), two more; against four in a row."""
    found = []
    for is_broken in (False, True):
        world, model = shard(layout, engine="fsdp2")
        optim = sw.local_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for turn in range(4):
            if is_broken and turn == 2:
                state = optim.state_dict()
                optim = torch.optim.AdamW(model.parameters(), lr=0.5)
                if loads_into_local:
                    sw.local_optimizer(optim)
                optim.load_state_dict(state)
                sw.local_optimizer(optim)
            _backward(world, model, turn)
            optim.step()
            optim.zero_grad()
        found.append((values(model), _whole_state(optim)))
        world.close()
    return found


@pytest.mark.parametrize("loads_into_local", [False, True])
def test_state_travels_through_state_dict(ranks, loads_into_local):
    straight, broken = ranks.run(_resumes, 2, "dp_shard=2", loads_into_local)[0]
    assert all(torch.equal(straight[0][n], t) for n, t in broken[0].items())
    for a, b in zip(straight[1], broken[1], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def _loads_while_local():
    """A local optimizer that has stepped takes over a state loaded into it."""
    world, model = shard("dp_shard=2")
    with world:
        optim = sw.local_optimizer(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
        _backward(world, model, 0)
        optim.step()
        state = optim.state_dict()
        for entry in state["state"].values():
            entry["momentum_buffer"] = entry["momentum_buffer"] * 0 + 7.0
        optim.load_state_dict(state)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optim.step()
        return [float(_whole(s["momentum_buffer"]).flatten()[0]) for s in optim.state.values()]


def test_a_state_loaded_later_is_used(ranks):
    for found in ranks.run(_loads_while_local, 2):
        assert found and all(value == pytest.approx(0.9 * 7.0) for value in found)


class Mine(torch.optim.SGD):
    """Not on the list: a subclass may do anything."""

    def step(self, closure=None):
        self.seen = [type(p).__name__ for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def _other_optimizers():
    world, model = shard("dp_shard=2")
    with world:
        optim = Mine(model.parameters(), lr=0.1)
        with pytest.raises(UnsupportedError) as caught:
            sw.local_optimizer(optim)
        sw.TrainStep(model, optim, loss=sum_loss)(mine([batch(i) for i in range(4)], world))
        stepped = values(model)
        local = sw.local_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UnsupportedError) as refused:
            local.step(lambda: None)
    world, model = shard("dp_shard=2")
    with world:
        sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)(
            mine([batch(i) for i in range(4)], world)
        )
        same = all(torch.equal(stepped[n], t) for n, t in values(model).items())
    return str(caught.value), str(refused.value), set(optim.seen), same


def test_what_is_not_known_to_be_elementwise_steps_as_it_is(ranks):
    for text, closure, seen, same in ranks.run(_other_optimizers, 2):
        assert "local_optimizer(Mine)" in text and "AdamW" in text
        assert "closure" in closure
        assert "DTensor" in seen
        assert same
