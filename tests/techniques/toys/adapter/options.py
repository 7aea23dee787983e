"""Options of the adapter toy."""

from typing import Annotated

import msgspec

from shardwise.config.record import Options, doc


class Adapter(Options, frozen=True, kw_only=True):
    """Which adapters there are."""

    rank: Annotated[Annotated[int, msgspec.Meta(ge=1)], doc("rows of the first, columns of the second matrix")] = 2
