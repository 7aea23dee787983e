"""Matches the patterns by which options name modules: by module name, part by part, or by class name."""

import fnmatch
import re
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


def names_meant(classes: Mapping[str, str], pattern: str) -> list[str]:
    """The names that a pattern means: a whole name means itself alone; else it means those whose last parts it is, letter by letter; else
    modules of this class; else those whose last parts match it.

    Args:
        classes: name -> its class, with the package; "": it is no module.
        pattern: of names.
    """
    if pattern in classes:
        return [pattern]
    return (
        [name for name in classes if name.endswith(f".{pattern}")]
        or [name for name, cls in classes.items() if cls and pattern in (cls, cls.rpartition(".")[2])]
        or [name for name in classes if ends_so(name, pattern)]
    )


def closeness(name: str, pattern: str) -> tuple[int, int]:
    """How close a pattern is to a name that it means: a whole name before its last parts, of which more are closer; these before a pattern
    of names, of which one with more characters of its own is closer; and that before a class."""
    if name == pattern:
        return 3, 0
    if name.endswith(f".{pattern}"):
        return 2, pattern.count(".")
    return (1, len(re.sub(r"\[[^\]]*\]|[*?]", "", pattern))) if ends_so(name, pattern) else (0, 0)


def by_name(values: Mapping[str, T], otherwise: T) -> dict[str, T]:
    """Values of layers in the fewest words: by the last parts of their names where all layers of such a name have the same, and none of
    several is called so itself; else all of them by their whole names.

    >>> by_name({"0.q": 4, "0.k": 8, "1.q": 4, "1.k": 8}, 8), by_name({"0.q": 4, "1.q": 8}, 8)
    ({'q': 4}, {'0.q': 4, '1.q': 8})
    >>> by_name({"q": 4, "1.q": 4, "k": 8}, 8)
    {'q': 4, '1.q': 4, 'k': 8}
    """
    of_last: dict[str, list[T]] = {}
    for name, value in values.items():
        of_last.setdefault(name.rpartition(".")[2], []).append(value)
    if any(
        len({*each}) > 1 or (len(each) > 1 and last in values and each[0] != otherwise)
        for last, each in of_last.items()
    ):
        return {**values}
    return {last: each[0] for last, each in of_last.items() if each[0] != otherwise}
