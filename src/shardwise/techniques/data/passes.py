"""One forward, or one backward, of a sharded model on this rank: which unit is gathered now, and which is to be left."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise._torch.fsdp2 import Unit
from shardwise.errors import UnsupportedError, UsageError
from shardwise.techniques.data.walk import Walk
from shardwise.techniques.edges import Views, when_left

__all__ = ["Backward", "Forward", "Units", "refuse_written"]

_LOOKS = 4  # so many times a unit's gathered parameters are looked at after a forward: modules move them in the first


@dataclass
class Units:
    """The units of a model, and which of them are gathered ahead.

    Attributes:
        root: the root module's own.
        inner: the others, by number.
        ahead, behind: number of a unit (None: the root) -> those to gather when its forward, or backward, begins; a backward that
            is not in it gathers the one that comes next.
        names: of a shard, by identity, for messages.
        spanning: numbers of units with modules between which those of others run (merged or tied across lists): one turn each,
            to the end of a forward or backward.
        kept: numbers of units whose output may hide tensors: gathered until their turn in backward.
        earlier: of these, the ones of a forward that is over for other ranks: they have freed them, even if they keep units.
        ready: of these, the ones that were gathered ahead in the forward that runs, and not entered yet.
    """

    root: Unit
    inner: list[Unit]
    ahead: dict[int | None, list[int]]
    behind: dict[int | None, list[int]]
    names: dict[int, str]
    spanning: set[int]
    kept: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    looks: dict[int | None, int] = field(default_factory=dict)

    def all(self) -> Iterator[Unit]:
        yield self.root
        yield from self.inner

    def numbered(self) -> Iterator[tuple[int | None, Unit]]:
        yield None, self.root
        yield from enumerate(self.inner)

    def unit(self, number: int | None) -> Unit:
        return self.root if number is None else self.inner[number]

    def begin_forward(self) -> None:
        """Gathers the root. What an earlier forward has left is gathered anew, as shards may have been written since."""
        for number, unit in self.numbered():
            if not unit.is_free and number not in self.kept:
                unit.free()
        self.earlier = set(self.kept)
        self.ready.clear()
        self.root.gather()
        self._prefetch(self.ahead.get(None, []), backward=False)

    def begin_alone(self, number: int) -> None:
        """The same for a forward of one unit by itself."""
        unit = self.inner[number]
        if number in self.kept:
            self.earlier.add(number)
        elif not unit.is_free:
            unit.free()

    def gather(self, number: int) -> None:
        """For a forward."""
        if number not in self.ready:
            self._leave_kept(number)
        self.ready.discard(number)
        self.inner[number].gather()
        self._prefetch(self.ahead.get(number, []), backward=False)

    def gather_for_backward(self, number: int | None, upcoming: int | None) -> None:
        self._leave_kept(number)
        self.kept -= {number}
        self.unit(number).gather(backward=True)
        self._prefetch(self.behind.get(number, [] if upcoming is None else [upcoming]), backward=True)

    def leave_forward(self, number: int) -> None:
        self.look(number)
        self.leave_skipped(number)

    def leave_skipped(self, number: int) -> None:
        """The same for one that did not run now. It may have in an earlier forward, which keeps it."""
        if number in self.kept:
            self.inner[number].show_shards()
        else:
            self.inner[number].leave_forward()

    def end_forward(self, *, with_gradients: bool) -> None:
        self.look(None)
        for unit in self.inner:
            unit.drop_prefetched()
        self.earlier |= self.ready
        self.ready.clear()
        if with_gradients:
            self.root.leave_forward()
        else:
            for number, unit in self.numbered():
                if number not in self.kept:
                    unit.free()
            self.earlier |= self.kept
        self.root.release_buffers()

    def end_backward(self) -> None:
        for unit in self.all():
            self._refuse_late(unit)
            unit.end_backward()
        for number in self.kept:
            self.inner[number].free()
        self.kept.clear()
        self.earlier.clear()
        self.root.release_buffers()

    def look(self, number: int | None) -> None:
        """Refuses a module whose forward has put a gathered parameter elsewhere: later gathers would not reach it."""
        if self.looks.get(number, 0) >= _LOOKS:
            return
        self.looks[number] = self.looks.get(number, 0) + 1
        shard = self.unit(number).moved()
        if shard is not None:
            raise UnsupportedError(
                "a forward that gives a parameter other memory (parameter.data = ...)",
                why="parameters are gathered anew for each forward, into the memory they had: the module would go on computing "
                "with the old values, without an error",
                fix='keep the parameters whole on every rank: sw.init("dp_replicate=-1")',
                name=self.names.get(id(shard)),
            )

    def _refuse_late(self, unit: Unit) -> None:
        late = unit.positions_with_gradient() if unit.reduces else []
        if late:
            shard, _, _ = unit.shards()[late[0]]
            raise UnsupportedError(
                "a gradient that came after those of its unit were summed over the ranks",
                why="backward ran through the unit in two parts, and another unit's between them",
                fix='keep both in one unit: Sharding(units="none"), or units= with the names of others',
                name=self.names.get(id(shard)),
            )

    def _prefetch(self, numbers: list[int], *, backward: bool) -> None:
        for number in numbers:
            if number in self.ready:
                continue
            if self._leave_kept(number):
                (self.kept.discard if backward else self.ready.add)(number)
                self.inner[number].gather(backward=backward)  # no hook would wait for it before it is used
            else:
                self.inner[number].prefetch(backward=backward)

    def _leave_kept(self, number: int | None) -> bool:
        """Brings a unit that is kept to where other ranks, who did not run it, have it: with them it is gathered again, or not. Whether
        it is such a unit."""
        if number not in self.kept:
            return False
        unit = self.unit(number)
        if number in self.earlier or not unit.is_gathered:
            unit.free()
        else:
            unit.leave_forward()
        self.earlier -= {number}
        return True


class Forward:
    """One call of the model. ``walk`` is None while everything is kept gathered."""

    def __init__(self, units: Units, walk: Walk | None):
        self.units, self.walk = units, walk
        self.has_gradients = torch.is_grad_enabled()
        self._open: int | None = None  # entered, and not left for another
        self._to_run: set[int] = set()  # its modules (by identity) that have not run
        self._inside: dict[int, int] = {}  # unit -> how many of its modules run now
        self.views: Views = []
        self._spanned: set[int] = set()
        self._left_early: dict[int, set[int]] = {}  # unit -> its modules that had not run when another was entered
        self.resumed: set[int] = set()  # units of which such a module ran later

    def enter(self, number: int, module: nn.Module) -> bool:
        """A module of a unit is called; whether that begins a turn of the unit."""
        begins = self.enter_part(number)
        if id(module) in self._left_early.get(number, ()):
            self.resumed.add(number)
        self._to_run.discard(id(module))
        self._inside[number] = self._inside.get(number, 0) + 1
        return begins

    def enter_part(self, number: int) -> bool:
        """The same for a part of it."""
        self.has_gradients = self.has_gradients or torch.is_grad_enabled()
        begins = number != self._open and number not in self._spanned and not self._inside.get(number)
        if begins:
            self._leave_open()
            if self.walk is not None:
                self.walk.enter(number)
                self.take(number)
            if number not in self._spanned:
                self._open, self._to_run = number, set(map(id, self.units.inner[number].modules))
        return begins

    def take(self, number: int) -> None:
        """Gathers a unit."""
        self.units.gather(number)
        if number in self.units.spanning:
            self._spanned.add(number)

    def skip(self, number: int) -> None:
        """Gathers a unit with the other ranks, and frees it."""
        self.take(number)
        if number not in self._spanned:
            self.units.leave_skipped(number)

    def watch_inputs(self, number: int, args: Any, kwargs: Any, left: Callable[[], None]) -> tuple[Any, Any]:
        """``(args, kwargs)`` whose gradients tell when backward has left the unit."""
        if not torch.is_grad_enabled() or not self.units.inner[number].is_trained:
            return args, kwargs
        return when_left(args, kwargs, left)

    def is_inside(self, number: int) -> bool:
        return bool(self._inside.get(number))

    def leave(self, number: int, module: nn.Module) -> None:
        """A module of a unit has run."""
        self._inside[number] -= 1
        if self._inside[number] or number in self._spanned:
            return
        if number != self._open:
            self._free(number)
        elif not self._to_run:
            self._leave_open()

    def end(self) -> None:
        self._leave_open()
        if self.walk is not None:
            self.walk.end()
        for number in sorted(self._spanned):
            self._free(number)

    def _leave_open(self) -> None:
        number, self._open = self._open, None
        if number is None:
            return
        if self._to_run:
            self._left_early[number] = self._to_run
        if not self._inside.get(number):
            self._free(number)

    def _free(self, number: int) -> None:
        if self.walk is not None:
            self.units.leave_forward(number)


class Backward:
    """One backward that has reached the model.

    Args:
        reduce: sums a unit's gradients over the ranks and frees it.
        hook: puts hooks on what was gathered.
    """

    def __init__(self, units: Units, walk: Walk, reduce: Callable[[int], None], hook: Callable[[int | None], None]):
        self.units, self.walk, self._reduce, self._hook = units, walk, reduce, hook
        self._open: int | None = None
        self.spanned: set[int] = set()

    def begin(self) -> None:
        self.units.gather_for_backward(None, self.walk.upcoming())
        self._hook(None)

    def reach(self, number: int) -> None:
        """The gradient has come to a unit: its turn, unless it has begun."""
        if number == self._open or number in self.spanned:
            return
        self._close()
        self.walk.enter(number)
        self._take(number)
        if number not in self.spanned:
            self._open = number

    def skip(self, number: int) -> None:
        """Gathers and reduces a unit with the other ranks."""
        self._take(number)
        if number not in self.spanned:
            self._reduce(number)

    def _take(self, number: int) -> None:
        self.units.gather_for_backward(number, self.walk.upcoming())
        self._hook(number)
        if number in self.units.spanning:
            self.spanned.add(number)

    def leave(self, number: int) -> None:
        """The gradient has left the unit."""
        if number == self._open:
            self._close()

    def end(self) -> None:
        self._close()
        self.walk.end()

    def _close(self) -> None:
        number, self._open = self._open, None
        if number is not None:
            self._reduce(number)


def refuse_written(unit: Unit, version: int) -> None:
    """Raises UsageError if the shards were written since they had ``version``: backward would use them with a forward of the
    values from before."""
    if unit.version() != version:
        raise UsageError(
            "a backward of a forward that computed with other parameters",
            why="parameters were written between the two (an optimizer step, an average of weights, a load), and units are "
            "gathered again for backward: gradients would be those of neither",
            fix="run the backward before parameters are written, or the forward again after it",
            name=unit.name or None,
        )
