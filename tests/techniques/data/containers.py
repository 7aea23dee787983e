"""Blocks that leave an auxiliary loss, or all that they compute, in a container that they are given."""

import collections
import contextlib
import dataclasses
import functools

import torch
from torch import nn

import shardwise as sw


@dataclasses.dataclass
class State:
    x: object = None
    aux: object = 0.0


class Plain:
    aux = 0.0


def _append(box, value):
    box.append(value)


def _add_key(box, value):
    box["aux"] = box.get("aux", 0.0) + value


def _add_attribute(box, value):
    box.aux = box.aux + value


KINDS = {  # how it is made, written and read
    "list": (list, _append, sum),
    "list in a keyword": (list, _append, sum),
    "dict": (dict, _add_key, lambda box: box["aux"]),
    "OrderedDict": (collections.OrderedDict, _add_key, lambda box: box["aux"]),
    "dataclass": (State, _add_attribute, lambda box: box.aux),
    "plain object": (Plain, _add_attribute, lambda box: box.aux),
    "list in a dict": (lambda: {"aux": []}, lambda box, value: box["aux"].append(value), lambda box: sum(box["aux"])),
    "list in a tuple": (lambda: ([], 1), lambda box, value: box[0].append(value), lambda box: sum(box[0])),
    "a place of a list": (lambda: [torch.zeros(())], lambda box, value: box.__setitem__(0, box[0] + value), sum),
}  # fmt: skip


class Notes(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer, self.gate = kind, nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, box=None):
        KINDS[self.kind][1](box, self.gate(x).softmax(-1).square().sum())
        return x + torch.tanh(self.layer(x))


class Noted(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.inner, self.head = kind, nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Notes(kind) for _ in range(3))

    def forward(self, x):
        box = KINDS[self.kind][0]()
        x = self.inner(x)
        for block in self.blocks:
            x = block(x, box=box) if "keyword" in self.kind else block(x, box)
        return {"logits": self.head(x), "aux": KINDS[self.kind][2](box)}


class Writes(nn.Module):
    """Returns nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, state):
        state.x = torch.tanh(self.layer(state.x))


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Writes() for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x):
        state = State(x * 1.0)
        for block in self.blocks:
            block(state)
        return {"logits": self.head(state.x), "aux": 0.0 * state.x.sum()}


def loss(output, batch):
    return {"loss": (output["logits"] - batch["y"]).square().sum() + output["aux"], "aux": output["aux"].detach()}


def count(batch):
    return len(batch["x"])


def windows(num: int):
    generator = torch.Generator().manual_seed(0)
    return [
        [{"x": torch.randn(1 + i % 3, 6, generator=generator), "y": torch.ones(1 + i % 3, 3)} for i in range(num)]
        for _ in range(2)
    ]


BUILDS = {**{kind: functools.partial(Noted, kind) for kind in KINDS}, "nothing returned": Written}


class Collects(nn.Module):
    """Leaves its hidden values in a list of the caller's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, seen):
        seen["hidden"].append(self.layer(x))
        return seen["hidden"][-1].sum()


def collected(**options):
    """What the caller's dict has after a forward: the types in it, and whether its own tensor is there again."""
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Collects(), world, **options)
        mine = torch.ones(2, 4)
        seen = {"hidden": [mine]}
        model(mine, seen)
        return [str(x.dtype) for x in seen["hidden"]], seen["hidden"][0] is mine


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, box):
        x = self.blocks[0](box["x"])
        if box["raises"]:
            raise KeyError("raises")
        return self.blocks[1](x)


def after_an_error(**options):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Raises(), world, **options)
        box = {"x": torch.ones(2, 4), "raises": True}
        mine = box["x"]
        with contextlib.suppress(KeyError):
            model(box)
        box["raises"] = False
        return box["x"] is mine, tuple(model(box).shape)
