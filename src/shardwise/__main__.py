"""``python -m shardwise``: the command line, also where its script is not on the path (under torchrun, for one)."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
