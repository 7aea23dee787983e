"""The torch versions on which the whole test suite ran."""

import torch

TESTED = ((2, 11), (2, 12), (2, 13), (2, 14))


def is_newer() -> bool:
    """Whether this torch is newer than every tested one: private names that are used may exist and mean another
    thing."""
    return _numbers() > max(TESTED)


def is_older() -> bool:
    """Whether this torch is older than every tested one."""
    return _numbers() < min(TESTED)


def fake_groups_compute() -> bool:
    """Whether collectives of torch's backend "fake" write their results, as if the other ranks had sent what this one sends."""
    return _numbers() >= (2, 13)


def _numbers() -> tuple[int, int]:
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)
