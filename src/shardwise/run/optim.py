"""Builds optimizer, parameter groups, learning rate scheduler and gradient scaler of a training run from its configuration."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch
from torch import nn

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError
from shardwise.model.names import canonical_tensors
from shardwise.parallel import runtime_of, world_of
from shardwise.run.config import RunConfig
from shardwise.run.optim_config import Group, Optim, Schedule
from shardwise.step.parameter_groups import grouped
from shardwise.step.scale import computes_half
from shardwise.step.step import TrainStep

__all__ = ["make_optimizer", "make_scaler", "make_scheduler", "put_on_schedule"]


def make_scaler(config: RunConfig, model: nn.Module) -> torch.amp.GradScaler | None:
    """The gradient scaler with the config's settings; None where :class:`TrainStep` would not make one."""
    if not computes_half(runtime_of(model)):
        return None
    return torch.amp.GradScaler(world_of(model).device.type, **msgspec.structs.asdict(config.train.scaler))


def make_optimizer(optim: Optim, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of a config over the trained parameters, in the groups of the model's method
    ``make_parameter_groups()`` if it has one, else of the config; fused unless the config says otherwise.

    Raises:
        ConfigError: groups that have no effect, or both kinds of them.
    """
    lr = optim.settled_lr(is_pretrained=False)
    params = _groups_of(optim, lr, model)
    fused = True if optim.fused is None else optim.fused
    if optim.name == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=optim.momentum, weight_decay=optim.weight_decay, fused=fused)
    if optim.name == "adafactor":
        return torch.optim.Adafactor(params, lr=lr, weight_decay=optim.weight_decay)
    return torch.optim.AdamW(params, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=fused)


def _groups_of(optim: Optim, lr: float, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups, each with the learning rate and weight decay of its parameters."""
    own = grouped(model)
    if not optim.groups and optim.decay_on == "all":
        return own
    if len(own) > 1 or set(own[0]) > {"params"}:
        raise ConfigError(
            f"optim.{'groups' if optim.groups else 'decay_on'} for {type(model).__name__}",
            why="its method make_parameter_groups() says which parameters have other settings",
            fix="remove one of them",
        )
    settings = _matched(optim, model)
    found: dict[tuple[float, float], list[Any]] = {}
    for param in own[0]["params"]:
        group = settings.get(id(param), Group(lr_scale=1.0))
        decay = 0.0 if optim.decay_on == "matrices" and param.dim() < 2 else optim.weight_decay
        rate = group.lr if group.lr is not None else lr * (group.lr_scale or 1.0)
        key = rate, decay if group.weight_decay is None else group.weight_decay
        found.setdefault(key, []).append(param)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in found.items()]


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
    as a line at the end of the run (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395)."""
    return torch.optim.lr_scheduler.LambdaLR(optim, _factor(schedule, num_steps))


def _factor(schedule: Schedule, num_steps: int) -> Callable[[int], float]:
    """Steps done before -> the learning rate of the next one, as a part of that at the highest."""
    warmup = schedule.settled_warmup(num_steps)
    begin = num_steps - round(schedule.decay_ratio * num_steps) if schedule.name == "wsd" else warmup

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        if schedule.name == "constant" or done < begin:
            return 1.0
        # Of wsd, the first step of the decay is below 1 already: the step before it had the full rate.
        through = (
            (done - begin + 1) / max(1, num_steps - begin)
            if schedule.name == "wsd"
            else (done - begin) / max(1, num_steps - 1 - begin)
        )
        left = 1 - min(1.0, through)
        if schedule.name == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left

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
