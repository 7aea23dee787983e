"""Parts of a model with a precision of their own: their floating inputs are cast where they begin, their outputs back to
the dtype around them where they end. Their parameters are gathered in that dtype; buffers are never cast.

What a part returns and the model hands out as it is, such as the logits of a head in float32, is handed out uncast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._compat import tree_map
from shardwise.anatomy import canonical_modules, dtype_of
from shardwise.recipe import Edit

__all__ = ["apply_precision", "cast_floating_tensors"]


def cast_floating_tensors(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it cast to ``dtype``."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value)


def apply_precision(module: nn.Module, edits: Sequence[Edit]) -> None:
    """Puts the casts on the modules named in ``edits``, in place; after FSDP2's own hooks, which gather a unit for the
    backward of what it returned and so must see that, not what it is cast to."""
    modules = dict(canonical_modules(module))
    leaving = _Leaving()
    for edit in edits:
        target, args = modules[edit.module], edit.args
        compute = dtype_of(args["compute"])
        target.register_forward_pre_hook(_entry(compute), with_kwargs=True)
        if args["back"] is not None:
            target.register_forward_hook(_exit(dtype_of(args["back"]), leaving if args["leaves"] else None))
    if any(edit.args["leaves"] for edit in edits):
        module.register_forward_pre_hook(leaving.begin, prepend=True)
        module.register_forward_hook(leaving.end, prepend=True)  # before FSDP2 looks at what the model returns


def _entry(dtype: torch.dtype) -> Any:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floating_tensors(args, dtype), cast_floating_tensors(kwargs, dtype)

    return enter


def _exit(dtype: torch.dtype, leaving: "_Leaving | None") -> Any:
    def leave(_module: nn.Module, _args: Any, result: Any) -> Any:
        def back(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == dtype:
                return x
            cast = x.to(dtype)
            if leaving is not None:
                leaving.note(cast, x)
            return cast

        return tree_map(back, result)

    return leave


class _Leaving:
    """What parts outside of the blocks returned in this forward, cast and as it was."""

    def __init__(self) -> None:
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}
        self._runs = False

    def begin(self, _module: nn.Module, _args: Any) -> None:
        self._exact, self._runs = {}, True

    def note(self, cast: Tensor, exact: Tensor) -> None:
        if self._runs:
            self._exact[id(cast)] = cast, exact  # the first is held too, so that its id is not given away

    def end(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        known, self._exact, self._runs = self._exact, {}, False
        return tree_map(lambda x: known[id(x)][1] if id(x) in known else x, result)
