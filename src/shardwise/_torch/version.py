"""Which versions of torch the whole suite ran on."""

import torch

__all__ = ["TESTED", "is_newer"]

TESTED = ((2, 13),)


def is_newer() -> bool:
    """Whether this torch is newer than every one that the suite ran on: private names that are used may be there and mean another thing."""
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) > max(TESTED)
