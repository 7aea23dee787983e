"""Finds where a module draws random numbers: two runs of it then differ, sharded or not."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shardwise.step.step_state import StepState
from shardwise.verify.oracle import Task
from shardwise.world.rng import set_streams, streams


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Restores the random streams afterwards: a file may build a module when it is imported."""
    before = streams(torch.device("cpu"))
    try:
        yield
    finally:
        set_streams(before, torch.device("cpu"))


def drawing_modules(task: Task) -> list[str]:
    """Names of the innermost modules of ``task`` that draw random numbers in forward and loss of its first micro-batch;
    ``""`` is the module itself, or the loss. The random streams do not change."""
    module, batch = task.make(), task.windows[0][0]
    open_calls: list[list[Any]] = []
    drawing: dict[str, None] = {}

    def enter(name: str) -> None:
        open_calls.append([name, _streams(), False])

    def leave() -> None:
        name, before, inner = open_calls.pop()
        drew = _streams() != before
        if drew and not inner:
            drawing[name] = None
        if drew and open_calls:
            open_calls[-1][2] = True

    for name, part in module.named_modules():
        if part is not module:
            part.register_forward_pre_hook(lambda *_, name=name: enter(name))
            part.register_forward_hook(lambda *_: leave(), always_call=True)
    with streams_kept(), torch.no_grad(), task.lifted():
        enter("")
        task.result(module, batch, StepState(1))
        leave()
    return list(drawing)


def places_of(names: list[str]) -> str:
    """The result of :func:`drawing_modules` as text: ``'dropout', the model's own forward, or the loss, and 2
    more``."""
    first = ", ".join(repr(name) if name else "the model's own forward, or the loss" for name in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _streams() -> tuple[Any, ...]:
    _, keys, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), place
