"""The process of a rank started by ``launch_local``: load the target, call it, report how it ended.

Run as ``python -m shardwise.launch CONTROL EVENTS PARENT``: two file descriptors and a process id. The job is received
over CONTROL as a pickle, and the result or the failure is sent back the same way. The rank itself prints no traceback,
so that the parent can show the one that matters, once.
"""

import contextlib
import difflib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.errors import ConfigError, Stopped
from shardwise.launch.events import open_channel, open_report
from shardwise.launch.failure import Failure, failure_of
from shardwise.launch.imports import import_frozen
from shardwise.launch.process import die_with_parent
from shardwise.launch.script import Script, dumps, load_script

DUMP_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the stack of every thread to stderr and continues."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that the launcher sends to a rank.

    Args:
        target: "pkg.mod:fn" or "path.py:fn"; None: the first of ``args``.
        args: pickled arguments; unpickled once ``path`` is set and ``script`` was run.
        script: what to run first, because the arguments have functions or classes of it.
        path: ``sys.path`` of the parent.
        pythonpath: the user's own PYTHONPATH; this process was started with one extended by the path of this package.
    """

    target: str | None
    args: bytes
    script: Script
    path: tuple[str, ...]
    pythonpath: str | None


def main(argv: list[str]) -> int:
    """Serves one job. The exit status is 0 when a result was sent, ``Stopped.CODE`` when the job stopped in order."""
    control, events, parent = (int(word) for word in argv)
    die_with_parent(parent)
    for descriptor in (control, events):
        os.set_inheritable(descriptor, False)
    open_channel(events)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        # Line-buffered: the parent shows a line when it is written, and has received it if this rank is killed.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection, lock = Connection(control), threading.Lock()

    def report(error: BaseException) -> None:
        with lock:
            connection.send(("error", failure_of(int(os.environ["RANK"]), error)))

    open_report(report)
    kind, answer = _run(connection.recv())
    # Without a parent there is no reader, and this process is about to be killed.
    with lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send((kind, answer))
    return {"result": 0, "quit": 0, "stopped": Stopped.CODE}.get(kind, 1)


def _run(job: Job) -> tuple[str, bytes | Failure | Stopped]:
    sys.path[:] = job.path
    if job.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = job.pythonpath
    try:
        load_script(job.script)
        args = pickle.loads(job.args)
        function, args = (args[0], args[1:]) if job.target is None else (load_target(job.target), args)
        return "result", dumps(function(*args))
    except Stopped as stop:
        return "stopped", stop
    except SystemExit as end:
        return "error" if end.code else "quit", failure_of(int(os.environ["RANK"]), end)
    except BaseException as error:
        return "error", failure_of(int(os.environ["RANK"]), error)


def load_target(target: str) -> Callable[..., object]:
    """The function that a target names.

    Raises:
        ConfigError: the module, the file or the function does not exist; similar names are shown.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError(f"target {target!r}", why=f"there is no file {path}", fix="check the path")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        # Registered in sys.modules, so that objects of its classes can be pickled.
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    else:
        try:
            # A user's modules may hold what the collector closes at the end, such as a file in a cycle of references.
            module = (import_frozen if place.startswith("shardwise.") else importlib.import_module)(place)
        except ModuleNotFoundError as error:
            # Only a missing target module is a typing mistake of the user; a missing import inside it is that module's
            # fault.
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise
            raise ConfigError(
                f"target {target!r}",
                why=f"there is no module {error.name!r} on sys.path",
                fix="write pkg.mod:fn for an importable module, or path/to/file.py:fn",
            ) from error
    found = getattr(module, name, None)
    if callable(found):
        return found
    near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
    fix = f"did you mean {place}:{near[0]}?" if near else f"define a function {name} there"
    raise ConfigError(f"target {target!r}", why=f"{place} has no function {name!r}", fix=fix)
