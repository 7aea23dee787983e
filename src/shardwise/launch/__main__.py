"""Entry point of a rank: ``python -m shardwise.launch CONTROL EVENTS PARENT``; see :mod:`shardwise.launch.child`."""

import sys

from shardwise.launch.child import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
