"""Imports of torch and of what uses it, without the garbage collector."""

import gc
import importlib
import sys
from types import ModuleType


def import_frozen(name: str) -> ModuleType:
    """``importlib.import_module(name)`` with the garbage collector off, after which it never looks at what was made.

    It finds nothing in modules and classes, which stay. With torch it spends half a second there while they are
    imported, and as much again when the process ends; and it would touch, and so copy, pages that forked ranks share.
    """
    if name in sys.modules:
        return sys.modules[name]
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
