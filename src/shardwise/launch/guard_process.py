"""A guard process that kills the ranks and their children if the launching process was killed.

Run as a script, by path, with only the standard library. It reads process groups from stdin, one number per line. The
end of stdin means that the parent is gone: every group still listed is killed. "-12" takes group 12 off the list. A
parent that ends in order takes all groups off first.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads process groups until the end of stdin, then kills those still on the list."""
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
