"""Builds optimizer, parameter groups, learning rate scheduler and gradient scaler of a training run from its configuration."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch
from torch import nn

from shardwise.config.suggest import did_you_mean
from shardwise.config.target import called, load_target
from shardwise.dialects.curves import ours
from shardwise.errors import ConfigError
from shardwise.model.names import canonical_modules, canonical_tensors
from shardwise.parallel import runtime_of, world_of
from shardwise.run.config import RunConfig
from shardwise.run.muon import Muon, is_hidden_matrix
from shardwise.run.optim_config import Group, Optim, Schedule
from shardwise.step.parameter_groups import grouped
from shardwise.step.scale import computes_half
from shardwise.step.step import TrainStep

# As in transformers' Trainer; of names in lower case.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def make_scaler(config: RunConfig, model: nn.Module) -> torch.amp.GradScaler | None:
    """The gradient scaler with the config's settings; None where :class:`TrainStep` would not make one."""
    if not computes_half(runtime_of(model)):
        return None
    return torch.amp.GradScaler(world_of(model).device.type, **msgspec.structs.asdict(config.train.scaler))


def make_optimizer(optim: Optim, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of a config over the trained parameters, in the groups of the model's method
    ``make_parameter_groups()`` if it has one, else of the config; fused unless the config says otherwise."""
    lr, decay = optim.settled_lr(is_pretrained=False), optim.settled_decay
    groups = _groups_of(optim, model)
    given: dict[str, Any] = {key: value for key, value in (("lr", lr), ("weight_decay", decay)) if value is not None}
    if optim.build is not None:
        return _own_optimizer(optim.build, groups, {**given, **optim.args})
    if optim.name == "adafactor":
        return torch.optim.Adafactor(groups, **given)
    fused = True if optim.fused is None else optim.fused
    if optim.name == "muon":
        return _muon(groups, model, betas=optim.betas, fused=fused, **given)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, momentum=optim.momentum, fused=fused, **given)
    return torch.optim.AdamW(groups, betas=optim.betas, fused=fused, **given)


def base_rate(config: Optim, optim: torch.optim.Optimizer) -> float:
    """The learning rate, now, of the parameters that have none of their own; where all have one, that of the first group."""
    base, groups = config.settled_lr(is_pretrained=False), optim.param_groups
    return next((group["lr"] for group in groups if group.get("initial_lr") == base), groups[0]["lr"])


def _muon(groups: list[dict[str, Any]], model: nn.Module, **given: Any) -> Muon:
    is_hidden = is_hidden_matrix(model)
    hidden, others = (
        [
            {**group, "params": params}
            for group in groups
            if (params := [param for param in group["params"] if is_hidden(param) is wanted])
        ]
        for wanted in (True, False)
    )
    return Muon(hidden, others, **given)


def _own_optimizer(build: str, groups: list[dict[str, Any]], given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that a function of the user, or a class, makes of parameter groups."""
    shown = ", ".join(f"{key}={value}" for key, value in given.items())
    make = load_target(build, what="optim.build")
    made = called(functools.partial(make, groups), given, f"optim.build={build!r} with {shown or 'no arguments'}")
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optim.build={build!r}",
            why=f"it returned {type(made).__name__}, and training needs a torch.optim.Optimizer",
            fix="name a class of optimizers, or a function (groups, lr) that returns one",
        )
    return made


def _groups_of(optim: Optim, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups, with the learning rate and weight decay of their parameters where these are not the optimizer's."""
    own = grouped(model)
    if not optim.groups and optim.decay_on == "all":
        return own
    if len(own) > 1 or set(own[0]) > {"params"}:
        raise ConfigError(
            f"optim.{'groups' if optim.groups else 'decay_on'} for {type(model).__name__}",
            why="its method make_parameter_groups() says which parameters have other settings",
            fix="remove one of them",
        )
    settings, lr = _matched(optim, model), optim.settled_lr(is_pretrained=False)
    without_decay = _without_decay(optim.decay_on, model)
    found: dict[tuple[tuple[str, float], ...], list[Any]] = {}
    for param in own[0]["params"]:
        others: dict[str, float] = {}
        if id(param) in without_decay:
            others["weight_decay"] = 0.0
        if (group := settings.get(id(param))) is not None:
            rate = lr * group.lr_scale if lr is not None and group.lr_scale is not None else group.lr
            given = (("lr", rate), ("weight_decay", group.weight_decay))
            others |= {key: value for key, value in given if value is not None}
        found.setdefault(tuple(sorted(others.items())), []).append(param)
    return [{"params": params, **dict(others)} for others, params in found.items()]


def _without_decay(decay_on: str, model: nn.Module) -> set[int]:
    """The ids of parameters that weight decay is not for. ``names`` is the rule of transformers' Trainer: the first name of a shared
    parameter counts, and a layer norm is one by its class, whatever it is called."""
    if decay_on != "names":
        return {id(param) for param in model.parameters() if decay_on == "matrices" and param.dim() < 2}
    first: dict[int, bool] = {}
    norms = {name for name, module in canonical_modules(model) if name and isinstance(module, nn.LayerNorm)}
    for name, module, attr in canonical_tensors(model, "_parameters"):
        is_in_norm = any(above in norms for above in itertools.accumulate(name.split("."), "{}.{}".format))
        first.setdefault(id(module._parameters[attr]), is_in_norm or _UNDECAYED.search(name.lower()) is not None)
    return {param for param, is_without in first.items() if is_without}


def _matched(optim: Optim, model: nn.Module) -> dict[int, Group]:
    """The id of each trained parameter that a pattern of ``optim.groups`` names -> what the first of these patterns says."""
    names: dict[int, list[str]] = {}
    for name, module, attr in canonical_tensors(model, "_parameters"):
        param = module._parameters[attr]
        if param is not None and param.requires_grad:
            names.setdefault(id(param), []).append(name)
    found: dict[int, Group] = {}
    for pattern, settings in optim.groups.items():
        named = [i for i, all_names in names.items() if any(fnmatchcase(name, pattern) for name in all_names)]
        if not set(named) - found.keys():
            every = [name for all_names in names.values() for name in all_names]
            raise ConfigError(
                f"optim.groups[{pattern!r}]",
                why="an earlier pattern has all of these parameters, so it would have no effect"
                if named
                else "it names no parameter that is trained",
                fix="put it before that one" if named else did_you_mean(pattern, every, what="parameters"),
            )
        found |= {i: Group(**settings) for i in named if i not in found}
    return found


def make_scheduler(
    schedule: Schedule, optim: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate scheduler: a linear rise, then constant, or down to the floor at the last step: as a cosine, as a line, or
    as a line at the end of the run (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395); or a curve of the user's own."""
    return torch.optim.lr_scheduler.LambdaLR(optim, _factor(schedule, num_steps))


def _factor(schedule: Schedule, num_steps: int) -> Callable[[int], float]:
    """Steps done before -> the learning rate of the next one, as a part of that at the highest."""
    if schedule.build is not None:
        return _own_factor(schedule.build, schedule.args, num_steps)
    warmup = schedule.settled_warmup(num_steps)
    return lambda done: ours(done, num_steps, schedule.name, warmup, schedule.min_lr_ratio, schedule.decay_ratio)


def _own_factor(build: str, args: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    """The curve that a function of the user makes, checked at each step."""
    function = load_target(build, what="schedule.build")
    args = dict(args)
    steps = args.pop("steps", num_steps)
    shown = "".join(f", {key}={value}" for key, value in args.items())

    def factor(done: int) -> float:
        given = f"schedule.build={build!r} for ({done}, {steps}{shown})"
        part = called(functools.partial(function, done, steps), args, given)
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < math.inf:
            raise ConfigError(
                given,
                why=f"it returned {part!r}, and a learning rate is optim.lr times a number that is not negative",
                fix="return a part of the highest rate: 1.0 is all of it, 0 none",
            )
        return float(part)

    return factor


def put_on_schedule(step: TrainStep, schedule: Schedule | None = None, num_steps: int = 0) -> None:
    """Sets the learning rates of a resumed step from this run's schedule: the checkpoint has those of the schedule of
    the run that saved it, which may have been shorter. ``schedule``: over ``num_steps``, which were counted anew; None: the one
    that the step has."""
    optim, scheduler = step.optim, step.scheduler
    if schedule is not None:
        scheduler.lr_lambdas = [_factor(schedule, num_steps)] * len(scheduler.lr_lambdas)
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optim.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
