"""Makes every Python process write the errors of Shardwise that it constructs to a file, if first on PYTHONPATH.

Python imports ``sitecustomize`` by itself when it starts, so that ranks, launchers and commands that a test starts are
recorded too. ``SHARDWISE_REPLAY_ERRORS`` is a folder: each process adds lines of JSON, ``[type, text]``, to a file named
after its process id.
"""

import importlib.machinery
import json
import os
import sys

FOLDER = os.environ.get("SHARDWISE_REPLAY_ERRORS")


class _Watched:
    """Finds ``shardwise.errors`` as always, and has its base class write down what is constructed."""

    def find_spec(self, name, path=None, target=None):
        if name != "shardwise.errors":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def watched(module):
                run(module)
                _watch(module.ShardwiseError)

            spec.loader.exec_module = watched
        return spec


def _watch(base):
    construct = base.__init__

    def recorded(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        line = json.dumps([type(self).__name__, Exception.__str__(self), str(self)])
        with open(f"{FOLDER}/{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    base.__init__ = recorded


if FOLDER:
    sys.meta_path.insert(0, _Watched())
