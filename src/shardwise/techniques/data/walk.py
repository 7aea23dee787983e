"""One order of units for every rank, whatever each of them runs.

The collectives of a group meet in the order they are started, so ranks that gather units in different orders hang, or exchange
their gradients. A rank may skip a unit (layer drop, early exit, a text-only batch), and it does not know what the others skip.
So units are taken in an order that all ranks know: a rank that enters a unit first takes, in passing, those before it that it
skipped. The order comes from what ranks do: the first time, they tell each other which unit each of them enters next, and
take one after the other until all are at the end. From then on it is followed without a word.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

import torch

from shardwise.errors import RankError
from shardwise.world import World
from shardwise.world.agreement import Agreement

__all__ = ["Orders", "Walk", "completed", "nearest"]

END = -1
"""In the place of a unit: this rank enters no more."""


class Orders:
    """The orders that the ranks of ``world`` keep, one for each situation: forwards with and without gradients, backwards by the number of
    forwards before."""

    def __init__(self, num_units: int, world: World):
        self._num_units, self._world = num_units, world
        self._known: dict[str, list[int]] = {}

    def walk(self, situation: str, take: Callable[[int], None]) -> "Walk":
        """In a situation that is new a forward goes as the other forwards do; else ranks agree on the way."""
        known = self._known.get(situation) if self._num_units else []
        if known is None and situation.startswith("forward"):
            known = self.forward()
        return self._made(known, take, situation)

    def alone(self, unit: int, take: Callable[[int], None]) -> "Walk":
        """A forward of one unit, and not of the model."""
        return self._made([unit], take, "forward")

    def forward(self) -> list[int] | None:
        """The order of a forward, once there is one."""
        return next((order for name, order in self._known.items() if name.startswith("forward")), None)

    def learn(self, situation: str, walk: "Walk", reference: Sequence[int], once: Collection[int]) -> None:
        """Keeps what ranks have agreed on, completed by the units of ``reference``, with those in ``once`` at their first place. Where
        they had begun to follow another order they agree once more: what they took on that way need not come again."""
        if walk.has_left:
            self._known.pop(situation, None)
        elif walk.has_agreed:
            seen: set[int] = set()
            taken = [unit for unit in walk.taken if unit not in once or not (unit in seen or seen.add(unit))]
            self._known[situation] = completed(taken, reference)

    def of_any_rank(self, units: Collection[int], what: str) -> set[int]:
        """Units that any rank gives. All ranks must call it."""
        flags = torch.zeros(self._num_units, dtype=torch.float64)
        flags[list(units)] = 1
        summed = self._world.agreement.sum({"units": flags}, f"agreeing on {what}")
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
        world: whose ranks agree.
        place: what this is, "forward" or "backward".
    """

    def __init__(
        self, known: Sequence[int] | None, *, take: Callable[[int], None], num_units: int, world: World, place: str
    ):
        self.taken: list[int] = []
        self._num_units = num_units
        self._known, self._next = None if known is None else list(known), 0
        self._take, self._world, self._place = take, world, place
        self.has_agreed = False  # ranks told each other, so that the order is new
        self.has_left = False  # after they had followed another

    def enter(self, unit: int) -> None:
        """Takes what comes before ``unit``; the caller takes ``unit`` itself.

        Raises:
            RankError: another rank is in the middle of the order that this rank leaves.
        """
        if self._known is not None:
            if unit in self._known[self._next :]:
                self._take_until(self._known.index(unit, self._next))
                self._next += 1
                self.taken.append(unit)
                return
            self._known, self.has_left = None, True  # every rank's program may have left it here
        while (chosen := self._agree(unit)) != unit:
            self._pass(chosen)
        self.taken.append(unit)

    def end(self) -> None:
        """Takes the rest."""
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
        """The unit that all ranks take next: one that a rank enters, the nearest to the last one where they differ."""
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
    """Of ``units`` the first on the way from the last one taken, from the end on from the start: in the direction of the last two,
    or up or down if there are none."""
    if len(taken) > 1 and taken[-1] != taken[-2]:
        goes_up = taken[-1] > taken[-2]
    start = taken[-1] if taken else -1 if goes_up else num_units
    return min(units, key=lambda unit: ((unit - start if goes_up else start - unit) - 1) % num_units)


def completed(order: Sequence[int], reference: Sequence[int]) -> list[int]:
    """``order`` with the units of ``reference`` that it lacks, each behind the one that stands before it there; where ``order``
    runs through ``reference`` from its end, before it."""
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
