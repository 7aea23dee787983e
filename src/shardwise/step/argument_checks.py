"""Checks of what a training step is given, the optimizer, scheduler and loss, before it computes anything, and of the state
that is loaded into it."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.config.caller import level_of_caller
from shardwise.config.suggest import first_few
from shardwise.errors import CheckpointError, UnsupportedError, UsageError
from shardwise.parallel import Runtime
from shardwise.parallel.stale import replaced_name
from shardwise.step.parameter_groups import has_groups

_FUNCTIONS = {
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "NLLLoss": "nll_loss",
    "KLDivLoss": "kl_div",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}


def refuse_torch_loss(loss: Any) -> None:
    """Raises UsageError for a loss of torch's, which takes other arguments."""
    if type(loss).__module__ == nn.modules.loss.__name__ or getattr(loss, "__module__", "") == F.__name__:
        name = getattr(loss, "__name__", type(loss).__name__)
        function = _FUNCTIONS.get(name, name if name in _FUNCTIONS.values() else "cross_entropy")
        raise UsageError(
            f"loss={name}, torch's own",
            why="it takes (output, target); here a loss takes (output, batch) and returns a sum",
            fix=f'wrap it: loss=lambda output, batch: F.{function}(output, batch["labels"], reduction="sum")',
        )


def refuse_parameters(loss: Any) -> None:
    """Raises UsageError for a loss with parameters: nothing would shard them or reduce their gradients."""
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        name = next(iter(dict(loss.named_parameters())))
        raise UsageError(
            f"loss={type(loss).__name__}, which owns parameters",
            why="only the model's parameters are sharded and reduced over the ranks",
            fix="put it in the model: model = sw.TaskModel(model, loss), and TrainStep(..., loss=None)",
            name=name,
        )


def refuse_unfit(runtime: Runtime, optim: Any, scheduler: Any) -> None:
    """Raises UsageError or UnsupportedError for an optimizer or scheduler that a step cannot use."""
    if not isinstance(optim, torch.optim.Optimizer):
        raise UsageError(
            f"TrainStep(model, {getattr(optim, '__name__', type(optim).__name__)})",
            why="it is not an optimizer object",
            fix="one with groups: torch.optim.AdamW([{'params': ..., 'lr': ...}, ...]); of two kinds: a loop of your own, `with sw.window(model, "
            "batches) as w: ...`, then step() and zero_grad() of each. CheckpointManager(root, step, extra={'second': second}) saves the second"
            if isinstance(optim, list | tuple | Mapping)
            else "pass one built from the sharded model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )
    _refuse_kind(runtime, optim)
    _refuse_foreign_parameters(runtime, optim)
    _refuse_scheduler(scheduler)


def _refuse_kind(runtime: Runtime, optim: torch.optim.Optimizer) -> None:
    kind = type(optim).__name__
    if isinstance(optim, torch.optim.LBFGS):
        raise UnsupportedError(
            "TrainStep with LBFGS",
            why="it runs forward and backward several times inside one step, through a closure",
            fix="use an optimizer that steps once per window, such as AdamW",
        )
    if kind in {"Muon", "Adafactor"} and runtime.recipe.grid.degree("fsdp") > 1 and runtime.recipe.is_cut:
        raise UnsupportedError(
            f"TrainStep with {kind} on layout {runtime.recipe.grid}",
            why="it mixes elements of a whole matrix, and this rank holds some of its rows",
            fix='keep the parameters whole: sw.init("dp_replicate=-1"); or use an elementwise optimizer such as AdamW',
        )


def _refuse_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, type) or (scheduler is not None and not callable(getattr(scheduler, "step", None))):
        raise UsageError(
            f"TrainStep(scheduler={getattr(scheduler, '__name__', repr(scheduler))})",
            why="it is not an object with step(), which is called after each optimizer step",
            fix="pass one built from the optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optim, num_steps)",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "TrainStep(scheduler=ReduceLROnPlateau)",
            why="it steps on a measured value, which a training step does not have",
            fix='leave scheduler out, and call scheduler.step(sw.evaluate(model, loader)["loss"]) after each evaluation',
        )


def _refuse_foreign_parameters(runtime: Runtime, optim: torch.optim.Optimizer) -> None:
    known = {id(param): name for name, param in runtime.parameters.items()}
    held = [param for group in optim.param_groups for param in group["params"]]
    strange = next((param for param in held if id(param) not in known), None)
    if strange is not None:
        if replaced_name(strange) is None:
            runtime.check_unchanged()  # its parameter is in the module: a part was added or replaced after sharding
        raise UsageError(
            f"{type(optim).__name__} holds a parameter of shape {tuple(strange.shape)} that the model does not have",
            why="it was built before the module was sharded, or for another model: its steps would change nothing",
            fix="build the optimizer from model.parameters() after parallelize",
            name=replaced_name(strange),
        )


def warn_of_left_out(runtime: Runtime, optim: torch.optim.Optimizer) -> None:
    """Warns, on rank 0, of trainable parameters that ``optim`` does not hold, unless the model makes its groups itself: that
    has warned."""
    held = {id(param) for group in optim.param_groups for param in group["params"]}
    rest = [name for name in runtime.trainable if id(runtime.parameters[name]) not in held]
    if rest and runtime.world.is_main and not has_groups(runtime.module):
        warnings.warn(
            f"{type(optim).__name__} holds {len(runtime.trainable) - len(rest)} of the model's {len(runtime.trainable)} trainable "
            f"parameters, without {first_few(rest)}: they are never changed, and count in the norm of the gradients. If that "
            "is meant, call requires_grad_(False) on them before parallelize; else give the optimizer model.parameters()",
            stacklevel=level_of_caller(),
        )


def facts_of_schedule(runtime: Runtime, optim: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """What a learning rate scheduler's state belongs to, which the state itself does not say: its class, the classes of
    the schedulers inside it, and the first parameter of each parameter group, since it knows groups only by number."""
    members = [{id(param) for param in group["params"]} for group in optim.param_groups]
    names = runtime.parameters.items()
    return {
        "scheduler_class": _class_of(scheduler),
        "scheduler_groups": [next((name for name, param in names if id(param) in mine), "") for mine in members],
    }


def _class_of(scheduler: Any) -> str:
    inside = ", ".join(_class_of(inner) for inner in getattr(scheduler, "_schedulers", None) or ())
    return type(scheduler).__qualname__ + (f"[{inside}]" if inside else "")


def refuse_other_state(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the state ``given`` has other parts (scheduler, scaler) than ``own``, this step's
    state."""
    facts = {"scheduler_class", "scheduler_groups"}  # older states lack them
    missing, unknown = sorted(own.keys() - given.keys() - facts), sorted(given.keys() - own.keys() - facts)
    if missing or unknown:
        raise CheckpointError(
            f"the state of a step with {', '.join(sorted(given)) or 'nothing in it'}",
            why="; ".join(
                [f"this step has a {name}, which it lacks" for name in missing]
                + [f"this step has no {name}" for name in unknown]
            ),
            fix="build the TrainStep with the same scheduler, scaler and precision as the one that was saved",
        )
    mine, theirs = ({name: state.get(name) for name in facts} for state in (own, given))
    if "scheduler" not in own or theirs["scheduler_class"] is None:
        return
    if mine["scheduler_class"] != theirs["scheduler_class"]:
        raise CheckpointError(
            f"the state of a {theirs['scheduler_class']}",
            why=f"this step's scheduler is a {mine['scheduler_class']}, which keeps other state",
            fix="build the TrainStep with the scheduler that was saved; to train on by another schedule, begin a run with the "
            "weights: sw.load_weights",
        )
    if mine["scheduler_groups"] != theirs["scheduler_groups"]:
        raise CheckpointError(
            f"the state of a {theirs['scheduler_class']} over other groups of parameters, or in another order",
            why="it knows groups by their numbers, and each would have the rate of another: they begin with "
            f"{_listed(mine['scheduler_groups'])}, and began with {_listed(theirs['scheduler_groups'])}",
            fix="give the optimizer the groups that it had, in their order",
        )


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else repr(names)
