"""How the command line is called from where the user stands: its name, where that finds it, or its place."""

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["program"]


def program() -> str:
    """``shardwise``, where the PATH has this one; ``.venv/bin/shardwise`` or the like where an environment is not
    activated, as under ``make demo``; ``python -m shardwise`` where there is no script."""
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
    """Relative where it is below the working directory; links are left as they are: an environment's Python is one."""
    place = Path(os.path.abspath(path))
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
