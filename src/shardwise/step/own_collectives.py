"""Refuses collectives of the user's code that would have some samples twice: statistics of all ranks' rows, or features that are gathered,
in the forward or the loss. So it is on a copy of a micro-batch, and over ranks of which several run the same one."""

import contextlib
import sys
from types import FrameType
from typing import Any

import torch.distributed as dist

from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.collectives import group_of
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel import Runtime

# Operators that bring no value of this rank to another, unless it is the first.
_HARMLESS = ("broadcast", "barrier", "monitored_barrier", "wait_tensor")
# Code whose collectives have no samples: ours; DTensors; modules that torch's own FSDP gathers, such as a teacher.
_OF_PARAMETERS = (
    "shardwise.",
    "torch.distributed.tensor.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
)
# Code between an operator and who called it.
_BETWEEN = ("torch.distributed.", "torch._", "torch.utils.", "torch.autograd.", "contextlib")


class _OwnCollectives(TorchDispatchMode):
    """Within: :meth:`refuse` gets the collectives of the user's code, and values that it sends; not those of this library, nor those of
    parameters: of DTensors, and of a module that torch's own FSDP gathers, such as a teacher."""

    supports_higher_order_operators = True  # recomputed compiled blocks consist of them

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise compiled blocks would run uncompiled within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func._schema.name.partition("::")[2].strip("_").removesuffix("_base")
            if name not in _HARMLESS and _is_of_user():
                self.refuse(name, group_of(func, args))
        return func(*args, **(kwargs or {}))

    def refuse(self, name: str, group: Any) -> None:
        raise NotImplementedError


class NoOwnCollectives(_OwnCollectives):
    """Refuses all of them.

    Args:
        what: is run, and counts nowhere.
    """

    def __init__(self, what: str):
        super().__init__()
        self._what = what

    def refuse(self, name: str, group: Any) -> None:
        raise UsageError(
            f"a collective of your own ({name}) in the forward or the loss, on {self._what}",
            why="this rank has no micro-batch left there, and runs a copy of one, so that every rank makes the same exchanges; its sums and "
            "gradients count nowhere, but its values would be in what the collective gives the other ranks",
            fix="give every rank equally many micro-batches: a dataset of a multiple of global_batch samples, such as "
            "torch.utils.data.Subset(dataset, range(len(dataset) // n * n)) for n of a window",
        )


class _NoneOverCopies(_OwnCollectives):
    """Refuses those over torch's default group, or over one that has ranks with other samples and ranks with the same."""

    def __init__(self, runtime: Runtime):
        super().__init__()
        world = runtime.world
        # With a share of the sums, ranks along every axis of the loss but dp compute all of it.
        is_of_dp = runtime.share_of_sums != 1 or world.axis("loss").size == world.axis("dp").size
        self._axis = world.axis("dp" if is_of_dp else "loss")
        self._same_loss = {*world.axis("loss").ranks} - {*self._axis.ranks}

    def refuse(self, name: str, group: Any) -> None:
        if group is None:  # it waits for one that has begun, for example
            return
        ranks, others = set(dist.get_process_group_ranks(group)), set(self._axis.ranks)
        # One along tp alone has parts of a tensor, of code that knows that it is cut.
        if ranks <= others or not (group is dist.group.WORLD or len(ranks & others) > 1 or ranks & self._same_loss):
            return
        raise UnsupportedError(
            f"a collective of your own ({name}) in the forward or the loss, over {len(ranks)} ranks",
            why=f"{len(self._axis.ranks)} of them have other samples than this one, or other positions, counting itself; the others have the same, "
            "which would be there several times",
            fix=f"give it group=world.axis({self._axis.name!r}).group, of what sw.init returned, and let it count that axis's size",
        )


def none_over_copies(runtime: Runtime) -> contextlib.AbstractContextManager[Any]:
    """Within: refuses a collective of the user's code in which some samples would be several times, since ranks along an axis that
    cuts layers, or positions, have the same. For a first micro-batch: it sees each operator.

    Raises:
        UnsupportedError: with the group to name.
    """
    world = runtime.world
    return contextlib.nullcontext() if world.size == world.axis("dp").size else _NoneOverCopies(runtime)


def _is_of_user() -> bool:
    """Whether the collective that runs is called by other code than this library's, DTensor's and FSDP's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_mode = frame.f_code.co_name == "__torch_dispatch__"
        if not is_mode and module.startswith(_OF_PARAMETERS):
            return False
        if not is_mode and not module.startswith(_BETWEEN):
            return True
        frame = frame.f_back
    return False
