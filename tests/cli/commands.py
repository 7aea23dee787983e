"""``shardwise`` commands on warm ranks, as a launcher of others starts them: numbers and words are those of a run in processes
of its own, and nobody imports torch first. What is about starting and ending processes is tested with real ones."""

import contextlib
import io
from pathlib import Path

from shardwise.cli import main as cli
from shardwise.testing import RankPool

__all__ = ["on_ranks", "run_command"]


def on_ranks(ranks: RankPool, *words: str, folder: Path, num_ranks: int = 2, status: int = 0) -> str:
    """Runs the command in ``folder`` on so many ranks, each of which has to end with ``status``; rank 0's stdout, or where
    it refuses the stderr of the rank that shows why, its lines as one."""
    done = ranks.run(run_command, num_ranks, str(folder), words, timeout_s=100)
    assert {code for code, _, _ in done} == {status}, done
    assert not any("Traceback" in err for _, _, err in done), done
    if status not in (1, 2):
        return " ".join(done[0][1].split())
    # The first rank to end with an error shows it, and the others name that rank.
    shown = [err for _, _, err in done if "(shown by rank " not in err]
    assert shown, done
    return " ".join(shown[0].split())


def run_command(folder: str, words: tuple[str, ...]) -> tuple[int, str, str]:
    """On a rank: exit status, what it wrote to stdout and to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(words))
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
