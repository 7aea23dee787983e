"""Runs the chosen transforms on a module, before it is read."""

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.errors import ShardwiseError, UsageError
from shardwise.techniques.transforms.options import Chosen, Function
from shardwise.world import World


def prepare(
    module: nn.Module, world: World | None, device: torch.device | None, *, transforms: Sequence[Chosen]
) -> nn.Module:
    """``module`` after all of ``transforms``, in order.

    Args:
        module: the module to change.
        world: for transforms that ask for it; None: there is none, as in the one plain process of ``verify``.
        device: for transforms that ask for it; None: the CPU.
        transforms: the transforms to run.

    Raises:
        UsageError: one of them (named) failed, returned something other than a module, or needs a world where there is
            none.
    """
    for i, each in enumerate(transforms, start=1):
        where = f"transform {each.transform.name!r} ({i} of {len(transforms)})"
        given = [module] if each.config is None else [module, each.config]
        asked = _asked_for(each.transform.function, len(given), where, world, device or torch.device("cpu"))
        try:
            result = each.transform.function(*given, **asked)
        except ShardwiseError:
            raise
        except Exception as error:
            raise UsageError(
                where, why=f"it raised {type(error).__name__}: {error}", fix="see the traceback of that error, above"
            ) from error
        if result is not None and not isinstance(result, nn.Module):
            raise UsageError(
                where,
                why=f"it returned a {type(result).__name__}",
                fix="change the module in place, or return a module",
            )
        module = result if result is not None else module
    return module


def _asked_for(
    function: Function, num_given: int, where: str, world: World | None, device: torch.device
) -> dict[str, World | torch.device]:
    """``world`` and ``device``, if the function has these parameters after the ``num_given`` positional ones."""
    parameters = dict([*inspect.signature(function).parameters.items()][num_given:])
    asked: dict[str, World | torch.device] = {"device": device} if "device" in parameters else {}
    if "world" in parameters and world is not None:
        asked["world"] = world
    elif "world" in parameters and parameters["world"].default is inspect.Parameter.empty:
        raise UsageError(
            f"{where}: it takes the world",
            why="the module is built in one plain process here, as verify does, where there is none",
            fix="give it a default: world=None, and say what the transform does without",
        )
    return asked
