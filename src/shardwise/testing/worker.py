"""The process of one warm rank: waits for a call, runs it as a new rank would, answers, cleans up, and waits again.

The protocol: the parent sends a :class:`Call`; the rank answers ``("ok", bytes)`` or ``("error", Failure)``; when all
ranks have answered, the parent sends ``"clean"``, and the rank, once clean, answers ``"ready"``. Because all wait for
each other before they destroy the process group, a slower rank can finish its last collective.
"""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import cast

from shardwise.launch.events import open_report
from shardwise.launch.failure import Failure, failure_of
from shardwise.launch.process import die_with_parent, num_threads
from shardwise.launch.script import dumps
from shardwise.testing.calls import Call, resolve

DUMP_SIGNAL = signal.SIGUSR2
"""The signal that the parent sends to a rank that hangs; the rank then writes the stack of every thread to its
output."""

_SEED = 0
_MOST_THREADS = 64
"""Above this many threads a rank is replaced: a process group that something still references keeps two threads, each
of which wakes a hundred times a second."""


def main(argv: list[str]) -> int:
    """Runs a warm rank, forked by :mod:`shardwise.launch.forkserver`; ends the process.

    Args:
        argv: the file descriptor of the connection to the pool, and the id of a process with which this one ends.
    """
    code = 1
    try:
        die_with_parent(int(argv[1]))
        _serve(Connection(int(argv[0])))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # without the exit handlers inherited by the fork


def _serve(connection: Connection) -> None:
    """Answers calls until the pool closes the connection, or calls have left too many threads behind."""
    # Line buffered, so that the output of a rank that is killed is not lost.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    state, lock = _State(), threading.Lock()

    def report(error: BaseException) -> None:
        # The process ends right after this, so unlike after a failure of the function it cannot be used again.
        with lock:
            connection.send(("error", replace(failure_of(int(os.environ["RANK"]), error), reported=False)))

    open_report(report)
    connection.send("ready")
    while True:
        try:
            answer = _answer(connection.recv())
            with lock:
                connection.send(answer)
            if connection.recv() != "clean":
                return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        state.restore()
        if num_threads() > _MOST_THREADS:
            return  # the pool forks a new rank
        connection.send("ready")


def _answer(call: Call) -> tuple[str, bytes | Failure]:
    try:
        sys.path[:] = call.path
        os.chdir(call.cwd)
        os.environ.update(call.env)
        fn = resolve(call.module, call.qualname, call.file)
        args, kwargs = pickle.loads(call.payload)
        _seed()
        result = dumps(fn(*args, **kwargs))
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a test's function must not end the worker
        return "error", failure_of(int(call.env["RANK"]), error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return "ok", result


def _seed() -> None:
    from shardwise.world.rng import seed_torch

    random.seed(_SEED)
    seed_torch(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


class _State:
    """The process state that a call may change, restored before the next call."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._env = dict(os.environ)
        self._filters = list(warnings.filters)
        self._modules = len(sys.modules)
        self._precision = torch.get_float32_matmul_precision()

    def restore(self) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        for name in set(os.environ) - set(self._env):
            del os.environ[name]
        os.environ.update(self._env)
        # The reset makes the module notice that its list has changed; assigning to the list would not.
        warnings.resetwarnings()
        cast(list, warnings.filters)[:] = self._filters
        if torch.are_deterministic_algorithms_enabled():
            # Only where needed: the call imports the compiler, which takes longer than everything else here.
            torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision(self._precision)
        torch.set_num_threads(1)
        torch.autograd.set_detect_anomaly(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if len(sys.modules) != self._modules:
            # Imported objects stay: the garbage collector need not scan them after every run.
            gc.freeze()
            self._modules = len(sys.modules)
