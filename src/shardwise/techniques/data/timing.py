"""Sets when each unit is gathered and freed: ``reshard_after_forward``, ``reshard_every`` and ``prefetch``."""

import msgspec

from shardwise.errors import PlanError
from shardwise.recipe.patterns import matches
from shardwise.recipe.records import ROOT, Anatomy, Unit
from shardwise.techniques.data.options import NO_PREFETCH, Prefetch, Sharding


def with_timing(anatomy: Anatomy, units: tuple[Unit, ...], sharding: Sharding) -> tuple[Unit, ...]:
    """``units``, the root last, with ``reshard`` and prefetch set as the options say.

    The root's own ``reshard`` is kept: it stays gathered from forward to backward, which starts with it.

    Raises:
        PlanError: a pattern that matches no unit, or one that matches only a part of one.
    """
    *inner, root = units
    values = _reshard(anatomy, inner, sharding.reshard_after_forward)
    freed = [value if i % sharding.reshard_every == 0 else False for i, value in enumerate(values)]
    timed = [msgspec.structs.replace(unit, reshard=value) for unit, value in zip(inner, freed, strict=True)]
    return _prefetched((*timed, root), sharding.prefetch)


def _reshard(anatomy: Anatomy, units: list[Unit], given: bool | int | dict[str, bool | int]) -> list[bool | int]:
    """``reshard_after_forward`` of each unit: that of the last pattern that matches it, and true where none does."""
    if not isinstance(given, dict):
        return [given] * len(units)
    found: list[bool | int] = [True] * len(units)
    for pattern, value in given.items():
        hits = [i for i, unit in enumerate(units) if _meant(anatomy, unit, pattern)]
        if not hits:
            raise PlanError(
                f"reshard_after_forward={{{pattern!r}: {value}}}",
                why="the pattern matches no module of a unit",
                fix=f"use names or classes of units: {', '.join(_kinds(anatomy, units)) or 'this recipe has only the root'}",
            )
        for i in hits:
            found[i] = value
    return found


def _meant(anatomy: Anatomy, unit: Unit, pattern: str) -> bool:
    hit = [
        module
        for module in unit.modules
        if matches(module, anatomy.classes[module], pattern) or pattern == anatomy.class_paths.get(module)
    ]
    if hit and len(hit) < len(unit.modules):
        raise PlanError(
            f"reshard_after_forward={{{pattern!r}: ...}}: {hit[0]!r}",
            why=f"it is merged with others into unit {unit.name!r}, and a unit is freed as one",
            fix="match all of the unit's modules, or use min_unit_bytes=0 to keep every block a unit of its own",
            name=hit[0],
        )
    return bool(hit)


def _kinds(anatomy: Anatomy, units: list[Unit]) -> list[str]:
    modules = [module for unit in units for module in unit.modules]
    return list(dict.fromkeys([anatomy.classes[module] for module in modules] + modules))[:12]


def _prefetched(units: tuple[Unit, ...], given: str | Prefetch) -> tuple[Unit, ...]:
    """Sets prefetches: forward runs from the root through the units in the order of the module, backward in reverse."""
    if given == "default":
        return units
    plan = given if isinstance(given, Prefetch) else NO_PREFETCH
    names = [unit.name for unit in units if unit.name != ROOT]
    timed = []
    for unit in units:
        at = names.index(unit.name) if unit.name != ROOT else -1
        ahead = tuple(names[at + 1 : at + 1 + plan.forward])
        before = names[:at] if at >= 0 else names
        behind = (
            None if plan.backward == 1 else tuple(reversed(before[len(before) - min(plan.backward, len(before)) :]))
        )
        timed.append(msgspec.structs.replace(unit, prefetch_forward=ahead, prefetch_backward=behind))
    return tuple(timed)
