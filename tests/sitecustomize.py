"""Imported by Python itself in every program that a test starts: once torch is imported, the garbage collector takes a second of
the three that a small program lives, half of it when the program ends.

The tests of torchrun set ``COLLECT_AS_USUAL``, so that some programs start and end as a user's do.
"""

import atexit
import gc
import os

if "COLLECT_AS_USUAL" not in os.environ:
    import seldom_collected  # noqa: F401

    atexit.register(gc.freeze)  # what is still there when a program ends is not looked through
