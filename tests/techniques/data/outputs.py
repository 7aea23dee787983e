"""Models that return anything: each kind of output is an object from which the loss is taken, found or not by who looks into it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

WIDTH, CLASSES = 8, 5


@dataclass
class Record:
    logits: Tensor
    note: str = ""


class Plain:
    def __init__(self, logits: Tensor):
        self.hidden = {"logits": [logits]}


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor):
        self.logits = logits


def _generated(logits: Tensor):
    yield logits


WRAP = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y.detach(), y),
    "dict": lambda y: {"other": None, "logits": y},
    "dataclass": Record,
    "Categorical": lambda y: Categorical(logits=y),
    "plain object": Plain,
    "namespace": lambda y: SimpleNamespace(logits=y),
    "slots": Slotted,
    "closure": lambda y: lambda: y,
    "generator": _generated,
}
UNWRAP = {
    "tensor": lambda out: out,
    "tuple": lambda out: out[1],
    "dict": lambda out: out["logits"],
    "dataclass": lambda out: out.logits,
    "Categorical": lambda out: out.logits,
    "plain object": lambda out: out.hidden["logits"][0],
    "namespace": lambda out: out.logits,
    "slots": lambda out: out.logits,
    "closure": lambda out: out(),
    "generator": next,
}
OF_MODELS = [*WRAP, "attribute", "hook", "late closure", "late generator"]
"""Kinds of a model's output. The last two compute the head after forward has returned."""


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.inner, self.out = kind, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = UNWRAP[self.kind](x) if not isinstance(x, Tensor) else x
        return WRAP[self.kind](x + self.out(torch.tanh(self.inner(x))))


class Net(nn.Module):
    """Three blocks whose output is of one kind, between two layers; the model's own is of another."""

    def __init__(self, kind: str = "tensor", of_blocks: str = "tensor"):
        super().__init__()
        self.kind = kind
        self.inp, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block(of_blocks) for _ in range(3))
        self.logits: Any = None
        if kind == "hook":
            self.head.register_forward_hook(self._catch)

    def _catch(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.logits = output

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = UNWRAP[self.blocks[0].kind](x)
        if self.kind.startswith("late"):
            return self._later(x) if "generator" in self.kind else lambda: self.head(x)
        y = self.head(x)
        if self.kind == "attribute":
            self.logits = y
            return None
        return x.detach().sum() if self.kind == "hook" else WRAP[self.kind](y)

    def _later(self, x: Tensor):
        yield self.head(x)


def logits_of(model: Net, out: Any) -> Tensor:
    """Whatever was returned."""
    if model.kind in ("attribute", "hook"):
        return model.logits
    if model.kind.startswith("late"):
        return next(out) if "generator" in model.kind else out()
    return UNWRAP[model.kind](out)


def build(kind: str, of_blocks: str, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net(kind, of_blocks).to(dtype)


def batch(index: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Micro-batches of unequal size, with labels that are not counted."""
    size = 3 + index % 3
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 4, generator=generator, dtype=dtype)
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    labels[: index % 2] = -100
    return {"x": x, "labels": labels}
