"""One forward or one backward of a sharded model on this rank: which unit is gathered, and which is freed next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise._torch.fsdp2 import Unit
from shardwise.errors import UnsupportedError, UsageError
from shardwise.techniques.data.walk import Walk
from shardwise.techniques.edges import Views

_LOOKS = 4  # forwards after which a unit's gathered parameters are checked: modules move them in the first ones


@dataclass
class Units:
    """The units of a model, and which of them are gathered ahead.

    Attributes:
        root: the root module's unit.
        inner: the other units, by number.
        ahead, behind: number of a unit (None: the root) -> units to gather when its forward, or backward, begins. For a
            unit that is not in ``behind``, its backward gathers the next one.
        names: id of a shard -> its name, for messages.
        spanning: numbers of units with modules of other units between their own (merged or tied across lists). Each is
            gathered once, until the end of the forward or backward.
        kept: numbers of units whose output may hide tensors: they stay gathered until their turn in backward.
        earlier: those of ``kept`` from a forward that is over for other ranks, which have freed them even if they keep
            units.
        ready: those of ``kept`` that were gathered ahead in the running forward, and not entered yet.
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
        """Gathers the root. Frees units that an earlier forward left gathered: shards may have been written since."""
        for number, unit in self.numbered():
            if not unit.is_free and number not in self.kept:
                unit.release()
        self.earlier = set(self.kept)
        self.ready.clear()
        self.root.gather()
        self._prefetch(self.ahead.get(None, []), backward=False)

    def begin_alone(self, number: int) -> None:
        """Like :meth:`begin_forward`, for a forward of one unit by itself."""
        unit = self.inner[number]
        if number in self.kept:
            self.earlier.add(number)
        elif not unit.is_free:
            unit.release()

    def gather(self, number: int) -> None:
        """Gathers a unit for its forward, and starts the prefetch of others."""
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
        """Like :meth:`leave_forward`, for a unit that did not run now. An earlier forward may have kept it gathered."""
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
                    unit.release()
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
        """Refuses a module whose forward has moved a gathered parameter to memory that later gathers do not write."""
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
                self.inner[number].gather(backward=backward)  # not a prefetch: no hook would wait for it before its use
            else:
                self.inner[number].prefetch(backward=backward)

    def _leave_kept(self, number: int | None) -> bool:
        """Brings a kept unit to the state it has on ranks that did not run it, so that all ranks gather it again, or
        none does. Returns whether it was kept."""
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
        self._open: int | None = None  # the unit that was entered and not yet left for another
        self._to_run: set[int] = set()  # ids of its modules that have not run
        self._inside: dict[int, int] = {}  # unit -> number of its modules that are running
        self.views: Views = []
        self._spanned: set[int] = set()
        self._left_early: dict[int, set[int]] = {}  # unit -> its modules that had not run when another unit was entered
        self.resumed: set[int] = set()  # units of which such a module ran later

    def enter(self, number: int, module: nn.Module) -> bool:
        """Called when a module of a unit is called. Returns whether that begins a turn of the unit."""
        begins = self.enter_part(number)
        if id(module) in self._left_early.get(number, ()):
            self.resumed.add(number)
        self._to_run.discard(id(module))
        self._inside[number] = self._inside.get(number, 0) + 1
        return begins

    def enter_part(self, number: int) -> bool:
        """Like :meth:`enter`, for a part of the unit."""
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
        self.units.gather(number)
        if number in self.units.spanning:
            self._spanned.add(number)

    def skip(self, number: int) -> None:
        """Gathers a unit together with the other ranks, and frees it: this rank does not run it."""
        self.take(number)
        if number not in self._spanned:
            self.units.leave_skipped(number)

    def is_watched(self, number: int) -> bool:
        """Whether a backward may reach the unit and leave it."""
        return torch.is_grad_enabled() and self.units.inner[number].is_trained

    def is_inside(self, number: int) -> bool:
        return bool(self._inside.get(number))

    def leave(self, number: int, module: nn.Module) -> None:
        """Called when a module of a unit has run."""
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
        reduce: reduce-scatters a unit's gradients and frees it.
        hook: registers hooks on the gathered parameters of a unit.
    """

    def __init__(self, units: Units, walk: Walk, reduce: Callable[[int], None], hook: Callable[[int | None], None]):
        self.units, self.walk, self._reduce, self._hook = units, walk, reduce, hook
        self._open: int | None = None
        self.spanned: set[int] = set()

    def begin(self) -> None:
        self.units.gather_for_backward(None, self.walk.upcoming())
        self._hook(None)

    def reach(self, number: int) -> None:
        """Called when the gradient reaches a unit: begins its turn, unless it has begun."""
        if number == self._open or number in self.spanned:
            return
        self._close()
        self.walk.enter(number)
        self._take(number)
        if number not in self.spanned:
            self._open = number

    def skip(self, number: int) -> None:
        """Gathers and reduces a unit together with the other ranks: this rank's backward does not reach it."""
        self._take(number)
        if number not in self.spanned:
            self._reduce(number)

    def _take(self, number: int) -> None:
        self.units.gather_for_backward(number, self.walk.upcoming())
        self._hook(number)
        if number in self.units.spanning:
            self.spanned.add(number)

    def leave(self, number: int) -> None:
        """Called when the gradient has left the unit."""
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
    """Raises UsageError if the shards were written since they had ``version``: backward would combine the new values
    with a forward of the old ones."""
    if unit.version() != version:
        raise UsageError(
            "a backward of a forward that computed with other parameters",
            why="parameters were written between the two (an optimizer step, an average of weights, a load), and units are "
            "gathered again for backward: gradients would be those of neither",
            fix="run the backward before parameters are written, or the forward again after it",
            name=unit.name or None,
        )
