"""Tools for tests that run on several ranks, for Shardwise's own tests and for yours."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.testing.pool import RankPool

__all__ = ["RankPool"]


def __getattr__(name: str) -> object:
    # pytest imports this package at start-up wherever shardwise is installed, so everything is loaded on first use.
    if name == "RankPool":
        from shardwise.testing.pool import RankPool

        return RankPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
