"""Imported by warm ranks and the tests' own processes: the garbage collector runs seldom, which is 5 % of a whole run.

Tests that are about what is freed collect by themselves.
"""

import gc

gc.set_threshold(20_000, 20, 20)
