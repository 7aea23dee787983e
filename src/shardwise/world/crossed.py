"""Detects ranks that wait for each other in different collectives: certain, unlike silence, and before a timeout."""

from collections.abc import Mapping

from shardwise.world.beats import Beat
from shardwise.world.waiting import Wait

_KINDS = ("all_gather", "reduce_scatter")  # the collectives of units


class Crossed:
    """Checks the ranks with which this one all-gathers and reduce-scatters units, in one process group."""

    def __init__(self, ranks: tuple[int, ...], group: str):
        self.ranks, self._group = ranks, group
        self._state: object = None  # the last seen state of ranks that are elsewhere
        self._counts: dict[int, int] = {}  # the counts of their beats when that state was first seen

    def looks_at(self, wait: Wait) -> bool:
        """Whether ``wait`` is in this group; a collective of the user may be in another group."""
        return bool(wait.group) and wait.group == self._group

    def found(self, wait: Wait, beats: Mapping[int, Beat], exchanges: int) -> dict[int, Beat]:
        """The ranks that will not come to the collective that blocks this rank, and cannot continue without it: they
        wait in an exchange, have left, or reduce where this rank gathers.

        Returned only once all of them have written another beat with the same state: a beat is older than the state it
        describes, and the beat of a process that was stopped, or holds the interpreter's lock, is an old one. A rank
        that waits in an exchange which this rank has passed (it has come to ``exchanges`` of them) is only late: all
        ranks have come there.
        """
        own = next((kind for kind in _KINDS if kind in wait.what), "")
        crossing = tuple(kind for kind in _KINDS if kind != own) if own else ()
        away = {
            rank: beat
            for rank, beat in beats.items()
            if beat.has_left
            or (beat.waits.startswith("at ") and beat.exchanges > exchanges)
            or any(kind in beat.waits for kind in crossing)
        }
        state = (wait, tuple((rank, beat.place, beat.line, beat.waits) for rank, beat in away.items()))
        if state != self._state:
            self._state, self._counts = state, {rank: beat.count for rank, beat in away.items()}
        is_anew = all(beat.has_left or beat.count != self._counts[rank] for rank, beat in away.items())
        return away if is_anew else {}


def elsewhere(beat: Beat) -> str:
    """Where a rank is that does not come, as text."""
    if beat.has_left:
        return "has left"
    return f"waits {beat.where}" if beat.waits.startswith("at ") else f"waits {beat.waits}, {beat.where}"
