"""Refuses collectives of the user's code over what a rank runs only because others run something: statistics of all ranks' samples, features
that are gathered, in the forward or the loss. A copy of a micro-batch would be in what they give the others."""

import sys
from types import FrameType
from typing import Any

from shardwise._torch.autograd import TorchDispatchMode
from shardwise.errors import UsageError

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


class NoOwnCollectives(TorchDispatchMode):
    """Within: a collective of the user's code, or a value that it sends, is refused; those of this library go on, and those of
    parameters: of DTensors, and of a module that torch's own FSDP gathers, such as a teacher.

    Args:
        what: is run, and counts nowhere.
    """

    supports_higher_order_operators = True  # recomputed compiled blocks consist of them

    def __init__(self, what: str):
        super().__init__()
        self._what = what

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise compiled blocks would run uncompiled within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func._schema.name.partition("::")[2].strip("_").removesuffix("_base")
            if name not in _HARMLESS and _is_of_user():
                raise UsageError(
                    f"a collective of your own ({name}) in the forward or the loss, on {self._what}",
                    why="this rank has no micro-batch left there, and runs a copy of one, so that every rank makes the same exchanges; its sums and "
                    "gradients count nowhere, but its values would be in what the collective gives the other ranks",
                    fix="give every rank equally many micro-batches: a dataset of a multiple of global_batch samples, such as "
                    "torch.utils.data.Subset(dataset, range(len(dataset) // n * n)) for n of a window",
                )
        return func(*args, **(kwargs or {}))


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
