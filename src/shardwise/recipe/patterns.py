"""Patterns by which options name modules: of their names, part by part, or of their classes."""

import fnmatch

__all__ = ["matches"]


def matches(name: str, cls: str, pattern: str) -> bool:
    """Whether ``pattern`` means the module ``name`` of class ``cls``. Names are compared part by part, so that
    ``blocks.*`` means the blocks and not all that is in them."""
    parts, patterns = name.split("."), pattern.split(".")
    by_name = len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return by_name or fnmatch.fnmatchcase(cls, pattern)
