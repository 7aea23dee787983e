"""Ranks that wait for each other in different collectives: certain, unlike silence, and known long before the timeout."""

from collections.abc import Mapping

from shardwise.world.beats import Beat
from shardwise.world.waiting import Wait

__all__ = ["Crossed", "elsewhere"]

_KINDS = ("all_gather", "reduce_scatter")  # of the collectives of units


class Crossed:
    """Looks at the ranks with which this one gathers and sums units, in one process group.

    Args:
        ranks: the others.
        group: name of the group.
    """

    def __init__(self, ranks: tuple[int, ...], group: str):
        self.ranks, self._group = ranks, group
        self._state: object = None  # what was last seen of ranks that are elsewhere
        self._counts: dict[int, int] = {}  # and of their beats, when it was seen first

    def looks_at(self, wait: Wait) -> bool:
        """Whether ``wait`` is one for them; a collective of the user's may be in a group of others."""
        return bool(wait.group) and wait.group == self._group

    def found(self, wait: Wait, beats: Mapping[int, Beat], exchanges: int) -> dict[int, Beat]:
        """Those that wait in an exchange, have left, or reduce where this rank gathers: they will not come to the collective that blocks
        this rank, and cannot go on without it. Only if all of them say so anew: a beat is older than what it tells, and that of a
        process that was stopped, or holds the interpreter's lock, is the last one of before. One that waits in an exchange which this
        rank has behind it (it has come to so many ``exchanges``) is late: all have come there."""
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
    """Where a rank is that does not come, in words."""
    if beat.has_left:
        return "has left"
    return f"waits {beat.where}" if beat.waits.startswith("at ") else f"waits {beat.waits}, {beat.where}"
