"""Dropout in forwards of a model whose blocks have this rank's positions: of these a rank draws numbers of its own; all other numbers are
equal on the ranks, as a mask of all positions, or of whole samples, must be, and which blocks are left out.

A call is known by its number in one forward of the module whose code makes it. The proof has seen what it drops.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise._torch.autograd import function_modes
from shardwise.errors import UnsupportedError
from shardwise.model.layers import bound
from shardwise.model.leaves import DROPOUT, DROPOUTS, DROPPING
from shardwise.model.names import canonical_children, canonical_modules
from shardwise.techniques.cut_forward import CutForward
from shardwise.techniques.row_exchanges import At
from shardwise.world.streams import PartStream


class _Forward:
    """A forward that runs: the name of its module, the dims of positions of what its calls drop, and the positions; None: all."""

    def __init__(self, name: str, dims: Sequence[int], at: At | None):
        self.name, self.dims, self.at = name, dims, at
        self.num_calls = 0


class RowDrops(TorchFunctionMode):
    """Within: dropout of what has this rank's positions draws numbers of the rank.

    Args:
        root: is changed.
        found: module whose own code drops something -> for each of its calls the dim of positions of what it drops; -1: there is none.
        cuts: what cuts the positions.
        stream: random numbers of this rank.
        leave_out: modules within these are left as they are.
        is_all_drawn: where the stream is entered, all calls are its own, and are not counted.
        what: cuts the positions, for messages.
    """

    def __init__(
        self,
        root: nn.Module,
        found: Mapping[str, Sequence[int]],
        cuts: CutForward,
        stream: PartStream,
        *,
        leave_out: Collection[str] = (),
        is_all_drawn: bool = False,
        what: str,
    ):
        super().__init__()
        self._cuts, self._stream, self._is_all_drawn, self._what = cuts, stream, is_all_drawn, what
        self._running: list[_Forward] = []
        modules = {
            name: module
            for name, module in canonical_modules(root)
            if not any(name == out or name.startswith(f"{out}.") for out in leave_out)
        }
        names = {id(module): name for name, module in reversed(modules.items())}
        watched: dict[str, Sequence[int]] = {"": (), **found}
        for name in list(watched):
            for child in called_children(modules[name]) if name in modules else ():
                if id(child) in names and not isinstance(child, DROPPING):
                    watched.setdefault(names[id(child)], ())
        for name, dims in watched.items():
            if name in modules:
                self._watch(modules[name], name, dims)

    def _watch(self, module: nn.Module, name: str, dims: Sequence[int]) -> None:
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            at, is_first = self._cuts.positions_now(), all(each.at is None for each in self._running)
            self._running.append(_Forward(name, dims, at))
            try:
                if at is None or not is_first or self._is_entered():
                    return inner(*args, **kwargs)
                with self:
                    return inner(*args, **kwargs)
            finally:
                self._running.pop()

        module.forward = forward

    def _is_entered(self) -> bool:
        """Whether it is active already: around a block that runs again in backward are the modes of its first run."""
        return not torch.compiler.is_compiling() and any(mode is self for mode in function_modes())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DROPOUTS or (self._is_all_drawn and self._stream.is_entered):
            return func(*args, **kwargs)
        running = self._running[-1]
        if running.at is None:
            return func(*args, **kwargs)
        number, running.num_calls = running.num_calls, running.num_calls + 1
        x, chance, is_training = bound(DROPOUT, args, kwargs)
        if chance == 0 or is_training is False:
            return func(*args, **kwargs)
        dim = running.dims[number] if number < len(running.dims) else None
        if dim is None or (dim >= 0 and (x.dim() <= dim or not self._is_of_rows(x.shape[dim], running.at))):
            raise UnsupportedError(
                f"dropout of a tensor {tuple(x.shape)} that the example did not drop, under {self._what}",
                why="whether it is of this rank's positions, for which other numbers are drawn on each rank, is not known",
                fix=f"pass example= with which the code takes this way; or set that dropout to 0; or leave {self._what} out",
                name=running.name or None,
            )
        if dim < 0 or self._stream.is_entered:
            return func(*args, **kwargs)
        with self._stream.entered(is_used=True):
            return func(*args, **kwargs)

    def _is_of_rows(self, size: int, at: At) -> bool:
        """Whether positions of this rank, or the part of them that is cut once more, can be of this number."""
        within = None if self._cuts.inner is None else self._cuts.inner.at
        return any(size % each.rows.shape[0] == 0 for each in (at, within) if each is not None)

    def without(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call of ours, such as a kernel of attention, whose dropout is not that of the model's code."""
        self._running.append(_Forward("", (), None))
        try:
            return call(*args)
        finally:
            self._running.pop()


def called_children(module: nn.Module) -> list[nn.Module]:
    """The modules that a module's own code calls: its children, and those of its lists."""
    found: list[nn.Module] = []
    for _, child in canonical_children(module):
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += called_children(child) if is_list else [child]
    return found
