"""The layouts between which state has to go, from each to each."""

import pytest

__all__ = ["LAYOUTS", "TRIPS"]

LAYOUTS = {  # name -> (layout, ranks)
    "one": ("dp_shard=1", 1),
    "ddp-2": ("dp_replicate=2", 2),
    "fsdp-2": ("dp_shard=2", 2),
    "fsdp-4": ("dp_shard=4", 4),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
}

# From a layout to which others: every pair in soak; in each run of the tests every layout once as the first and once as the
# second, never itself.
_NAMES = list(LAYOUTS)
TRIPS = [
    *(pytest.param(first, (_NAMES[i - 2],), id=f"{first}-{_NAMES[i - 2]}") for i, first in enumerate(_NAMES)),
    *(pytest.param(first, tuple(_NAMES), id=f"{first}-all", marks=pytest.mark.soak) for first in _NAMES),
]
