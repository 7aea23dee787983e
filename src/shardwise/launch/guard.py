"""Outlives the launching process just long enough to end its ranks, and their own children, when it was killed.

Run as a script, by path, with nothing but the standard library. It reads process groups from stdin, one number a
line. The end of stdin means that the parent is gone: every group still listed is killed. "-12" takes group 12 off the
list. A parent that ends in order takes all groups off first.
"""

import contextlib
import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Reads until the end of stdin, then kills what is on the list."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
