"""Starts the ranks of one machine, watches them, and always ends all of them.

    results = launch_local("my_package.job:main", nproc=2, args=("config.yaml",))

The parent reads what every rank writes and prints it with the rank before each line. When a rank fails, the others are
ended, and the failure that caused the rest is raised. However the parent ends (return, exception, Ctrl-C, SIGTERM, even
SIGKILL), no rank and no child of a rank outlives it.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from shardwise.config.user_script import refuse_while_imported
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.child import Job
from shardwise.launch.environment import variables_of
from shardwise.launch.failure import Failure, load_error, rank_error, root_cause
from shardwise.launch.process import Guard, held_port
from shardwise.launch.rank import Callbacks, RankProcess
from shardwise.launch.script import pickled
from shardwise.launch.starting import ForkServer, Interpreters, Starter
from shardwise.launch.stop_signals import FirstStop, Forwarded, terminable
from shardwise.launch.supervisor import TICK_S, Supervisor

CHOSE_THREADS = "SHARDWISE_SET_OMP_NUM_THREADS"
"""Environment variable that shows ranks that OMP_NUM_THREADS=1 is the launcher's choice, and not the user's."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", CHOSE_THREADS: "1"}


def launch_local(
    target: str | Callable[..., object],
    *,
    nproc: int,
    args: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    on_event: Callable[[int, dict], None] | None = None,
    on_line: Callable[[int, str, str], None] | None = None,
    grace_s: float = 5.0,
    timeout_s: float | None = None,
    stopped_s: float = 10.0,
    notice_s: float | None = None,
    passes_on: Sequence[int] = (),
    preload: Sequence[str] = (),
) -> list:
    """Runs ``target(*args)`` in ``nproc`` new processes (ranks) and returns their results in rank order.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, unless you set them,
    OMP_NUM_THREADS=1 and TORCH_CPP_LOG_LEVEL=ERROR. Arguments and results are pickled, events are JSON. Call it from
    the main thread if SIGTERM to this process shall end the ranks in order; from other threads they are killed instead.

    Args:
        target: the function, or its name as "pkg.mod:fn" or "path/to/file.py:fn". A function of the script that is running will
            do: each rank runs the script once more, without what is below ``if __name__ == "__main__":``. A name costs
            no second run, and torch need not be imported here.
        nproc: number of ranks.
        args: positional arguments of the function, the same on every rank. Functions and classes of the script can be among
            them.
        env: variables on top of this process's own; MASTER_ADDR and MASTER_PORT given here are used as they are.
        on_event: called with ``(rank, event)`` for each ``send_event``; with ``(0, {"kind": "interrupted"})`` after
            Ctrl-C, before the ranks are sent SIGTERM; with ``(0, {"kind": "asked_to_stop", "signal": "SIGTERM"})`` when
            a signal is sent on to them to stop in order.
        on_line: called with ``(rank, "stdout" | "stderr", line)``; by default lines are printed as "[rank 1] line".
        grace_s: seconds between SIGTERM and SIGKILL when ranks have to be ended.
        timeout_s: seconds after which the ranks are ended; None: no limit.
        stopped_s: seconds after which a rank that is stopped (SIGSTOP) counts as failed.
        notice_s: SIGTERM, SIGUSR1 or SIGHUP to this process is sent on to the ranks (not to their children), which then
            have this many seconds to stop in order, as those with a ``CheckpointManager`` do; a second SIGTERM ends
            them. None: SIGTERM and SIGHUP end the ranks.
        passes_on: signals that are sent on to the ranks each time they arrive, and end nothing: ``(signal.SIGUSR1,)``
            with ``CheckpointManager(sigusr1="save")``. A rank has them blocked until its manager is made, and ignores
            them after the manager is closed.
        preload: modules to import once, in a process that is then forked for each rank, instead of once in each:
            "torch" takes seconds. For ranks on the CPU. If a module starts threads when it is imported (a fork would
            lack them) or cannot be imported, or the system is not Linux, each rank imports for itself, as without this
            option. The parent of a forked rank (``os.getppid()``) is that process, not this one. All forked ranks
            iterate over sets in the same order; ranks that are started separately do so only with a PYTHONHASHSEED.

    Raises:
        RankError: a rank failed; ``.ranks`` names it, the text holds its traceback.
        ShardwiseError: a rank raised one; it is raised again here, with its rank and traceback as a note.
        UsageError: the function or an argument cannot be sent to another process, such as a lambda, or it is called at the top level of the
            script that ranks run to have its functions.
        ConfigError: ``target`` or ``nproc`` is invalid; ``notice_s`` or ``passes_on`` outside the main thread.
        KeyboardInterrupt, SystemExit(143): Ctrl-C or SIGTERM (129: SIGHUP, 138: SIGUSR1); the ranks have ended.
        Stopped: every rank has stopped in order, and saved.
    """
    named = target if isinstance(target, str) else None
    said = f"launch_local({getattr(target, '__qualname__', repr(target))})"
    refuse_while_imported(said)
    _check(target, nproc, notice_s, passes_on)
    if named is None:
        pickled([target], said)  # by itself: its own error, where it is what cannot be sent
    payload, script = pickled(args if named else (target, *args))
    callbacks = Callbacks(on_line or _print_line, on_event or _ignore_event)
    job = Job(
        target=named,
        args=payload,
        script=script,
        path=tuple(sys.path),
        pythonpath=(env or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH")),
    )
    stop, forwarded = FirstStop(), Forwarded(passes_on)
    stopping = terminable() if notice_s is None else stop.handled()
    with (
        held_port() as port,
        forwarded.handled(),
        stopping,
        Guard() as guard,
        ExitStack() as server,
        ExitStack() as ranks,
    ):
        base = {**_variables(port, env or {}), **forwarded.env}
        supervisor = Supervisor(guard, grace_s, timeout_s, stopped_s, callbacks.on_event)
        ranks.callback(supervisor.close)  # before the server ends, which would end the ranks

        def overdue() -> None:
            if stop.number is not None:
                raise SystemExit(128 + stop.number)  # nothing has begun that could be saved
            if supervisor.is_late:
                raise _error([], [_not_begun(rank, timeout_s, preload) for rank in range(nproc)])

        starter = _starter(server, preload, base, callbacks, overdue)
        with forwarded.blocked():
            for rank in range(nproc):
                supervisor.add(RankProcess(rank, job, {**base, **variables_of(rank, nproc)}, callbacks, starter))
        try:
            supervisor.run(stop, notice_s, forwarded)
        except KeyboardInterrupt:
            callbacks.on_event(0, {"kind": "interrupted"})
            raise
    return _results(supervisor.ranks, supervisor.blamed, stop.number)


def _variables(port: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of every rank: this process's own with ``env`` on top."""
    return {
        **({} if "OMP_NUM_THREADS" in {**os.environ, **env} else _ONE_THREAD),
        # Silences warnings of torch's C++ code: when ranks are ended, these are stacks of a store lost with rank 0.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **env,
    }


def _results(ranks: Sequence[RankProcess], blamed: list[Failure], stopped_by: int | None) -> list:
    """The results of ranks that have ended, or what :func:`launch_local` raises. ``stopped_by``: the signal that asked it to stop."""
    if stopped_by is not None and not blamed and _has_only_stopped(ranks, stopped_by):
        raise SystemExit(128 + stopped_by)  # it has ended a rank that had nothing to save
    failures = [rank.failure for rank in ranks if rank.failure is not None]
    if failures or blamed:
        if failures and all(failure.weight for failure in failures):
            failures += [rank.quit for rank in ranks if rank.quit is not None]
        raise _error(failures, blamed)
    for rank in ranks:
        if rank.stopped is not None:
            raise rank.stopped
    return [pickle.loads(rank.result) for rank in ranks]  # type: ignore[arg-type]


def _has_only_stopped(ranks: Sequence[RankProcess], number: int) -> bool:
    """Whether the signal ``number`` has ended a rank, and no rank failed by itself. Ranks that are ended because another one failed
    have the same exit code as those that the signal ended."""

    def is_stopped(rank: RankProcess) -> bool:
        by_handler = rank.failure is not None and rank.failure.what == f"raised SystemExit: {128 + number}"
        return rank.code == -number or by_handler

    failed = any(rank.failure is not None and not rank.failure.weight for rank in ranks if not is_stopped(rank))
    return not failed and any(map(is_stopped, ranks))


def _starter(
    stack: ExitStack, modules: Sequence[str], env: Mapping[str, str], callbacks: Callbacks, overdue: Callable[[], None]
) -> Starter:
    """What starts the ranks: a fork server with ``modules`` imported, which ``stack`` ends; or, without modules or
    where it cannot be forked, new interpreters. While it waits for the imports it calls ``overdue``, which raises to
    give up."""
    if modules and sys.platform == "linux":
        with ExitStack() as attempt:
            server = attempt.enter_context(ForkServer(modules, env))
            while (ready := server.is_ready(TICK_S)) is None:
                overdue()
            if ready:
                for stream, text in zip(("stdout", "stderr"), server.output, strict=True):
                    for line in text.splitlines():
                        callbacks.on_line(0, stream, line)
                stack.push(attempt.pop_all())
                return server
    return Interpreters()


def _check(target: object, nproc: int, notice_s: float | None, passes_on: Sequence[int]) -> None:
    if nproc < 1:
        raise ConfigError(f"nproc={nproc}", why="a job needs at least one rank", fix="use 1 or more")
    if (notice_s is not None or passes_on) and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"notice_s={notice_s}, passes_on={tuple(passes_on)} in the thread {threading.current_thread().name!r}",
            why="Python handles signals in the main thread only, so none would reach the ranks",
            fix="call launch_local from the main thread, or leave both out",
        )
    if callable(target):
        return
    if not isinstance(target, str):
        raise ConfigError(
            f"target {target!r}",
            why="it is neither a function nor the name of one",
            fix="pass the function, or pkg.mod:fn or path/to/file.py:fn in quotes",
        )
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        fix = "write pkg.mod:fn or path/to/file.py:fn"
        raise ConfigError(f"target {target!r}", why="it names no function", fix=fix)
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"target {target!r}", why=f"there is no file {Path(place).resolve()}", fix="check the path")


def _print_line(rank: int, stream: str, line: str) -> None:
    print(f"[rank {rank}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def _ignore_event(rank: int, event: dict) -> None:
    """Reads and drops events when there is no callback, so that a rank never waits for a reader."""


def _not_begun(rank: int, timeout_s: float | None, modules: Sequence[str]) -> Failure:
    return Failure(
        rank=rank,
        what=f"did not begin within {timeout_s:g} s",
        detail=f"the import of {', '.join(modules)}, for all ranks, had not ended",
        fix="raise timeout_s if it was only slow",
    )


def _error(failures: list[Failure], blamed: list[Failure]) -> ShardwiseError:
    cause = root_cause(blamed or failures)
    error = load_error(cause)
    if isinstance(error, ShardwiseError):
        error.add_note(f"raised on rank {cause.rank}:\n{cause.detail}")
        error.shown_by = None  # ranks show nothing themselves here: the process that started them does
        return error
    alike = blamed or [failure for failure in failures if failure.shared and cause.shared]
    return rank_error(cause, others=[failure.rank for failure in failures], alike=[failure.rank for failure in alike])
