"""Sends a function from a test to a rank: by name and file, loaded there once, and again when the file changes.

Test modules are often not importable by name (pytest's importlib mode keeps them off ``sys.path``), so the file is sent
too. A module that can be imported under its name from the same file is imported, so that its classes are the same
objects everywhere; any other is executed from its file and registered under the name it has in the parent, so that its
classes can be pickled in both directions.
"""

import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from shardwise.errors import UsageError

_FIX = "define it at the top level of a module and pass what it needs as arguments"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The message that makes a rank call a function.

    Args:
        module, qualname, file: where the function is defined.
        env: the variables that make this process a rank (RANK, WORLD_SIZE, ...).
        path, cwd: ``sys.path`` and working directory of the parent.
        payload: pickled ``(args, kwargs)``; unpickled only after the module was loaded, because it may need it.
    """

    module: str
    qualname: str
    file: str
    env: Mapping[str, str]
    path: tuple[str, ...]
    cwd: str
    payload: bytes


def call_of(fn: Callable[..., object]) -> tuple[str, str, str]:
    """``(module, qualname, file)`` of a module-level function.

    Raises:
        UsageError: it is a lambda, a nested function, a partial, or defined in an interpreter or ``__main__``.
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    module = getattr(fn, "__module__", None)
    given = f"run({name})"
    if not inspect.isfunction(fn) or not module:
        raise UsageError(given, why="only a plain function can be sent to a rank by its name", fix=_FIX)
    if "<" in name:
        raise UsageError(given, why="a lambda or a function inside a function has no name a rank could find", fix=_FIX)
    file = inspect.getsourcefile(inspect.unwrap(fn)) if module == "__main__" else _file_of(module, fn)
    if module == "__main__" or file is None or not os.path.isfile(file):
        raise UsageError(given, why="a rank cannot load the script that is running, nor a session", fix=_FIX)
    return module, name, os.path.abspath(file)


def _file_of(module: str, fn: Callable[..., object]) -> str | None:
    # The module's file, not that of the code object: a decorator from another file may have wrapped the function.
    loaded = sys.modules.get(module)
    return getattr(loaded, "__file__", None) or inspect.getsourcefile(inspect.unwrap(fn))


_stamps: dict[str, tuple[str, int, int]] = {}


def resolve(module: str, qualname: str, file: str) -> Callable[..., object]:
    """Finds the function in a rank; loads its module if it is new or its file has changed."""
    info = os.stat(file)
    stamp = (file, info.st_mtime_ns, info.st_size)
    if module not in sys.modules or _stamps.get(module, stamp) != stamp:
        _load(module, file)
        _stamps[module] = stamp
        # Imported objects stay: the garbage collector need not scan them after every run.
        gc.collect()
        gc.freeze()
    _stamps.setdefault(module, stamp)
    found: object = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{module}:{qualname} is not callable on the rank")
    return found


def _load(module: str, file: str) -> ModuleType:
    sys.modules.pop(module, None)
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is not None and found.origin is not None and os.path.abspath(found.origin) == file:
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as a module")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        sys.modules.pop(module, None)
        raise
    return loaded
