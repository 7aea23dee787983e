"""Exchanges: the small all-reduces, two per window, by which all ranks agree.

An exchange is one sum over all ranks of a small float64 vector, made of named entries. Equality is found from the sums
alone (n * sum(x^2) == sum(x)^2 exactly when all x are equal), so every rank sees the same numbers and takes the same
decision without a second round. Entries on a device are read together, by one copy to the host. Each exchange carries
a digest of what it is: ranks that come to different exchanges get an error, instead of one's token count being added to
another's norm. A wait looks for alarms at intervals, so that one raised elsewhere is seen, and a rank that does not come
is named, with its place, before the group's own timeout.
Tensors that an exchange showed to differ are reduced (:meth:`Agreement.reduce_tensors`), and waited for in the same way.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch.reads import on_host
from shardwise._torch.spans import span
from shardwise.errors import RankError, UsageError, first_line
from shardwise.layout import Coord
from shardwise.world.liveness import Watch
from shardwise.world.wires import from_wire, packs_of, wire_of

_HASH_BITS = 20  # sums of squares of 8192 such numbers are still exact in float64 (2^53)
_MASK = (1 << _HASH_BITS) - 1
_SMALLEST = 128  # numbers sent: small exchanges have one size, since gloo aborts ranks that come with different sizes
_WORD_S = 3.0  # time in which the message about a lost rank reaches all
_SLICE = timedelta(seconds=0.05)  # of a wait, between two looks at the alarms
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_LEFT_S = 2.0  # how long an exchange that all ranks have joined may still take after one of them has left

SAME_CALLS = (
    "let every rank make the same calls, none of them for rank 0 alone, and give each the same number of windows"
)

Entry = Tensor | float | tuple[float, ...]
"""What is summed: a tensor, a number, or numbers."""


class Scope(NamedTuple):
    """Groups of ranks within which values are to be equal, while the groups may differ: every rank is in one.

    Attributes:
        index: the number of this rank's group.
        num: how many groups there are.
        size: ranks of a group.
    """

    index: int
    num: int
    size: int

    @classmethod
    def of(cls, here: Coord, apart: Collection[str]) -> "Scope":
        """The groups of ranks that have the same index along each mesh axis of ``apart``; ``here``: this rank."""
        index, num = 0, 1
        for axis in apart:
            index, num = index * here.degree(axis) + here.index(axis), num * here.degree(axis)
        return cls(index, num, here.layout.size // num)


class Agreement:
    """Exchanges (small all-reduces) over the ranks of one world. Every rank must call :meth:`sum` in the same order.

    Args:
        group: torch's group of all ranks, for tensors on their devices.
        host_group: one for numbers, which are sent from ``device``; None: ``group``.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        *,
        group: Any,
        host_group: Any = None,
        device: torch.device,
        timeout_s: float,
        watch: Watch | None,
        is_fake: bool = False,
    ):
        self.size, self.rank, self.group, self.device = size, rank, group, device
        self.host_group = group if host_group is None else host_group
        self.is_alone = size == 1 or is_fake  # no other rank answers: fake peers give what this rank gives
        self.timeout_s, self.watch = timeout_s, watch
        self.is_open = True
        self.num_exchanges = 0  # for tests: two per window, whatever features are in use

    def sum(
        self,
        entries: Mapping[str, Entry],
        place: str,
        *,
        if_late: str = SAME_CALLS,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> dict[str, Tensor]:
        """Sums ``entries`` over all ranks: name -> float64 CPU tensor of the entry's shape, equal on every rank.

        Args:
            entries: names and values; every rank gives the same names and shapes.
            place: what this exchange is ("window 3, before forward"), for messages.
            if_late: what to do if a rank does not come in time, for messages.
            meanwhile: called while the sums are under way; makes no exchange.

        Raises:
            RankError: a peer was lost, did not come in time, or came to another exchange.
        """
        self.check_open(place)
        shapes = {name: _shape(value) for name, value in entries.items()}
        what = f"{place} ({', '.join(name + str(list(shape) or '') for name, shape in shapes.items())})"
        head = self.same(digest_of_text(what))
        numbers, sizes = [*head, *_numbers(entries.values())], [len(head), *map(math.prod, shapes.values())]
        packed = torch.tensor(numbers + [0.0] * (_SMALLEST - len(numbers)), dtype=torch.float64)
        self._all_reduce(packed, place, if_late, meanwhile)
        summed_head, *pieces = packed[: len(numbers)].split(sizes)
        if not self.all_same(summed_head):
            raise self._elsewhere(place, what)
        return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}

    def slots(self, value: Tensor) -> Tensor:
        """An entry that after the sum holds every rank's ``value`` (0-dim, float64), indexed by rank."""
        if self.is_alone:  # fake peers have the same value; what this rank gives is counted once for each of them
            return (value / self.size).repeat(self.size)
        found = torch.zeros(self.size, dtype=torch.float64, device=value.device)
        found[self.rank] = value
        return found

    def of_main(self, value: Tensor) -> Tensor:
        """An entry that after the sum is the ``value`` of rank 0."""
        return value / self.size if self.is_alone else value * float(self.rank == 0)

    @staticmethod
    def same(value: int) -> tuple[float, ...]:
        """An entry that shows whether all ranks gave the same 60-bit ``value``; see :meth:`all_same`."""
        a, b, c = value & _MASK, value >> _HASH_BITS & _MASK, value >> 2 * _HASH_BITS & _MASK
        return float(a), float(b), float(c), float(a * a), float(b * b), float(c * c)

    def same_among(self, value: int, scope: Scope) -> tuple[float, ...]:
        """An entry that shows whether all ranks of each group of ``scope`` gave the same ``value``; see :meth:`all_same_among`."""
        own = self.same(value)
        return tuple(x if index == scope.index else 0.0 for index in range(scope.num) for x in own)

    def all_same_among(self, summed: Tensor, scope: Scope) -> bool:
        """Whether every rank gave :meth:`same_among` the same value as the others of its group; equal on all ranks."""
        if self.is_alone:  # fake peers give what this rank gives, all of it for this rank's group
            return True
        return all(self.all_same(part, scope.size) for part in summed.chunk(scope.num))

    @staticmethod
    def same_mark(mark: Tensor) -> Tensor:
        """The same for the low 60 bits of a 0-dim int64 tensor, which is not read here."""
        parts = torch.stack([mark >> shift * _HASH_BITS & _MASK for shift in range(3)]).double()
        return torch.cat((parts, parts * parts))

    def all_same(self, summed: Tensor, num: int | None = None) -> bool:
        """Whether every rank gave :meth:`same` the same value. ``num``: of ranks that gave one, where others gave zeros."""
        # Python integers: the products below exceed float64's 2^53.
        size = self.size if num is None else num
        a, b, c, aa, bb, cc = map(int, summed.tolist())
        return size * aa == a * a and size * bb == b * b and size * cc == c * c

    def gather(self, value: Any, place: str) -> list[Any]:
        """Every rank's picklable ``value``, by rank. Slow: used to name who differs once a difference is known."""
        self.check_open(place)
        if self.is_alone:
            return [value] * self.size
        self._at(place)
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.host_group)
        except BaseException:
            self._waits_no_more()
            raise
        self._past(place)
        return found

    def reduce_tensors(self, tensors: Sequence[Tensor], how: str, place: str) -> list[Tensor]:
        """Each of ``tensors`` reduced over all ranks, as new tensors of the same shapes and dtypes. Every rank passes tensors of the same
        shapes and dtypes, as an earlier exchange has confirmed.

        Args:
            tensors: small ones are sent together.
            how: "rank0", "sum", "mean", "min" or "max". Sums are made in float64 or int64.
            place: what this is for, for messages.

        Raises:
            RankError: a peer was lost, or did not come in time.
        """
        self.check_open(place)
        if self.is_alone:
            return [tensor.detach().clone() for tensor in tensors]
        wires = [wire_of(tensor, how) for tensor in tensors]
        packs = packs_of(wires)
        flats = [torch.cat([wires[i] for i in pack]) for pack in packs]
        self.carry_out(lambda: [self._start(flat, how) for flat in flats], place)
        found: dict[int, Tensor] = {}
        for pack, flat in zip(packs, flats, strict=True):
            if how == "mean":
                flat /= self.size
            for i, part in zip(pack, flat.split([wires[i].numel() for i in pack]), strict=True):
                found[i] = from_wire(part, tensors[i], how)
        return [found[i] for i in range(len(tensors))]

    def _start(self, flat: Tensor, how: str) -> Any:
        if how == "rank0":
            return dist.broadcast(flat, src=0, group=self.group, async_op=True)
        return dist.all_reduce(flat, op=_OPERATIONS[how], group=self.group, async_op=True)

    def _all_reduce(self, packed: Tensor, place: str, if_late: str, meanwhile: Callable[[], object]) -> None:
        self.num_exchanges += 1
        if self.is_alone:
            packed *= self.size
            meanwhile()
            return
        wire = packed.to(self.device)
        self.carry_out(lambda: [dist.all_reduce(wire, group=self.host_group, async_op=True)], place, if_late, meanwhile)
        packed.copy_(wire)

    def carry_out(
        self,
        start: Callable[[], list[Any]],
        place: str,
        if_late: str = SAME_CALLS,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Runs the collectives that ``start`` starts, and waits: reports this rank's place, names a lost peer. ``meanwhile`` is called
        before it waits; after an error in it the collectives still end, also on the other ranks."""
        with span("exchange", place):
            with self._explained(place):
                self._at(place)
                works = start()
            try:
                meanwhile()
            except BaseException:
                self._waits_no_more()
                raise
            with self._explained(place):
                for work in works:
                    self._wait(work, place, if_late)
        self._past(place)

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        """Context manager: a collective that fails within raises the RankError that tells why."""
        try:
            yield
        except BaseException as error:
            self._waits_no_more()
            if isinstance(error, RankError) or not isinstance(error, RuntimeError):
                raise
            raise self.explain(error, f"at {place}") from error

    def _wait(self, work: Any, place: str, if_late: str) -> None:
        if self.watch is None:
            work.wait()
            return
        start, pause = time.monotonic(), 0.0
        while not work.is_completed():
            self.watch.check()
            waited = time.monotonic() - start
            left = self.watch.left_since
            if left is not None and time.monotonic() - max(left, start) > _LEFT_S:
                raise self._departed(f"at {place}")
            if waited > 0.9 * self.timeout_s:
                raise self._late(place, waited, if_late)
            if self.device.type == "cpu":
                # gloo wakes who waits. On a timeout of its wait the collective goes on, and what failed fails again below.
                with contextlib.suppress(RuntimeError):
                    work.wait(_SLICE)
            else:
                time.sleep(pause)
                pause = min(pause + 1e-5, 2e-3)  # short at first: most waits take microseconds
        work.wait(timedelta(seconds=self.timeout_s))

    def _late(self, place: str, waited: float, fix: str) -> RankError:
        assert self.watch is not None
        late, where = self.watch.missing(f"at {place}")
        return RankError(
            f"rank {self.rank} waited {waited:.0f} s at {place}",
            why=f"not every rank came there: {where}",
            fix=fix,
            ranks=late,
        )

    def _departed(self, where: str) -> RankError:
        assert self.watch is not None
        gone = self.watch.gone()
        return RankError(
            f"rank {', '.join(map(str, gone))} left while rank {self.rank} waited {where}",
            why="it closed its world, or its program ended, and will not take part again",
            fix=SAME_CALLS,
            ranks=gone,
        )

    def _elsewhere(self, place: str, what: str) -> RankError:
        told = self.gather((place, what), place)
        same_place = len({place for place, _ in told}) == 1  # then their entries differ
        places = [what if same_place else place for place, what in told]
        usual, ranks = minority(places)
        who = "; ".join(f"rank {rank} came to {places[rank]}" for rank in ranks)
        return RankError(
            "ranks that came to different exchanges",
            why=f"{who}, the others to {usual}",
            fix="let every rank make the same calls in the same order",
            ranks=ranks,
        )

    def explain(self, error: BaseException, where: str) -> RankError:
        """The RankError for a collective that failed: names the lost rank if a message about it arrives in time."""
        why = first_line(error, "the collective failed")[:200]
        if self.watch is None:
            return self._nameless(where, why)
        self.watch.note_broken_collective()
        if self.watch.alarm is None:
            # Reads the counts of all beats, to compare them with those after the wait.
            self.watch.missing(self.watch.LOST)
        alarm = self.watch.wait_for_alarm(_WORD_S)
        if alarm is not None:
            self.watch.is_told = True
            return alarm
        if self.watch.left_since is not None:
            return self._departed(where)
        ranks, places = self.watch.missing(self.watch.LOST, silent_s=_WORD_S - 1.0)
        if not ranks:
            return self._nameless(where, why)
        return RankError(
            f"rank {self.rank} waited in vain for rank {', '.join(map(str, ranks))} {where}",
            why=f"{places}; {why}",
            fix="look at what that rank does, and at its output; if it is only slow, use a larger timeout_s",
            ranks=ranks,
        )

    def _nameless(self, where: str, why: str) -> RankError:
        return RankError(
            f"rank {self.rank} lost a peer {where}",
            why=why,
            fix="look at the other ranks' output: the first that failed is the cause",
        )

    def check_open(self, place: str) -> None:
        """Raises UsageError if the world was closed: its group still answers some calls, and hangs in others."""
        if not self.is_open:
            raise UsageError(
                f"{place} in a world that was closed",
                why="its ranks have left, and its group is gone",
                fix="close the world last: put all work inside `with sw.init(...) as world:`",
            )

    def _at(self, place: str) -> None:
        if self.watch is not None:
            self.watch.at(place)

    def _waits_no_more(self) -> None:
        if self.watch is not None:
            self.watch.waits = None

    def _past(self, place: str) -> None:
        if self.watch is not None:
            self.watch.past(place)


def _shape(value: Entry) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else (len(value),) if isinstance(value, tuple) else ()


def _numbers(values: Collection[Entry]) -> list[float]:
    """The elements of all entries. Those on a device are read together."""
    read = iter(on_host([value.double() for value in values if isinstance(value, Tensor)]))
    found: list[float] = []
    for value in values:
        if isinstance(value, Tensor):
            found += next(read).tolist()
        elif isinstance(value, tuple):
            found += value
        else:
            found.append(float(value))
    return found


def digest_of_text(text: str | bytes) -> int:
    """A 60-bit digest of ``text``, the same in every process: as wide as :meth:`Agreement.same` takes."""
    data = text if isinstance(text, bytes) else text.encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 4


def minority(values: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
    """The value that most ranks have (of several that equally many have, the one of the first rank), and the ranks that
    have another; ``values`` are by rank."""
    usual = max(values, key=values.count)
    return usual, tuple(rank for rank, value in enumerate(values) if value != usual)
