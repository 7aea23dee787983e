"""The buffers that the forward of a block writes, and the Python state of their modules: the second run begins with what the first began
with, and leaves nothing.

The first run copies all buffers, and shows which are written: later ones copy only those.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.errors import UnsupportedError
from shardwise.model.module_state import Attributes, keeps_attributes

__all__ = ["BlockBuffers", "WrittenBuffers"]


class _Before(NamedTuple):
    """A buffer before a run: its version then, and a copy if the run may write it."""

    owner: nn.Module
    attr: str
    buffer: Tensor | None
    version: int
    copy: Tensor | None


Before = tuple[Sequence[_Before], Sequence[Attributes]]
_ABSENT = object()  # in place of a buffer that was not registered


class BlockBuffers:
    """The buffers of the modules of one block.

    Args:
        name: of the block, for messages.
        modules: the block and all modules in it.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]):
        self._name, self._modules = name, modules
        self._owners = [module for module in modules if module._buffers]
        self._known: dict[Any, set[Any]] = {}  # training flags of the owners -> buffers that a forward writes

    @property
    def are_new(self) -> bool:
        """Whether no forward has shown which are written, in the modes that the modules are in."""
        return bool(self._owners) and self._mode not in self._known

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(owner.training for owner in self._owners)

    def before(self, is_checked: bool) -> Before | None:
        """What to hand to :meth:`written` after a first run. ``is_checked``: modules that have no buffers yet may register some."""
        modules = self._modules if is_checked else self._owners
        if not modules:
            return None
        writers = self._known.get(self._mode)
        buffers = [
            _Before(
                owner, attr, b, 0 if b is None else b._version, _copied(b, writers is None or (owner, attr) in writers)
            )
            for owner in self._owners
            for attr, b in owner._buffers.items()
        ]
        return buffers, [Attributes(module) for module in modules if keeps_attributes(module)]

    def written(self, before: Before | None) -> "WrittenBuffers":
        """The buffers that a run has written, as they were before it."""
        if before is None:
            return WrittenBuffers([], [])
        buffers, attributes = before
        known, mode = self._known.get(self._mode), self._mode
        writers = self._known.setdefault(mode, set())
        there = {(id(each.owner), each.attr) for each in buffers}
        found: list[tuple[nn.Module, str, Any]] = []
        for owner, attr, buffer, version, copy in buffers:
            if (owner, attr) not in writers and _has_changed(
                owner._buffers.get(attr), buffer, version, copy, known is None
            ):
                writers.add((owner, attr))
                if buffer is not None and copy is None and buffer._version != version:
                    raise self._late(attr)
            if (owner, attr) in writers:
                found.append((owner, attr, buffer if copy is None else copy))
        for owner in {id(each.module): each.module for each in attributes}.values():
            found += [(owner, attr, _ABSENT) for attr in owner._buffers if (id(owner), attr) not in there]
        if any(value is _ABSENT for _, _, value in found):
            self._owners = [module for module in self._modules if module._buffers]
        homes = {id(owner) for owner, _, _ in found}
        return WrittenBuffers(found, [each for each in attributes if id(each.module) in homes])

    def _late(self, attr: str) -> UnsupportedError:
        return UnsupportedError(
            f"Remat of a block that writes its buffer {attr!r} in some forwards only",
            why="its value from before is needed to run the block again, and was not kept: earlier forwards left it alone",
            fix="leave the block out: Remat(targets=...)",
            name=self._name,
        )


class WrittenBuffers:
    """Buffers that a block's first run has written, and Python state of their modules, as before it."""

    def __init__(self, buffers: Sequence[tuple[nn.Module, str, Any]], attributes: Sequence[Attributes]):
        self._buffers, self._attributes = buffers, attributes

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Context manager: all is as before the first run; what is written within is dropped. Buffers are copies within: what was
        saved for backward stays."""
        owners = {id(owner): owner for owner, _, _ in self._buffers}.values()
        now = [(owner, dict(owner._buffers), set(owner._non_persistent_buffers_set)) for owner in owners]
        attributes = [Attributes(each.module) for each in self._attributes]
        for owner, attr, value in self._buffers:
            if value is _ABSENT:
                owner._buffers.pop(attr, None)
            else:
                owner._buffers[attr] = value.clone() if isinstance(value, Tensor) else value
        for each in self._attributes:
            each.restore()
        try:
            yield
        finally:
            for owner, buffers, computed in now:
                owner._buffers.clear()
                owner._buffers.update(buffers)
                owner._non_persistent_buffers_set.clear()
                owner._non_persistent_buffers_set.update(computed)
            for each in attributes:
                each.restore()


def _copied(buffer: Tensor | None, may_be_written: bool) -> Tensor | None:
    return buffer.clone() if buffer is not None and may_be_written else None


def _has_changed(now: Tensor | None, buffer: Tensor | None, version: int, copy: Tensor | None, is_first: bool) -> bool:
    if now is not buffer:
        return True
    if buffer is None or buffer._version != version:
        return buffer is not None
    with unseen():
        return is_first and copy is not None and not torch.equal(copy, buffer)
