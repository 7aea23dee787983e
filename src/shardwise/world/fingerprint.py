"""Compares facts (layout, seed, versions, models) between ranks, and names which differ and on which ranks."""

import functools
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec

from shardwise.errors import RankError
from shardwise.world.agreement import Agreement, digest_of_text

_PACKAGES = ("shardwise", "torch", "numpy", "transformers")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results; missing ones are "absent"."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def agree_on(
    agreement: Agreement,
    facts: Mapping[str, Any],
    *,
    what: str,
    fix: str,
    most: int = 1,
    shown: Mapping[str, str] | None = None,
) -> None:
    """Raises on every rank if any two ranks have different ``facts``; costs one small exchange if they agree.

    Args:
        agreement: of the world whose ranks must agree; all of them call this.
        facts: name -> JSON-like value; every key is compared separately.
        what: what is compared ("the models"), for the message.
        fix: how to make them equal.
        most: how many differing facts are shown with their values; the others are only counted.
        shown: name -> what to print in place of a fact that means little to a reader (a digest).
    """
    (found,) = differences(agreement, Facts(facts, what, most, shown))
    if found is not None:
        raise RankError(
            f"{what} differ between ranks: {', '.join(found.names[:most]) or '?'}",
            why=found.told,
            fix=fix,
            ranks=found.ranks,
        )


@dataclass(frozen=True)
class Facts:
    """Facts that each rank has, to be compared.

    Attributes:
        facts, what, most, shown: as of :func:`agree_on`.
        absent: whether it is a difference that a rank does not have a fact.
    """

    facts: Mapping[str, Any]
    what: str
    most: int = 1
    shown: Mapping[str, str] | None = None
    absent: bool = True


@dataclass(frozen=True)
class Difference:
    """How facts differ between ranks.

    Attributes:
        names: of the facts that differ.
        told: their values, and which ranks have them, for messages.
        ranks: those whose facts are not rank 0's.
    """

    names: list[str]
    told: str
    ranks: tuple[int, ...]


def differences(agreement: Agreement, *compared: Facts) -> list[Difference | None]:
    """How each of ``compared`` differs between ranks, the same on every rank; None: it is equal. Costs one small exchange
    if all are equal."""
    digests = [digest_of_text(msgspec.json.encode(own.facts, order="deterministic")) for own in compared]
    entries = {f"digest {i}": agreement.same(digest) for i, digest in enumerate(digests)}
    summed = agreement.sum(entries, f"comparing {compared[0].what}")
    return [
        None if agreement.all_same(total) else _difference(agreement, own)
        for own, total in zip(compared, summed.values(), strict=True)
    ]


def _difference(agreement: Agreement, own: Facts) -> Difference | None:
    answers = agreement.gather((dict(own.facts), {**own.facts, **(own.shown or {})}), f"naming how {own.what} differ")
    facts, printed = [answer[0] for answer in answers], [answer[1] for answer in answers]
    keys = [key for key in _differing(facts) if own.absent or all(key in given for given in facts)]
    if not keys and not own.absent:
        return None
    ranks = tuple(r for r, given in enumerate(facts) if any(given.get(k) != facts[0].get(k) for k in keys))
    return Difference(keys, _told(keys, printed, own.most), ranks)


def described(value: Any) -> str:
    """``repr(value)`` as every process prints it: without addresses, which are equal only in processes forked from one,
    and with sets and mappings sorted by content, since the hash of a text differs by process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{described(key)}: {described(item)}" for key, item in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    if type(value) in (list, tuple):
        return "(" + ", ".join(map(described, value)) + ")"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def _differing(per_rank: list[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for facts in per_rank for key in facts)
    return [key for key in keys if any(facts.get(key) != per_rank[0].get(key) for facts in per_rank)]


def _told(keys: list[str], printed: list[dict[str, Any]], most: int) -> str:
    """Each differing fact with its values and the ranks that have them; one fact stays on the line of the message."""
    if not keys:
        return "the digests differ, the values print alike"
    lines = [_values(key, printed) for key in keys[:most]]
    if most == 1:
        return lines[0]
    lines = [f"{key}: {line}" for key, line in zip(keys, lines, strict=False)]
    if len(keys) > most:
        lines.append(f"and {len(keys) - most} more")
    return "\n       ".join(lines)


def _values(key: str, printed: list[dict[str, Any]]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(printed):
        groups.setdefault(_short(facts.get(key, "absent")), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in groups.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 160 else text[:157] + "..."
