"""Starts runs of ``losses.py`` as users do, and tells what they wrote and when, who is left, and how they ended."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch import held_port

SCRIPT = Path(__file__).with_name("losses.py")
LAUNCHERS = ("torchrun", "ours", "slurm")
LIMIT_S = 240.0


@dataclass
class Run:
    """What became of a run.

    Attributes:
        lines: what all ranks and the launcher wrote, with the time.
        lost_at: when the rank was lost; None: it never was.
        codes: exit codes of the processes that were started: of the launcher, or of both ranks.
        left: ranks that still ran when the launcher, or the rank that survived, had ended.
    """

    lines: list[tuple[float, str]] = field(default_factory=list)
    lost_at: float | None = None
    ended_at: float = 0.0
    codes: list[int | None] = field(default_factory=list)
    left: int = 0

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def seconds_to(self, pattern: str) -> float | None:
        """From the loss to the first line that matches; None: none does."""
        found = [at for at, line in self.lines if re.search(pattern, line)]
        return max(0.0, found[0] - self.lost_at) if found and self.lost_at is not None else None

    @property
    def seconds_to_end(self) -> float:
        return self.ended_at - (self.lost_at or 0.0)


def names(rank: int) -> str:
    """A line that says ``rank`` is lost, or waited for."""
    return rf"rank {rank} (was lost|was killed|exited|did not|has ended)|process of rank {rank} has|(: |for )rank {rank} (is|has (?!waited))|kept by rank {rank} has"


def run(
    cause: str,
    lost: int,
    launcher: str,
    *,
    seconds=0.0,
    timeout_s=60.0,
    blocked=False,
    unconnected=False,
    until=None,
    limit_s=LIMIT_S,
) -> Run:
    """Runs to the end, or until a line matches ``until``; then ends what is left."""
    mark = uuid.uuid4().hex
    flags = [flag for flag, is_set in (("--blocked", blocked), ("--unconnected", unconnected)) if is_set]
    words = [str(SCRIPT), *flags, cause, str(lost), str(seconds), str(timeout_s), mark]
    found = Run()
    with held_port() as port:
        processes = _start(launcher, words, port)
        survivors = processes if len(processes) == 1 else [p for i, p in enumerate(processes) if i != lost]
        try:
            _watch(found, processes, survivors, until, time.monotonic() + limit_s)
            found.left = len(_ranks(mark))
        finally:
            for pid in _ranks(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
                process.stdout.close()
    return found


def _start(launcher, words, port):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if launcher == "torchrun":
        commands = [
            ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words], {})
        ]
    elif launcher == "ours":
        commands = [([sys.executable, words[0], "--launch", *words[1:]], {})]
    else:  # two tasks of a step that outlive each other, as they do under srun
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
                "SLURM_JOB_ID": "7", "MASTER_PORT": str(port)}  # fmt: skip
        commands = [
            ([sys.executable, *words], {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
            for rank in range(2)
        ]
    return [
        subprocess.Popen(
            command, env={**env, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        for command, more in commands
    ]


def _watch(found, processes, survivors, until, deadline):
    rests = {process.stdout.fileno(): b"" for process in processes}
    while time.monotonic() < deadline:
        is_over = all(process.poll() is not None for process in survivors)
        for descriptor in select.select(list(rests), [], [], 0.0 if is_over else 0.05)[0]:
            data = os.read(descriptor, 1 << 16)
            if not data:
                del rests[descriptor]
                continue
            *lines, rests[descriptor] = (rests[descriptor] + data).split(b"\n")
            for line in (raw.decode("utf-8", "replace") for raw in lines):
                found.lines.append((time.time(), line))
                if " LOST " in f" {line}":
                    found.lost_at = float(line.split("LOST ")[1])
        if until is not None and found.seconds_to(until) is not None:
            break
        if is_over:
            break
    found.ended_at, found.codes = time.time(), [process.poll() for process in processes]


def _ranks(mark):
    """Processes of ranks, by a word of their command line; forked ones have their parent's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if (
                mark in path.read_text()
                and path.parent.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            ):
                found.append(int(path.parent.name))
    return found
