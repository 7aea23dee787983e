"""Matches the patterns by which options name modules: by module name, part by part, or by class name."""

import fnmatch


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
