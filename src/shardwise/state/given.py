"""The settings with which a program built its optimizer, scheduler and gradient scaler, to compare them on resume.

A checkpoint contains them next to the current values: a learning rate that a scheduler or the loop has changed is not a
changed setting, but one that the program now builds the optimizer with is.
"""

import copy
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.parallel import Runtime
from shardwise.state.optimizer import settings_of

HOW = frozenset({"foreach", "capturable", "differentiable", "fused"})
"""Settings of how a step is computed, not what: the program's own are used."""
_MOVED = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Settings of a parameter group that a scheduler sets."""
_POSITION = frozenset(
    {"last_epoch", "base_lrs", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "T_cur", "T_i"}
    | {"best", "num_bad_epochs", "cooldown_counter", "mode_worse"}
)
"""Entries of a scheduler's state that are not settings, or are in the groups too."""
_SCALER = {
    "scale": "init_scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
}
_NONE = object()
# Optimizer -> the settings of its groups when it was first seen.
_SEEN: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Change:
    """One setting that differs between the program and the saved run.

    Attributes:
        name: its name, by which it may be overridden.
        place: what it is a setting of: "group 0 (embed.weight and 3 more)".
        group: number of the parameter group, if it is of one.
        part: "optimizer", "scheduler" or "scaler"; "" for a scheduler in ``extra``, whose settings cannot be
            overridden.
    """

    name: str
    place: str
    now: Any
    was: Any
    group: int | None = None
    part: str = "optimizer"

    def __str__(self) -> str:
        return f"{self.name} of {self.place} is {_shown(self.now)}, and was {_shown(self.was)}"


@dataclass
class Settled:
    """The values that replace those of the checkpoint when a run is resumed.

    Attributes:
        groups: for each parameter group, settings that replace the saved ones.
        step: entries of the step's state that replace the saved ones.
    """

    groups: list[dict[str, Any]]
    step: dict[str, Any] = field(default_factory=dict)

    def settings(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The settings of each parameter group after the resume, in order."""
        return [
            {key: value for key, value in theirs.items() if key not in HOW} | mine
            for theirs, mine in zip(saved, self.groups, strict=True)
        ]


class Given:
    """The settings of optimizer, scheduler and gradient scaler as they were before the first step.

    Args:
        optim: built from its parameters.
        scheduler: the scheduler of the :class:`~shardwise.TrainStep`; None: none, or one that the step does not know.
        scaler: the same for the gradient scaler.
        others: objects that the program saves too, schedulers among them.
    """

    def __init__(
        self,
        runtime: Runtime,
        optim: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: Any = None,
        others: Iterable[Any] = (),
    ):
        self._runtime, self._optim, self._scheduler, self._scaler = runtime, optim, scheduler, scaler
        if optim in _SEEN:
            self._groups: list[dict[str, Any]] = _SEEN[optim]
            self._take_parts()
        else:
            self.take()
            if any(getattr(other, "optimizer", None) is optim and getattr(other, "last_epoch", 0) for other in others):
                # It was stepped. What it has set since is not what the program gave, which ReduceLROnPlateau does not keep.
                for group in self._groups:
                    for key in () if "initial_lr" in group else _MOVED:
                        group.pop(key, None)

    def take(self) -> None:
        """Records the settings as they are now: before the first step the program may still set some by hand."""
        self._groups = _SEEN[self._optim] = [
            settings_of(self._runtime, group, self._runtime.parameters) for group in self._optim.param_groups
        ]
        self._take_parts()

    def _take_parts(self) -> None:
        self._position = scheduler_position(self._scheduler)
        self._of_scheduler = scheduler_settings(self._scheduler)
        state = {} if self._scaler is None else self._scaler.state_dict()
        self._of_scaler = {name: state[key] for key, name in _SCALER.items() if key in state}

    def state(self) -> dict[str, Any]:
        """The recorded settings, for a checkpoint; equal on every rank."""
        groups = [
            {key: value for key, inner in group.items() if (value := _plain(inner)) is not _NONE}
            for group in self._groups
        ]
        return {"groups": groups, "scheduler": self._of_scheduler, "scaler": self._of_scaler}

    # ---- what has changed ------------------------------------------------------------------------------------

    def changes(self, saved: Mapping[str, Any]) -> list[Change]:
        """All settings that differ from those of the saved run. ``saved``: the :meth:`state` in its checkpoint."""
        return [
            *self._group_changes(saved["groups"]),
            *scheduler_changes(type(self._scheduler).__name__, self._of_scheduler, saved["scheduler"]),
            *(
                Change(name, "the gradient scaler", self._of_scaler[name], was, part="scaler")
                for name, was in saved["scaler"].items()
                if name in self._of_scaler and not _same(self._of_scaler[name], was)
            ),
        ]

    def _group_changes(self, saved: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
        for number, mine in enumerate(self.state()["groups"]):
            theirs = next((other for other in saved if set(other["params"]) & set(mine["params"])), None)
            if theirs is None:
                continue
            more = f" and {len(mine['params']) - 1} more" if len(mine["params"]) > 1 else ""
            place = f"group {number} ({mine['params'][0]}{more})"
            now, was = _given_in(mine), _given_in(theirs)
            for key in now:
                if key in was and not _same(now[key], was[key]):
                    yield Change(key, place, now[key], was[key], number)

    def known(self) -> list[str]:
        groups = (key for group in self._groups for key in group if key not in ("params", "param_names", "initial_lr"))
        scheduler = () if self._scheduler is None else ("scheduler", *map(_name_in, self._of_scheduler))
        names = dict.fromkeys((*groups, *scheduler, *self._of_scaler))
        return [name for name in names if not name.startswith("_")]

    # ---- what takes effect -----------------------------------------------------------------------------------

    def settled(self, accepted: Iterable[Change], step: Mapping[str, Any]) -> Settled:
        """The values that make the ``accepted`` changes take effect. ``step``: the state of the saved step. Nothing
        changes yet."""
        found = Settled([{} for _ in self._groups])
        moved = [change for change in accepted if change.part == "scheduler" or change.name in _MOVED]
        for change in accepted:
            if change.part == "scaler":
                key = next(key for key, name in _SCALER.items() if name == change.name)
                found.step["scaler"] = {**found.step.get("scaler", step["scaler"]), key: change.now}
            elif change.group is not None and change.name in self._groups[change.group]:
                found.groups[change.group][change.name] = self._groups[change.group][change.name]
        if not moved:
            return found
        if self._scheduler is not None:
            return self._rescheduled(found, step)
        if any("initial_lr" in group for group in self._optim.param_groups):
            raise ConfigError(
                f"override of {', '.join(dict.fromkeys(change.name for change in moved))}, with a scheduler that the step does not have",
                why="the optimizer's groups have an initial_lr, so a scheduler sets their rates, and its state would set the old ones",
                fix="give it to the step: sw.TrainStep(..., scheduler=scheduler); or resume without override, and set rates afterwards",
            )
        return found

    def _rescheduled(self, found: Settled, step: Mapping[str, Any]) -> Settled:
        """Adds the rates and the state of the program's own scheduler at the step of the checkpoint: as if the run had
        used it from the beginning."""
        saved, begun = step["scheduler"], getattr(self._scheduler, "last_epoch", None)
        if scheduler_position(self._scheduler) != self._position:
            raise ConfigError(
                "override of what a scheduler sets, after it was stepped",
                why="the rate at the checkpoint's step is found by stepping the scheduler from its beginning",
                fix="resume before the first step",
            )
        reached = saved.get("last_epoch") if isinstance(saved, Mapping) else None
        is_counted = isinstance(begun, int) and isinstance(reached, int)
        num_steps = reached - begun if is_counted else step["num_steps"] - step["num_skipped"]
        groups = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in self._groups]
        stand_in = types.SimpleNamespace(
            param_groups=groups,
            defaults=self._optim.defaults,
            _opt_called=True,
            step=types.SimpleNamespace(_wrapped_by_lr_sched=True),
        )
        twin = _twin(self._scheduler, stand_in)
        try:
            for _ in range(num_steps):
                twin.step()
        except Exception as error:  # of the scheduler itself: OneCycleLR ends after total_steps
            raise ConfigError(
                f"override: {type(self._scheduler).__name__} as it is built now",
                why=f"it cannot be stepped {num_steps} times, to where the checkpoint is: {type(error).__name__}: {error}",
                fix="give it enough steps, or resume without override",
            ) from error
        for mine, group in zip(found.groups, groups, strict=True):
            mine.update({key: group[key] for key in _MOVED if key in group})
        found.step["scheduler"] = twin.state_dict()
        return found


def _twin(scheduler: Any, optim: Any) -> Any:
    """A copy of a scheduler that sets the rates of ``optim``, a stand-in; it shares the functions that the scheduler was
    built with."""
    twin = copy.copy(scheduler)
    twin.__dict__ = {key: list(value) if type(value) is list else value for key, value in vars(scheduler).items()}
    twin.optimizer = optim
    if hasattr(scheduler, "_schedulers"):
        twin._schedulers = [_twin(inner, optim) for inner in scheduler._schedulers]
    return twin


# ---- schedulers --------------------------------------------------------------------------------------------------


def scheduler_settings(scheduler: Any) -> dict[str, Any]:
    """Path -> value of the settings in a scheduler's state, without its position; {} for an object without state."""
    state = scheduler.state_dict() if callable(getattr(scheduler, "state_dict", None)) else {}
    return dict(_settings_in(state)) if isinstance(state, Mapping) else {}


def scheduler_changes(
    kind: str, mine: Mapping[str, Any], saved: Mapping[str, Any], part: str = "scheduler"
) -> list[Change]:
    """The settings of a scheduler that differ from the saved ones; those that follow from another setting are left
    out."""
    found = {
        path: Change(_name_in(path), f"the {kind}", mine[path], was, part=part)
        for path, was in saved.items()
        if path in mine and not _same(mine[path], was)
    }
    own = [change for change in found.values() if not change.name.startswith("_")]
    inner = [Change("scheduler", change.place, change.now, change.was, part=part) for change in found.values()]
    return own or inner[:1]


def scheduler_position(scheduler: Any) -> Any:
    """The position of a scheduler: if two are equal, it has not been stepped in between."""
    return getattr(scheduler, "last_epoch", None), getattr(scheduler, "_step_count", None)


def _settings_in(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if key in ("_schedulers", "lr_lambdas") and isinstance(value, list):
            for number, inner in enumerate(value):
                if isinstance(inner, Mapping):
                    yield from _settings_in(inner, f"{prefix}{key}/{number}/")
        elif key not in _POSITION and (plain := _plain(value)) is not _NONE:
            yield f"{prefix}{key}", plain


def _name_in(path: str) -> str:
    return path.rpartition("/")[2]


# ---- values ------------------------------------------------------------------------------------------------------


def _given_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that the program gave: with a scheduler, the initial learning rate, and without the
    momentum that it cycles."""
    found = {key: value for key, value in group.items() if key not in ("params", "param_names") and key not in HOW}
    if "initial_lr" in found:
        found["lr"] = found.pop("initial_lr")
    if "max_momentum" in found:
        found.pop("momentum", None)
        if "betas" in found:
            found["betas"] = tuple(found["betas"][1:])
    return found


def _plain(value: Any) -> Any:
    """A copy of a value that a checkpoint can store and compare; ``_NONE`` for any other value."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().cpu().clone() if value.numel() <= 4096 else _NONE
    if isinstance(value, Mapping):
        items = {str(key): _plain(inner) for key, inner in value.items()}
        return _NONE if any(inner is _NONE for inner in items.values()) else items
    if isinstance(value, list | tuple):
        found = [_plain(inner) for inner in value]
        return _NONE if any(inner is _NONE for inner in found) else found
    return _NONE


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        like = one if isinstance(one, Tensor) else other
        try:
            return torch.equal(*(torch.as_tensor(value, dtype=like.dtype) for value in (one, other)))
        except (TypeError, ValueError, RuntimeError):
            return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= 60 else f"{text[:60]}..."
