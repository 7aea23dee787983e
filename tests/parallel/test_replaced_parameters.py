"""A parameter that something else still holds when the module is sharded: its use is refused by name, as it is never updated."""

import collections
import functools

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError

HELD = {}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.keep(self.a.weight)

    def keep(self, weight):
        pass

    def weight(self):
        return self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.weight())))


class Global(Base):
    def keep(self, weight):
        HELD["w"] = weight

    def weight(self):
        return HELD["w"]


class OfTheClass(Base):
    def keep(self, weight):
        OfTheClass.held = weight

    def weight(self):
        return OfTheClass.held


class Deque(Base):
    def keep(self, weight):
        self.held = collections.deque([weight])

    def weight(self):
        return self.held[0]


class Partial(Base):
    def keep(self, weight):
        self.held = functools.partial(torch.mul, weight, 1.0)

    def weight(self):
        return self.held()


class Bound(Base):
    def keep(self, weight):
        self.held = weight.t

    def weight(self):
        return self.held().t()


class Cached(Base):
    def keep(self, weight):
        self.held = functools.lru_cache(lambda: self.a.weight)
        self.held()

    def weight(self):
        return self.held()


class View(Base):
    """The view is a tensor of its own: it is noticed when a backward comes from it to the parameter."""

    def keep(self, weight):
        HELD["view"] = weight.view(-1)

    def weight(self):
        return HELD["view"].view(8, 4)


KINDS = [Global, OfTheClass, Deque, Partial, Bound, Cached, View]
FUNCTIONS = {
    Global: "linear",
    OfTheClass: "linear",
    Deque: "linear",
    Partial: "mul",
    Bound: "t",
    Cached: "linear",
}


def trained(layout):
    found = {}
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        for kind in KINDS:
            torch.manual_seed(0)
            try:
                model = sw.parallelize(
                    kind(), world, sharding=sw.Sharding(min_unit_bytes=0), example={"x": torch.ones(2, 4)}
                )
                optim = torch.optim.SGD(model.parameters(), lr=0.1)
                step = sw.TrainStep(model, optim, loss=lambda out, batch: out.square().sum(), count=lambda batch: 1)
                step([{"x": torch.ones(2, 4)}])
                found[kind.__name__] = None
            except ShardwiseError as error:
                found[kind.__name__] = str(error)
    return found


def test_what_still_holds_a_parameter(ranks):
    """It computed with the values from before training, without a gradient, and nothing said so."""
    for found in ranks.run(trained, 2, "dp_shard=2"):
        for kind in KINDS:
            said = found[kind.__name__]
            assert said is not None and said.startswith("a.weight: "), (kind.__name__, said)
            what = f"{FUNCTIONS[kind]}() of" if kind in FUNCTIONS else "a backward that comes to"
            assert f"{what} a parameter that parallelize has replaced" in said, said
            assert "take the parameter from its module" in said


def test_replicas_keep_it(ranks):
    for found in ranks.run(trained, 2, "dp_replicate=2"):
        assert set(found.values()) == {None}, found


def looked_at():
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        module = Base()
        held = module.a.weight
        optim = torch.optim.SGD(module.parameters(), lr=0.1)
        module.a.weight.tag = 3
        sw.parallelize(module, world)
        optim.zero_grad()
        facts = (
            tuple(held.shape),
            held.requires_grad,
            held.grad,
            held.size(0),
            held.tag,
            str(held.dtype),
            repr(held)[:9],
        )
        refused = {}
        for name, call in {
            "detach": lambda: held.detach(),
            "data": lambda: held.data,
            "add_": lambda: held.add_(1),
            "norm": lambda: held.norm(),
            "item": lambda: held[0, 0].item(),
            "tolist": lambda: held.tolist(),
            "mul": lambda: held * 2,
            "hook": lambda: held.register_hook(print),
            "freeze": lambda: held.requires_grad_(False),
            "set": lambda: setattr(held, "data", torch.ones(8, 4)),
            "equal": lambda: torch.equal(held, held),
        }.items():
            try:
                call()
            except ShardwiseError as error:
                refused[name] = str(error)
        return facts, refused


def test_what_may_be_asked_of_it(ranks):
    for facts, refused in ranks.run(looked_at, 2):
        assert facts[:6] == ((8, 4), True, None, 8, 3, "torch.float32") and facts[6].startswith("Parameter")
        assert len(refused) == 11 and all("that parallelize has replaced" in said for said in refused.values())
        assert "data() of" in refused["set"] and refused["freeze"].startswith("a.weight: requires_grad_()")
