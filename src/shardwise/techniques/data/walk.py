"""One order of units for all ranks, whatever modules each of them runs.

The collectives of a group are matched in the order they are started, so ranks that gather units in different orders
hang, or exchange each other's gradients. A rank may skip a unit (layer drop, early exit, a text-only batch), and it
does not know what the others skip. So units are taken in an order that all ranks know: before a rank enters a unit, it
takes part in the collectives of the units before it that it skipped. The order is learned from what ranks run: the
first time, they exchange which unit each of them enters next, and take one after the other until all are at the end.
From then on the order is followed without communication.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

import torch

from shardwise.errors import RankError
from shardwise.world import World
from shardwise.world.agreement import Agreement

END = -1
"""Sent in place of a unit: this rank enters no more units."""


class Orders:
    """The orders of units that the ranks of ``world`` have learned, one per situation: forwards with and without
    gradients, backwards by the number of forwards before."""

    def __init__(self, num_units: int, world: World):
        self._num_units, self._world = num_units, world
        self._known: dict[str, list[int]] = {}

    def walk(self, situation: str, take: Callable[[int], None]) -> "Walk":
        """A walk through the units. A forward in a new situation follows the known forwards; otherwise ranks agree."""
        known = self._known.get(situation) if self._num_units else []
        if known is None and situation.startswith("forward"):
            known = self.forward()
        return self._made(known, take, situation)

    def alone(self, unit: int, take: Callable[[int], None]) -> "Walk":
        """A walk for a forward of one unit by itself, and not of the model."""
        return self._made([unit], take, "forward")

    def forward(self) -> list[int] | None:
        return next((order for name, order in self._known.items() if name.startswith("forward")), None)

    def learn(self, situation: str, walk: "Walk", reference: Sequence[int], once: Collection[int]) -> None:
        """Keeps the order that ranks have agreed on, completed by the units of ``reference``, with those in ``once``
        only at their first place. If they had begun to follow another order they agree once more next time: what they
        took on that way need not occur again."""
        if walk.has_left:
            self._known.pop(situation, None)
        elif walk.has_agreed:
            seen: set[int] = set()
            taken = [unit for unit in walk.taken if unit not in once or not (unit in seen or seen.add(unit))]
            self._known[situation] = completed(taken, reference)

    def of_any_rank(self, units: Collection[int]) -> set[int]:
        """The union of ``units`` over all ranks. All ranks must call it."""
        flags = torch.zeros(self._num_units, dtype=torch.float64)
        flags[list(units)] = 1
        summed = self._world.agreement.sum({"units": flags}, "agreeing on units that are entered in parts")
        return set(summed["units"].nonzero().flatten().tolist())

    def _made(self, known: Sequence[int] | None, take: Callable[[int], None], situation: str) -> "Walk":
        place = situation.partition(" ")[0]
        return Walk(known, take=take, num_units=self._num_units, world=self._world, place=place)


class Walk:
    """One forward or backward over the units, by their numbers. All ranks make it with the same ``known``.

    Args:
        known: the order to follow; None: ranks agree on one as they go.
        take: gathers a unit (and reduces it, in a backward) that this rank did not enter.
        num_units: how many there are.
        world: the world whose ranks agree.
        place: "forward" or "backward".
    """

    def __init__(
        self, known: Sequence[int] | None, *, take: Callable[[int], None], num_units: int, world: World, place: str
    ):
        self.taken: list[int] = []
        self._num_units = num_units
        self._known, self._next = None if known is None else list(known), 0
        self._take, self._world, self._place = take, world, place
        self.has_agreed = False  # ranks exchanged units, so the order is new
        self.has_left = False  # they did so after they had followed another order

    def enter(self, unit: int) -> None:
        """Takes the units before ``unit``; the caller takes ``unit`` itself.

        Raises:
            RankError: another rank is in the middle of the order that this rank leaves.
        """
        if self._known is not None:
            if unit in self._known[self._next :]:
                self._take_until(self._known.index(unit, self._next))
                self._next += 1
                self.taken.append(unit)
                return
            self._known, self.has_left = None, True  # every rank's program may have left the order here
        while (chosen := self._agree(unit)) != unit:
            self._pass(chosen)
        self.taken.append(unit)

    def end(self) -> None:
        if self._known is not None:
            self._take_until(len(self._known))
            return
        while (chosen := self._agree(END)) != END:
            self._pass(chosen)

    def upcoming(self) -> int | None:
        """The unit after the last one taken, if it is known."""
        return None if self._known is None or self._next >= len(self._known) else self._known[self._next]

    def _take_until(self, position: int) -> None:
        assert self._known is not None
        while self._next < position:
            unit = self._known[self._next]
            self._next += 1
            self._pass(unit)

    def _pass(self, unit: int) -> None:
        self.taken.append(unit)
        self._take(unit)

    def _agree(self, mine: int) -> int:
        """The unit that all ranks take next: one that some rank enters, the nearest to the last one if they differ."""
        self.has_agreed = True
        agreement: Agreement = self._world.agreement
        if agreement.is_alone:
            return mine
        place = f"agreeing on the order of units in {self._place}"
        try:
            if agreement.all_same(agreement.sum({"unit": agreement.same(mine + 1)}, place)["unit"]):
                return mine
            told = {unit for unit in agreement.gather(mine, place) if unit != END}
        except RankError as error:
            raise RankError(
                f"rank {agreement.rank} entered units in another order than before, in {self._place}",
                why=f"{error.given}: {error.why}",
                fix="let every rank run its blocks in one order, or keep them in one unit: Sharding(units=...)",
                ranks=error.ranks,
            ) from error
        return nearest(told, self.taken, self._num_units, goes_up=self._place == "forward")


def nearest(units: set[int], taken: Sequence[int], num_units: int, *, goes_up: bool) -> int:
    """The first of ``units`` on the way from the last one taken, wrapping around at the end. The direction is that of
    the last two taken, or up or down (``goes_up``) if there are none."""
    if len(taken) > 1 and taken[-1] != taken[-2]:
        goes_up = taken[-1] > taken[-2]
    start = taken[-1] if taken else -1 if goes_up else num_units
    return min(units, key=lambda unit: ((unit - start if goes_up else start - unit) - 1) % num_units)


def completed(order: Sequence[int], reference: Sequence[int]) -> list[int]:
    """``order`` with the units of ``reference`` that it lacks, each inserted after its predecessor there; where
    ``order`` runs through ``reference`` backwards, before it."""
    place = {unit: i for i, unit in enumerate(reference)}
    known = [unit for unit in order if unit in place]
    steps = [place[b] - place[a] for a, b in itertools.pairwise(known)]
    is_backwards = sum(step < 0 for step in steps) > sum(step > 0 for step in steps)
    way = list(reference)[::-1] if is_backwards else list(reference)
    found = list(order)
    for i, unit in enumerate(way):
        if unit not in found:
            at = found.index(way[i - 1]) + 1 if i else 0
            found.insert(at, unit)
    return found
