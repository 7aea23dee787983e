"""The torch versions on which the whole test suite ran."""

import torch

TESTED = ((2, 13), (2, 14))


def is_newer() -> bool:
    """Whether this torch is newer than every tested one: private names that are used may exist and mean another
    thing."""
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) > max(TESTED)
