"""What probes find by running the user's code: one rank finds it for all."""

from collections.abc import Callable
from typing import TypeVar

from shardwise.techniques.technique import Example
from shardwise.world import World, forked_streams
from shardwise.world.collectively import collectively

Found = TypeVar("Found")


def found_by_one_rank(world: World, example: Example, what: str, find: Callable[[], Found]) -> Found:
    """The result of ``find()`` on rank 0, on every rank: they have the same module, which is checked elsewhere. All ranks must call it.

    Args:
        world: the ranks.
        example: which ``find`` runs.
        what: ``find`` does, for errors of another rank.
        find: draws numbers that no other code's depend on.
    """
    with example.within(), forked_streams(0, None, {}):  # this rank's random numbers go on as on the others
        found = collectively(world, what, find, on_main=not world.agreement.is_alone)
    return world.broadcast(found)
