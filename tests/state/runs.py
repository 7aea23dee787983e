"""A small run with everything that a checkpoint has to hold: dropout, ties, odd shapes, clipping, a schedule, data by position."""

import math
import random
import warnings
from pathlib import Path

import numpy as np
import torch
from models.drops import VOCAB, Drops
from torch import nn

import shardwise as sw

__all__ = ["Average", "close", "equal", "make", "run", "state"]

EVERY = sw.Sharding(min_unit_bytes=0)


class Texts:
    """Samples of unequal length; remembers which were asked for."""

    def __init__(self, num: int = 40):
        generator = torch.Generator().manual_seed(7)
        self.samples = [torch.randint(0, VOCAB, (3 + i % 5,), generator=generator) for i in range(num)]
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return self.samples[index]


class Average:
    """A moving average of a loss, with a tensor: what a user's own object may keep."""

    def __init__(self) -> None:
        self.value, self.history = torch.zeros(()), []

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss
        self.history.append(loss)

    def state_dict(self) -> dict:
        return {"value": self.value, "history": list(self.history), "pair": (1, None), "by number": {1: "a"}}

    def load_state_dict(self, state: dict) -> None:
        assert state["pair"] == (1, None) and state["by number"] == {1: "a"}
        self.value, self.history = state["value"], state["history"]


def make(layout: str, dtype: torch.dtype = torch.float64, dim: int = 7):
    """World, model, step."""
    world = sw.init(layout, device="cpu")
    torch.manual_seed(0)
    model = sw.parallelize(Drops(dim).to(dtype), world, sharding=EVERY)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optim = torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 9)
    return world, model, sw.TrainStep(model, optim, scheduler=scheduler, max_grad_norm=0.5)


def state(model: nn.Module, optim: torch.optim.Optimizer) -> tuple[dict, dict]:
    """All of it on rank 0."""
    return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optim)


def run(
    layout: str,
    root: str | Path | None,
    until: int,
    save_at: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    batch: tuple[int, int] = (12, 1),
    shows_saved: bool = False,
    **options,
) -> dict:
    """Trains up to step ``until``, resuming from ``root`` and saving there; gives what was seen, and the state at the beginning
    and at the end; with ``shows_saved`` also before each save."""
    world, model, step = make(layout, dtype)
    data, average = Texts(), Average()
    loader = sw.Loader(data, world, global_batch=batch[0], micro_batch=batch[1])
    found: dict = {"figures": [], "samples": [], "draws": [], "began": None, "saved": []}
    with world:
        manager = sw.CheckpointManager(root, step, extra={"average": average}, **options) if root is not None else None
        windows = loader
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if manager is not None:
                windows = manager.resume(loader)
        found["warnings"] = [str(w.message) for w in caught]
        found["first"] = state(model, step.optim)
        found["began"] = step.num_steps
        while step.num_steps < until:
            for window in windows:
                out = step(window)
                average.add(out.loss)
                found["figures"].append((out.loss, out.grad_norm, step.optim.param_groups[0]["lr"]))
                found["samples"].append(sorted(i for part in world.gather(list(data.asked)) for i in part))
                data.asked.clear()
                found["draws"].append((random.random(), float(np.random.rand()), float(torch.rand(()))))
                if manager is not None and step.num_steps in save_at:
                    found["saved"] += [state(model, step.optim)] if shows_saved else []
                    manager.save(metrics={"loss": out.loss})
                if step.num_steps == until:
                    break
            windows = loader if manager is None else manager.resume(loader)
        if manager is not None:
            manager.close()
        found["last"] = state(model, step.optim)
        found["average"] = (average.value, average.history)
    return found


def equal(a, b) -> bool:
    """To the last bit, in type and order."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def close(a: dict, b: dict, bound: float) -> bool:
    """Two models' tensors, by their largest difference."""
    return all(
        bool((a[name] == b[name]).all())
        if not a[name].is_floating_point()
        else float((a[name] - b[name]).abs().max()) <= bound * max(1.0, float(b[name].abs().max()))
        for name in a
    )
