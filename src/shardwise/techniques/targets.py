"""The option ``targets`` of a technique, and the modules that it means. Torch-free.

Targets become names of modules when the recipe is made, so that a target that matches nothing is an error before
anything happens, and the recipe lists the modules.
"""

from typing import Any

import msgspec

from shardwise.config.record import doc
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError, PlanError
from shardwise.recipe import Anatomy
from shardwise.recipe.targets import modules_named, refuse_nested, with_forward

Targets = str | tuple[str, ...]
TARGETS = doc(
    "blocks: every block of the outermost lists; else patterns of module names or classes, as a list or with commas; in "
    "Python also classes"
)


def word_or_record(key: str, value: Any, cls: type, words: dict[str, Any], *, also: str = "") -> Any:
    """``value`` if it is a record or None, else the record for a word; ``cls`` is the class of the record, ``also`` names what
    else the caller takes."""
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, str) and value in words:
        return words[value]
    raise ConfigError(
        f"{key}={value!r}",
        why=f"that is neither a word for {key} nor a {cls.__name__} record",
        fix=did_you_mean(str(value), list(words), what="words")
        + f'{also}, or a record: {cls.__name__}(targets=("Block",))',
    )


def named_record(key: str, value: Any, record: Any, field: str, fix: str) -> Any:
    """``value`` if it is a record like ``record``, which None stands for, else that with the text ``value`` in ``field``."""
    if isinstance(value, str | None):
        return record if value is None else type(record)(**{field: value})
    if isinstance(value, type(record)):
        return value
    name = type(record).__name__
    raise ConfigError(
        f"{key}={value!r}",
        why=f"that is a {type(value).__name__}, and neither the name of a {field} nor a {name} record",
        fix=f"use {fix}",
    )


def settle_targets(record: Any) -> None:
    """Turns a text other than "blocks" into the patterns it lists; refuses empty ones."""
    if isinstance(record.targets, str) and record.targets != "blocks":
        msgspec.structs.force_setattr(record, "targets", tuple(part.strip() for part in record.targets.split(",")))
    targets = record.targets
    if isinstance(targets, tuple) and not (targets and all(targets)):
        raise ConfigError(
            f"{type(record).__name__}(targets={list(targets)})",
            why="no pattern, or an empty one, means no module",
            fix='name modules, as targets=["blocks.*"] or ["Block"], or leave it at "blocks"',
        )


def resolve(anatomy: Anatomy, targets: str | tuple[str, ...], every: int, record: str) -> list[tuple[str, str]]:
    """``(module, why)`` for the modules that ``targets`` mean, in the order of the module; of each list the first of
    ``every``."""
    if isinstance(targets, str):
        found = {block: "a block of an outermost list" for blocks in anatomy.lists for block in blocks.blocks}
        if not found:
            raise PlanError(
                f"{record} of the blocks of {anatomy.module_class}",
                why="no list of blocks was found in it",
                fix=f"name the modules: {record}(targets={_some_class(anatomy)!r})",
            )
    else:
        found = {
            name: f"named by {pattern!r}"
            for pattern in targets
            for name in modules_named(anatomy, pattern, f"{record}(targets=({pattern!r},))")
        }
    runnable = {name: why for given, why in found.items() for name in with_forward(anatomy, given, record)}
    order = [name for name in anatomy.classes if name in runnable]
    refuse_nested(order, f"{record}(targets={targets!r})", "one is inside the other, and would be changed twice")
    seen: dict[str, int] = {}
    chosen = []
    for name in order:
        home = name.rpartition(".")[0]
        if seen.setdefault(home, 0) % every == 0:
            chosen.append((name, runnable[name]))
        seen[home] += 1
    return chosen


def _some_class(anatomy: Anatomy) -> tuple[str, ...]:
    classes = [cls for name, cls in anatomy.classes.items() if name and name not in anatomy.containers]
    return (max(sorted(set(classes)), key=classes.count),) if classes else ("Block",)
