"""How the user can call the command line from the working directory: by its name, its path, or ``python -m``."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """``shardwise`` if the PATH leads to this one; ``.venv/bin/shardwise`` or the like in an environment that is not
    activated, as under ``make demo``; ``python -m shardwise`` if there is no script."""
    started, script = Path(sys.argv[0]), Path(sys.executable).with_name("shardwise")
    script = started if started.name == "shardwise" else script
    found = shutil.which("shardwise")
    if found is not None and script.exists() and os.path.samefile(found, script):
        return "shardwise"
    words = [_from_here(script)] if script.is_file() else [_python(), "-m", "shardwise"]
    return shlex.join(words)


def _python() -> str:
    name = Path(sys.executable).name
    found = shutil.which(name)
    return name if found is not None and Path(found) == Path(sys.executable) else _from_here(Path(sys.executable))


def _from_here(path: Path) -> str:
    """The path, relative if it is below the working directory. Links are not resolved: an environment's Python is
    one."""
    place = Path(os.path.abspath(path))
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
