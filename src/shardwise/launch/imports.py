"""What runs without the garbage collector: imports of torch and of what uses it, and other code that makes many objects."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within: no garbage is collected, also in processes that are forked there, until they say so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_frozen(name: str) -> ModuleType:
    """``importlib.import_module(name)`` with the garbage collector off, after which it never looks at what was made.

    It finds nothing in modules and classes, which stay. With torch it spends half a second there while they are
    imported, and as much again when the process ends; and it would touch, and so copy, pages that forked ranks share.
    """
    if name in sys.modules:
        return sys.modules[name]
    with uncollected():
        try:
            return importlib.import_module(name)
        finally:
            gc.freeze()
