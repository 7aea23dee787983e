"""Resolves a pattern in an option to modules, or raises an error with the names that it could have meant."""

import difflib
from collections.abc import Container, Sequence

from shardwise.errors import PlanError
from shardwise.recipe.patterns import matches
from shardwise.recipe.records import Anatomy


def modules_named(anatomy: Anatomy, pattern: str, given: str) -> list[str]:
    """The modules that ``pattern`` matches, in the order of the module; never the root.

    Args:
        anatomy: of the module.
        pattern: of names, part by part, or of classes; or a class with its package.
        given: the option, for the message.
    """
    found = [
        name
        for name, cls in anatomy.classes.items()
        if name and (matches(name, cls, pattern) or pattern == anatomy.class_paths.get(name))
    ]
    if found:
        return found
    classes = sorted({cls for name, cls in anatomy.classes.items() if name})
    names = [name for name in anatomy.classes if name and not name.rpartition(".")[2].isdigit()]
    close = difflib.get_close_matches(pattern, [*classes, *names], n=2, cutoff=0.6)
    lists = [f"{blocks.name}.*".removeprefix(".") for blocks in anatomy.lists]
    raise PlanError(
        given,
        why="it matches no module's name and no module's class",
        fix=(f"did you mean {' or '.join(map(repr, close))}? " if close else "")
        + f"use a class of this model ({', '.join(classes[:12])}) or a pattern of names, part by part"
        + (f", such as {lists[0]!r}" if lists else ""),
    )


def with_forward(anatomy: Anatomy, name: str, record: str) -> list[str]:
    """``name`` itself, or, for a container without a forward (nothing ever calls it), the modules inside it."""
    if name not in anatomy.containers:
        return [name]
    depth = name.count(".") + 1
    below = [other for other in anatomy.classes if other.startswith(f"{name}.") and other.count(".") == depth]
    found = [runnable for child in below for runnable in with_forward(anatomy, child, record)]
    if not found:
        raise PlanError(
            f"{record} of {name!r}, a {anatomy.classes[name]}",
            why="it has no forward, and holds no module that has one",
            fix="name modules that are called",
            name=name,
        )
    return found


def innermost(name: str, chosen: Container[str]) -> str | None:
    """The innermost module in ``chosen`` that contains ``name`` (a module or a tensor), ``name`` itself excluded."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in chosen:
            return name
    return None


def refuse_nested(order: Sequence[str], given: str, why: str) -> None:
    """Raises PlanError if one module in ``order`` is inside another one; ``why`` is the reason for the message."""
    chosen = set(order)
    for inner in order:
        outer = innermost(inner, chosen)
        if outer is not None:
            raise PlanError(
                f"{given}: {outer!r} and {inner!r}",
                why=why,
                fix=f"choose patterns that match either {outer!r} or {inner!r}",
                name=inner,
            )
