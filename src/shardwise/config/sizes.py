"""Sizes in bytes as people write them. Torch-free."""

import re

from shardwise.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}


def is_size(text: str) -> bool:
    """Whether ``text`` starts as a size does: with a digit."""
    return text.strip()[:1].isdigit()


def num_bytes(text: str, option: str) -> int:
    """The bytes that ``text`` means: "8GiB" (2^30 each), "500MB" (10^6 each), "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    size = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0
    if size < 1:
        raise ConfigError(f"{option} {text}", why="that is no size", fix="write 5GB, 500MB, 2GiB, or bytes")
    return int(size)
