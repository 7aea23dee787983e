"""Matches the patterns by which options name modules: by module name, part by part, or by class name."""

import fnmatch


def matches(name: str, cls: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module ``name`` of class ``cls``. Names are compared part by part, so that
    ``blocks.*`` matches the blocks and not the modules inside them."""
    parts, patterns = name.split("."), pattern.split(".")
    by_name = len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return by_name or fnmatch.fnmatchcase(cls, pattern)
