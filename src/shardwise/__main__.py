"""``python -m shardwise``: the command line, also where its script is not on the path (under torchrun, for one)."""

import sys


def run() -> int:
    """The command line; Ctrl-C while it is being imported is answered as later."""
    try:
        from shardwise.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
