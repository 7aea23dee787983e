"""Runs a function on every rank; if it raises on one rank, all ranks raise."""

import copy
from collections.abc import Callable
from typing import Protocol, TypeVar

from shardwise.errors import CheckpointError, RankError, ShardwiseError
from shardwise.world.agreement import SAME_CALLS, Agreement, digest_of_text

T = TypeVar("T")
_ON_MAIN = "rank 0 alone does {place}, and the others wait for it: look at what it does; if it is only slow, use a larger timeout_s"


class Peers(Protocol):
    """Ranks that act together, as one of them sees them: a World, or a SideGroup."""

    rank: int
    size: int
    agreement: Agreement

    @property
    def is_main(self) -> bool: ...


def collectively(
    world: Peers,
    place: str,
    act: Callable[[], T],
    *,
    on_main: bool = False,
    same: Callable[[T], str] | None = None,
    differ: ShardwiseError | None = None,
) -> T:
    """Runs ``act`` on every rank and returns its result once it has succeeded on all. All ranks must call it.

    Args:
        world: the ranks.
        place: what is done, for messages.
        act: may raise anything. An error that is neither a :class:`ShardwiseError` nor an OSError is raised unchanged
            on this rank, and the others raise a RankError.
        on_main: only rank 0 runs ``act``; the others return None.
        same: returns a text that has to be equal on all ranks.
        differ: raised where it is not.

    Raises:
        ShardwiseError: on every rank, the error of the first rank that failed, with its number if others did not.
    """
    problem: ShardwiseError | None = None
    unforeseen: Exception | None = None
    result: T | None = None
    try:
        result = act() if world.is_main or not on_main else None
    except ShardwiseError as error:
        problem = error
    except OSError as error:
        problem = CheckpointError(
            str(error.filename or place),
            why=f"{place} failed: {error.strerror or error}",
            fix="look whether the disk is full, whether the path is there, and whether you may use it",
        )
        problem.__cause__ = error
    except Exception as error:  # the others must not wait for a rank that failed by itself
        unforeseen = error
        problem = RankError(
            f"rank {world.rank} failed at {place}",
            why=f"{type(error).__name__}: {error}"[:300],
            fix="look at that rank's traceback",
            ranks=(world.rank,),
        )
    text = same(result) if same is not None and result is not None else ""
    agreement = world.agreement
    entries = {"failed": float(problem is not None), "same": agreement.same(digest_of_text(text))}
    if_late = _ON_MAIN.format(place=place) if on_main else SAME_CALLS
    summed = agreement.sum(entries, place, if_late=if_late)
    if float(summed["failed"]):
        told = agreement.gather(problem, f"{place}, naming who failed")
        if unforeseen is not None:
            raise unforeseen
        raise _first(told, problem, world.rank, on_main)
    if differ is not None and not agreement.all_same(summed["same"]):
        raise differ
    return result  # type: ignore[return-value]


def _first(
    problems: list[ShardwiseError | None], own: ShardwiseError | None, rank: int, on_main: bool
) -> ShardwiseError:
    number, first = next((number, problem) for number, problem in enumerate(problems) if problem is not None)
    if rank == number and own is not None:
        first = own  # this object has its cause and its traceback
    if on_main or all(problem is not None and str(problem) == str(first) for problem in problems):
        return first
    told = copy.copy(first)
    told.given = f"{first.given} (on rank {number})"
    told.__cause__ = first.__cause__
    return told
