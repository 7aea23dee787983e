"""Imported by Python itself in every program that a test starts: once torch is imported, the garbage collector takes a second of
the three that a small program lives, half of it when the program ends.

The tests of torchrun set ``COLLECT_AS_USUAL``, so that some programs start and end as a user's do.
"""

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import sys

if "COLLECT_AS_USUAL" not in os.environ:
    import seldom_collected  # noqa: F401

    atexit.register(gc.freeze)  # what is still there when a program ends is not looked through

# Python imports one of this name: whatever else is on the path (a recorder of errors, of coverage) is not to be hidden by it.
_here = os.path.dirname(os.path.abspath(__file__))
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _here])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
