"""How many optimizer steps a run has: those it was given, or those of so many epochs; and what has to fit into them. Torch-free."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.run.config import RunConfig

DEFAULT_STEPS = 500
"""Of a run that says neither ``train.steps`` nor ``train.epochs``."""


def steps_left(epochs: float, num_samples: int, global_batch: int, *, epoch: int = 0, position: int = 0) -> int:
    """Optimizer steps from a position in the data to the end of ``epochs``: windows as a Loader makes them, of which the last
    of an epoch may be smaller. A part of an epoch is rounded up to a whole window.

    Args:
        epoch, position: the sample that comes next, as a Loader counts.

    >>> steps_left(1.5, num_samples=10, global_batch=4)
    5
    >>> steps_left(1.5, num_samples=10, global_batch=4, epoch=1, position=4)
    1
    """
    windows = -(-num_samples // global_batch)
    exact = Fraction(repr(epochs))  # as it was written: 0.1 of 30 windows are 3, and 0.1 * 30 is more
    whole = math.floor(exact)
    last = math.ceil((exact - whole) * windows)  # windows of the epoch that is not whole
    stop = min(last * global_batch, num_samples)
    if epoch >= whole:
        return max(0, -(-(stop - position) // global_batch)) if epoch == whole else 0
    return -(-(num_samples - position) // global_batch) + (whole - epoch - 1) * windows + last


def epochs_text(epochs: float, num_samples: int, steps: int) -> str:
    """The epochs of a run and what they come to: ``3 epochs of 10 samples = 9 steps``.

    >>> epochs_text(1.0, 10, 3), epochs_text(2.5, 1000, 800)
    ('1 epoch of 10 samples = 3 steps', '2.5 epochs of 1,000 samples = 800 steps')
    """
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'} of {num_samples:,} samples = {steps:,} step{'' if steps == 1 else 's'}"


def check_steps(config: "RunConfig", steps: int) -> None:
    """Refuses a schedule that does not fit into ``steps``, and steps to look at that are after the last."""
    train, schedule = config.train, config.schedule
    given = f"train.steps={steps}" if train.epochs is None else f"train.epochs={train.epochs:g}, {steps} steps"
    for key, last in (("profile", (train.profiled_steps or [0])[-1]), ("memory_snapshot", train.memory_snapshot or 0)):
        if last > steps:
            raise ConfigError(
                f"train.{key}={getattr(train, key)} with {given}",
                why=f"the run ends before step {last}",
                fix="name earlier steps, or train longer",
            )
    warmup = schedule.settled_warmup(steps)
    decay = round(schedule.decay_ratio * steps) if schedule.name == "wsd" else 0
    if warmup + decay > steps:
        raise ConfigError(
            f"schedule.warmup_steps={warmup} with {given}"
            + (f" and decay_ratio={schedule.decay_ratio}" if decay else ""),
            why="the run would end before the learning rate has risen" + (", and gone down" if decay else ""),
            fix=f"use warmup_steps={steps // 10}, or more {'steps' if train.epochs is None else 'epochs'}",
        )
