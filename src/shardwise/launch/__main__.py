"""Entry point of a rank, ``python -m shardwise.launch CONTROL EVENTS PARENT`` (:mod:`shardwise.launch.child`), and of
the fork server, ``python -m shardwise.launch --serve CONNECTION PARENT`` (:mod:`shardwise.launch.forkserver`)."""

import sys

from shardwise.launch import child, forkserver

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(forkserver.main(words[1:]) if words[0] == "--serve" else child.main(words))
