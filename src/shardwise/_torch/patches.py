"""Functions and methods of torch that are replaced in the whole process, each with its reason: docs/patches.md is the list."""

import os
from dataclasses import dataclass
from typing import Any

SWITCH = "SHARDWISE_PATCHES"
"""Environment variable: with ``needed``, those that only refuse calls are left out."""


@dataclass(frozen=True)
class Patch:
    """What was replaced.

    Attributes:
        why: what Shardwise's function does more than torch's.
        is_guard: it only refuses calls that would train wrongly; results of others are as without it.
    """

    why: str
    is_guard: bool


MADE: dict[str, Patch] = {}
"""Name of what was replaced so far -> the reason."""


def patch(owner: Any, name: str, value: Any, why: str, *, is_guard: bool = True) -> None:
    """Replaces attribute ``name`` of a module or class of torch by ``value``, for as long as the process lives."""
    if is_guard and os.environ.get(SWITCH) == "needed":
        return
    place = owner.__name__ if not isinstance(owner, type) else f"{owner.__module__}.{owner.__qualname__}"
    MADE[f"{place}.{name}"] = Patch(why, is_guard)
    setattr(owner, name, value)
