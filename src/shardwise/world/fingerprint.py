"""Finds out at start-up whether the ranks mean the same thing, and names what differs and on which ranks."""

import hashlib
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import msgspec

from shardwise.errors import RankError
from shardwise.world.agreement import Agreement

__all__ = ["agree_on", "package_versions"]

_PACKAGES = ("shardwise", "torch", "numpy", "transformers")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that change numbers; absent ones say so."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def agree_on(agreement: Agreement, facts: Mapping[str, Any], *, what: str, fix: str) -> None:
    """Raises on every rank if any two ranks gave different ``facts``; costs one small exchange if they agree.

    Args:
        agreement: of the world whose ranks must agree; all of them call.
        facts: name -> JSON-like value; every key is compared by itself.
        what: what is compared ("the models"), for the message.
        fix: how to make them equal.

    Raises:
        RankError: naming the first fact that differs, its values and the ranks that have them.
    """
    text = msgspec.json.encode(facts, order="deterministic")
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") & (1 << 60) - 1
    summed = agreement.sum({"digest": agreement.same(digest)}, f"comparing {what}")
    if agreement.all_same(summed["digest"]):
        return
    per_rank = agreement.gather(dict(facts), f"naming how {what} differ")
    key, values = _first_difference(per_rank)
    ranks = tuple(rank for rank, value in enumerate(per_rank) if value.get(key) != per_rank[0].get(key))
    raise RankError(f"{what} differ between ranks: {key}", why=values, fix=fix, ranks=ranks)


def _first_difference(per_rank: list[dict[str, Any]]) -> tuple[str, str]:
    keys = list(dict.fromkeys(key for facts in per_rank for key in facts))
    for key in keys:
        groups: dict[str, list[int]] = {}
        for rank, facts in enumerate(per_rank):
            groups.setdefault(_short(facts.get(key, "absent")), []).append(rank)
        if len(groups) > 1:
            return key, "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in groups.items())
    return "?", "the digests differ, the values print alike"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 160 else text[:157] + "..."
