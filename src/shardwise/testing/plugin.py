"""pytest plugin: the fixture ``ranks``, a warm pool of gloo ranks for the whole session.

    def scaled(factor):
        world = shardwise.init("dp_shard=2")
        ...

    def test_scaled(ranks):
        first, second = ranks.run(scaled, 2, 3.0, timeout_s=30)

Under pytest-xdist each of its processes has its own pool. The ranks end with pytest, however it ends.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardwise.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankPool"]:
    """A :class:`shardwise.testing.RankPool`, started when first used and closed at the end of the session."""
    from shardwise.testing.pool import RankPool

    with RankPool() as pool:
        yield pool
