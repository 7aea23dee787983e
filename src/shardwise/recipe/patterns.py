"""Matches the patterns by which options name modules: by module name, part by part, or by class name."""

import fnmatch
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T", int, float)


def matches(name: str, cls: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module ``name`` of class ``cls``. Names are compared part by part, so that
    ``blocks.*`` matches the blocks and not the modules inside them."""
    parts, patterns = name.split("."), pattern.split(".")
    by_name = len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return by_name or fnmatch.fnmatchcase(cls, pattern)


def ends_so(name: str, pattern: str) -> bool:
    """Whether the last parts of a name match those of a pattern: ``layers.0.q_proj`` is meant by ``q_proj`` and by ``0.*``."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) >= len(patterns) and all(map(fnmatch.fnmatchcase, parts[-len(patterns) :], patterns))


def by_name(values: Mapping[str, T], otherwise: T) -> dict[str, T]:
    """Values of layers in the fewest words: by the last parts of their names where all layers of such a name have the same, else all of
    them by their whole names.

    >>> by_name({"0.q": 4, "0.k": 8, "1.q": 4, "1.k": 8}, 8), by_name({"0.q": 4, "1.q": 8}, 8)
    ({'q': 4}, {'0.q': 4, '1.q': 8})
    """
    of_last: dict[str, set[T]] = {}
    for name, value in values.items():
        of_last.setdefault(name.rpartition(".")[2], set()).add(value)
    if any(len(each) > 1 for each in of_last.values()):
        return {**values}
    return {last: value for last, (value,) in of_last.items() if value != otherwise}
