"""The buffers that the forward of a block writes, and the Python state of their modules: the second run begins with what the first began
with, and leaves nothing.

The first run copies all buffers, and shows which are written: later ones copy only those. A block may write buffers of other modules
(counts of a router that it was given, a cache of its parent): they are looked at in the runs that are compared. So is what attributes hold;
later runs look whether the attributes are the same objects, and into those of modules that have changed any.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import unseen
from shardwise.errors import UnsupportedError
from shardwise.model.module_state import Attributes, keeps_attributes
from shardwise.model.names import own_attributes


class _Before(NamedTuple):
    """A buffer before a run: its version then, and a copy if the run may write it."""

    owner: nn.Module
    attr: str
    buffer: Tensor | None
    version: int
    copy: Tensor | None


class _Bindings:
    """The attributes of a module, and not what is in them."""

    def __init__(self, module: nn.Module):
        self.module, self._was = module, own_attributes(module)

    @property
    def may_have_changed(self) -> bool:
        now, was = own_attributes(self.module), self._was
        return now.keys() != was.keys() or not all(value is was[name] for name, value in now.items())

    def restore(self) -> None:
        for name in own_attributes(self.module).keys() - self._was.keys():
            del self.module.__dict__[name]
        self.module.__dict__.update(self._was)


Before = tuple[Sequence[_Before], Sequence[Attributes | _Bindings]]
_ABSENT = object()  # in place of a buffer that was not registered


class BlockBuffers:
    """The buffers of the modules of one block.

    Args:
        name: of the block, for messages.
        modules: the block and all modules in it.
        outside: modules of the model that are in no block that runs twice.
        siblings: those of the other blocks.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], outside: Sequence[nn.Module], siblings: Sequence[nn.Module]
    ):
        self._name, self._modules = name, modules
        self._owners = [module for module in modules if module._buffers]
        self._outside = [module for module in outside if module._buffers]
        self._siblings = [module for module in siblings if module._buffers]
        self._written_outside: list[nn.Module] = []  # those of which the block writes buffers
        self._keep_attributes = [module for module in modules if keeps_attributes(module)]
        self._change_attributes: dict[int, nn.Module] = {}  # by id: modules whose attributes a forward has changed
        self._num_runs = 0
        self._known: dict[Any, set[Any]] = {}  # training flags of the owners -> buffers that a forward writes

    @property
    def are_new(self) -> bool:
        """Whether no forward has shown which are written, in the modes that the modules are in."""
        return bool(self._owners or self._outside) and self._mode not in self._known

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(owner.training for owner in self._owners)

    def before(self, is_checked: bool) -> Before | None:
        """What to hand to :meth:`written` after a first run. ``is_checked``: other modules than known ones may register or write some."""
        modules = [*self._modules, *self._outside] if is_checked else [*self._owners, *self._written_outside]
        beside = self._siblings if is_checked else ()
        if not modules and not beside and not self._keep_attributes:
            return None
        writers = self._known.get(self._mode)
        self._num_runs += 1
        # Writes to .data show in no version: values are compared in the first run, then ever more rarely.
        is_rare = not self._num_runs & (self._num_runs - 1)
        compared = set(map(id, modules if writers is None else self._owners if is_rare else ()))
        looked_into = {id(m): m for m in modules if keeps_attributes(m)} | self._change_attributes
        with unseen():  # selective counts the operators of the block
            buffers = [
                _Before(
                    owner,
                    attr,
                    b,
                    0 if b is None else b._version,
                    _copied(b, id(owner) in compared or (owner, attr) in (writers or ())),
                )
                for owner in (*modules, *beside)
                for attr, b in owner._buffers.items()
            ]
            attributes = [Attributes(module, all_tensors=True) for module in looked_into.values()]
        return buffers, [
            *attributes,
            *(_Bindings(module) for module in self._keep_attributes if id(module) not in looked_into),
        ]

    def written(self, before: Before | None) -> "WrittenBuffers":
        """The buffers that a run has written, as they were before it."""
        if before is None:
            return WrittenBuffers([], [], [])
        buffers, attributes = before
        known, mode = self._known.get(self._mode), self._mode
        writers = self._known.setdefault(mode, set())
        there = {(id(each.owner), each.attr) for each in buffers}
        found: list[tuple[nn.Module, str, Any]] = []
        for owner, attr, buffer, version, copy in buffers:
            if (owner, attr) not in writers and _has_changed(owner._buffers.get(attr), buffer, version, copy):
                writers.add((owner, attr))
                if _is_late(owner._buffers.get(attr), buffer, version, copy, is_first=known is None):
                    raise self._late(attr)
            if (owner, attr) in writers:
                found.append((owner, attr, buffer if copy is None else copy))
        for owner in {id(each.module): each.module for each in attributes}.values():
            found += [(owner, attr, _ABSENT) for attr in owner._buffers if (id(owner), attr) not in there]
        if any(value is _ABSENT for _, _, value in found):
            self._owners = [module for module in self._modules if module._buffers]
        changed = {id(each.module): each.module for each in attributes if each.may_have_changed}
        self._change_attributes |= changed
        homes = {id(owner) for owner, _, _ in found} | changed.keys()
        self._written_outside = [module for module in self._outside if any(module is owner for owner, _ in writers)]
        outside = [b for owner, attr, b, *_ in buffers if owner in self._written_outside and (owner, attr) in writers]
        return WrittenBuffers(
            found, [each for each in attributes if id(each.module) in homes], [b for b in outside if b is not None]
        )

    def _late(self, attr: str) -> UnsupportedError:
        return UnsupportedError(
            f"Remat of a block that writes its buffer {attr!r} in some forwards only",
            why="its value from before is needed to run the block again, and was not kept: earlier forwards left it alone, or it is "
            "a buffer of another such block",
            fix="leave the block out: Remat(targets=...)",
            name=self._name,
        )


class WrittenBuffers:
    """Buffers that a block's first run has written, and Python state of modules, as before it. ``outside``: those of them that the
    block may hold by themselves, without their module."""

    def __init__(
        self,
        buffers: Sequence[tuple[nn.Module, str, Any]],
        attributes: Sequence[Attributes | _Bindings],
        outside: Sequence[Tensor],
    ):
        self._buffers, self._attributes, self._outside = buffers, attributes, outside

    def __bool__(self) -> bool:
        return bool(self._buffers or self._attributes)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Context manager: all is as before the first run; what is written within is dropped. Buffers are copies within: what was
        saved for backward stays."""
        with unseen():  # by what selective keeps of the first run
            undo = self._put()
        try:
            yield
        finally:
            with unseen():
                undo()

    def _put(self) -> Callable[[], None]:
        """Puts all back as it was before the first run; returns a function that undoes this."""
        owners = {id(owner): owner for owner, _, _ in self._buffers}.values()
        now = [(owner, dict(owner._buffers), set(owner._non_persistent_buffers_set)) for owner in owners]
        attributes = [Attributes(each.module, all_tensors=True) for each in self._attributes]
        for owner, attr, value in self._buffers:
            if value is _ABSENT:
                owner._buffers.pop(attr, None)
            else:
                owner._buffers[attr] = value.clone() if isinstance(value, Tensor) else value
        for each in self._attributes:
            each.restore()
        outside = [(buffer, buffer._version, buffer.detach().clone()) for buffer in self._outside]

        def undo() -> None:
            for buffer, version, value in outside:
                if buffer._version != version:
                    buffer.data.copy_(value)  # what backward has saved of it is what it was
            for owner, buffers, computed in now:
                owner._buffers.clear()
                owner._buffers.update(buffers)
                owner._non_persistent_buffers_set.clear()
                owner._non_persistent_buffers_set.update(computed)
            for each in attributes:
                each.restore()

        return undo


def _copied(buffer: Tensor | None, may_be_written: bool) -> Tensor | None:
    return buffer.clone() if buffer is not None and may_be_written else None


def _is_late(now: Tensor | None, buffer: Tensor | None, version: int, copy: Tensor | None, *, is_first: bool) -> bool:
    """Whether a change was seen too late: the value from before is gone, or earlier runs have changed it unseen."""
    if buffer is not None and buffer._version != version:
        return copy is None
    return now is buffer and not is_first


def _has_changed(now: Tensor | None, buffer: Tensor | None, version: int, copy: Tensor | None) -> bool:
    if now is not buffer:
        return True
    if buffer is None or buffer._version != version:
        return buffer is not None
    with unseen():
        return copy is not None and not torch.equal(copy, buffer)
