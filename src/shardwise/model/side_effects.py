"""What a run of a model does outside of Python's values, and cannot be put back: files that it writes, sockets that it connects,
processes that it starts, functions of C that it calls by ``ctypes``. Each is refused before it is done, by an audit hook of Python
(:func:`sys.addaudithook`), which is there from the first such run on.

Not refused is what libraries do for themselves: modules that are imported for the first time, caches of compilers, files without a name,
and what loggers write.
"""

import ctypes
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.model.names import canonical_modules
from shardwise.model.places import is_opaque

_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ON_PATHS = {
    "os.mkdir": "makes", "os.link": "makes", "os.symlink": "makes", "os.rename": "renames", "os.remove": "removes", "os.rmdir": "removes",
    "os.truncate": "writes", "sqlite3.connect": "writes",
}  # fmt: skip
_SOCKETS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
_PROCESSES = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
)
_OF_C = frozenset({"ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function"})
_EVENTS = frozenset({"open", *_ON_PATHS, *_SOCKETS, *_PROCESSES, *_OF_C})
_BY_THEMSELVES = frozenset({"importlib", "logging", "triton", "numba", "cupy", "huggingface_hub", "kernels"})
"""What such a module has begun is a library's own, whoever does it in the end."""
_CACHES = (
    "tempfile", "platform", "ctypes.util", "torch._inductor", "torch._dynamo", "torch._functorch", "torch._logging", "torch.utils.cpp_extension",
    "torch.hub",
)  # fmt: skip
"""What such a module does itself is, and not what a user's code does that it calls."""
_WRITERS = {
    ("torch.serialization", "save"): "f",
    ("safetensors.torch", "save_file"): "filename",
    ("safetensors.numpy", "save_file"): "filename",
    ("dbm", "open"): "file",
}
"""Functions that write a file without an event -> their argument for it."""
_FUNCTION_OF_C = next(cls for cls in type(ctypes.memmove).__mro__ if cls.__name__.endswith("CFuncPtr"))


class Watch:
    """Refuses what runs of a model would do outside of Python's values, in the thread that runs it and in those that it starts."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None  # that runs
        self._refused: UnsupportedError | None = None

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Within: ``module`` runs."""
        _add_hook()
        before, self._module = _WATCHES.get(threading.current_thread()), module
        _WATCHES[threading.current_thread()] = self
        try:
            yield
        finally:
            self._module = None
            for thread in [thread for thread, watch in _WATCHES.items() if watch is self]:
                del _WATCHES[thread]
            if before is not None:  # of a run that this one is part of
                _WATCHES[threading.current_thread()] = before

    def add_thread(self) -> None:
        """Watches the thread that this is called in until the run ends."""
        if self._module is not None:
            _WATCHES[threading.current_thread()] = self

    def check(self) -> None:
        """Raises what was refused since the last check: the code that did it may have caught the error, or run in another thread."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    @staticmethod
    def is_writer(frame: types.FrameType) -> bool:
        """Whether a function that is about to run writes a file in C."""
        return (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WRITERS

    def writes(self, frame: types.FrameType) -> None:
        """Refuses such a function, unless it writes into memory."""
        path = frame.f_locals.get(_WRITERS[_name(frame), frame.f_code.co_name])
        if isinstance(path, str | bytes | os.PathLike) and frame.f_locals.get("flag") != "r":
            self._look_at(frame, f"a file, {os.fsdecode(path)!r}, which a forward writes")

    def named(self, frame: types.FrameType, value: Any) -> None:
        """Refuses functions of C that code names. ``frame``: of a function that is about to run."""
        if isinstance(value, ctypes.CDLL | _FUNCTION_OF_C) and self._module is not None and not _is_installed(frame):
            self._refuse(frame, "a function of C, which a forward calls by ctypes")

    def event(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuses an event of :mod:`sys`."""
        frame = sys._getframe(2)
        if event in _OF_C:
            near = next((each for each in _frames(frame) if _root(each) != "ctypes"), frame)
            if not is_opaque(_name(near)) and not _is_installed(near):
                self._look_at(frame, "a function of C, which a forward calls by ctypes")
        elif event in _SOCKETS:
            self._look_at(frame, f"a socket, which a forward connects to {args[1]!r}")
        elif event in _PROCESSES:
            self._look_at(frame, "a process, which a forward starts")
        elif what := _written(event, args):
            self._look_at(frame, what)

    def _look_at(self, frame: types.FrameType, what: str) -> None:
        """Refuses what a frame is about to do, if no library does it for itself."""
        is_near = True
        for each in _frames(frame):
            name = _name(each)
            if _root(each) in _BY_THEMSELVES or each.f_code.co_filename.startswith("<frozen importlib"):
                return
            if is_near and name.startswith(_CACHES):
                return
            is_near = is_near and (is_opaque(name) or _is_installed(each))
        self._refuse(frame, what)

    def _refuse(self, frame: types.FrameType, what: str) -> None:
        modules = {id(module): name for name, module in canonical_modules(self._module)} if self._module else {}
        outside = [each for each in _frames(frame) if not is_opaque(_name(each))] or [frame]
        near = next((each for each in outside if not _is_installed(each)), outside[0])
        owners = (modules.get(id(each.f_locals.get("self"))) for each in _frames(frame))
        refused = UnsupportedError(
            what,
            why="the model is run before training, to see what it does, and this cannot be put back"
            f"\n       at {Path(near.f_code.co_filename).name}, line {near.f_lineno}",
            fix="keep the value in an attribute of the module and do this after the forward, in the training loop; or in a hook that is "
            "registered after parallelize",
            name=next((name for name in owners if name), None),
        )
        self._refused = self._refused or refused  # the first one
        raise refused


_WATCHES: weakref.WeakKeyDictionary[threading.Thread, Watch] = weakref.WeakKeyDictionary()
"""By the threads that run a module now, or that such a run has started."""


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # Called for each event of the process from then on, such as a look at a frame: the cheapest question comes first.
    if event in _EVENTS and _WATCHES and (watch := _WATCHES.get(threading.current_thread())) is not None:
        watch.event(event, args)


def _written(event: str, args: tuple[Any, ...]) -> str:
    """The file that an event writes, or what it does to another; "" if there is none."""
    if event == "open":
        return f"a file, {path!r}, which a forward writes" if args[2] & _WRITE and (path := _path(args[0])) else ""
    if event not in _ON_PATHS or not (path := _path(args[0])):
        return ""
    what = "a folder" if event in ("os.mkdir", "os.rmdir") else "a file"
    if event == "os.mkdir" and os.path.isdir(path):
        return ""  # it does nothing
    if event in ("os.rename", "os.remove", "os.rmdir") and not os.path.lexists(path):
        return ""
    return f"{what}, {path!r}, which a forward {_ON_PATHS[event]}"


def _path(value: Any) -> str:
    """The path of a file on a disk; "" of another one."""
    if not isinstance(value, str | bytes | os.PathLike) or not (path := os.fsdecode(value)) or path == ":memory:":
        return ""
    is_device = path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/")
    return "" if is_device else path


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and those that have called it, up to the run of the module."""
    while frame is not None and frame.f_globals.get("__name__") != "shardwise.model.isolated":
        yield frame
        frame = frame.f_back


def _name(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _root(frame: types.FrameType) -> str:
    return _name(frame).partition(".")[0]


def _is_installed(frame: types.FrameType) -> bool:
    """Whether code is of an installed library, which may have functions in C as part of its layers."""
    return any(part in frame.f_code.co_filename for part in ("site-packages", "dist-packages"))
