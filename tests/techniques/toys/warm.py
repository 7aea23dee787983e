"""Runs commands and scripts on warm ranks: each is a line of JSON, and its answer, after other lines, is another.

``python -c "import warm; warm.main()"``. Torch is imported once for all of them, by the copy of ``shardwise`` that has the toys.
"""

import importlib
import io
import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from commands import run_command

from shardwise.cli import main as cli
from shardwise.testing import RankPool
from shardwise.verify import run as verify_run

HERE = str(Path(__file__).parent)


def script(path):
    """On a rank, as a launcher starts it."""
    sys.path.insert(0, HERE)
    runpy.run_path(path, run_name="__main__")


def as_started(words):
    """A command in a process that is no rank: exit status and what it wrote."""
    written = io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    return code, written.getvalue()


def answer(pool, how, words):
    if how == "verify":
        return as_started([how, *words])
    if how == "with the pool":
        module, *more = words
        importlib.import_module(module).main(pool, more)
        return 0, Path("out.json").read_text()
    if how == "script":
        pool.run(script, 2, *words, timeout_s=100)
        return 0, Path("out.json").read_text()
    done = pool.run(run_command, 2, HERE, (how, *words), timeout_s=100)
    return max(code for code, _, _ in done), "".join(out + err for _, out, err in done)


def main():
    with RankPool(preload=("torch", "shardwise.verify.preload", "commands")) as pool:

        def on_warm_ranks(target, *, nproc, args):
            module, _, name = target.partition(":")
            return pool.run(getattr(importlib.import_module(module), name), nproc, *args)

        verify_run.launch_local = on_warm_ranks
        for line in sys.stdin:
            how, *words = json.loads(line)
            print("ANSWER", json.dumps(answer(pool, how, words)), flush=True)
