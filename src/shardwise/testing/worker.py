"""One warm rank: waits for a call, runs it as a fresh rank would, reports, cleans up, waits again.

The order with the parent: it sends a :class:`Call`; the rank answers ``("ok", bytes)`` or ``("error", Failure)``; when
all ranks have answered the parent sends ``"clean"`` and the rank, once clean, answers ``"ready"``. Waiting for the
others before leaving the process group is what lets a slower rank finish its last collective.
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
from shardwise.launch.process import die_with_parent
from shardwise.testing.calls import Call, resolve

__all__ = ["DUMP_SIGNAL", "main"]

DUMP_SIGNAL = signal.SIGUSR2
"""The parent sends this to a rank that hangs; it writes the stack of every thread to its output."""

_SEED = 0
_MOST_THREADS = 64
"""A group that something still holds keeps two threads, each of which wakes a hundred times a second."""


def main(argv: list[str]) -> int:
    """The life of a warm rank, forked by :mod:`shardwise.launch.forkserver`; ends the process.

    Args:
        argv: the file descriptor of the connection to the pool, and the process id that must be alive for this one to
            live.
    """
    code = 1
    try:
        die_with_parent(int(argv[1]))
        _serve(Connection(int(argv[0])))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # no exit handlers of what was forked


def _serve(connection: Connection) -> None:
    """Returns when the pool closed the connection, or when calls left too many threads behind."""
    # Line by line, so that what a rank wrote before it was killed is there.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    state, lock = _State(), threading.Lock()

    def report(error: BaseException) -> None:
        # The process ends right after this, so unlike a failure of the function it is not one to use again.
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
        if _num_threads() > _MOST_THREADS:
            return  # the pool forks another
        connection.send("ready")


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return threading.active_count()


def _answer(call: Call) -> tuple[str, bytes | Failure]:
    try:
        sys.path[:] = call.path
        os.chdir(call.cwd)
        os.environ.update(call.env)
        fn = resolve(call.module, call.qualname, call.file)
        args, kwargs = pickle.loads(call.payload)
        _seed()
        result = pickle.dumps(fn(*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a test's function must not end the worker
        return "error", failure_of(int(call.env["RANK"]), error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return "ok", result


def _seed() -> None:
    import torch

    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


class _State:
    """What a run may change and the next must not see."""

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
        # The reset tells the module that its list has changed; assigning to the list alone would not.
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
            # What was imported stays; the collector need not look at it after every run.
            gc.freeze()
            self._modules = len(sys.modules)
