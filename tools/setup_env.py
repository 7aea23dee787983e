"""Makes the virtual environment that the Makefile's commands run in, and prints its progress.

Standard library only, run by the system's Python. The package is installed in place with its development tools by one
pip command, PyTorch named in the same command so that one choice is made for all::

    python3.11 tools/setup_env.py .venv --torch torch==2.13.0
"""

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

__all__ = ["main", "run_visibly"]

ROOT = Path(__file__).resolve().parent.parent
BEAT_S = 1.5  # a sign of life at least this often
TORCH = "torch==2.13.0"
RARE = "/(tests?|pip|setuptools|transformers/models)/"  # a third of all: what of it is imported is compiled then


def main(argv: Sequence[str] | None = None) -> int:
    """Create or refresh the environment. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the virtual environment for development.")
    parser.add_argument("venv", type=Path, help="its folder")
    parser.add_argument("--torch", default=TORCH, help="the PyTorch requirement")
    args = parser.parse_args(argv)
    python = args.venv / "bin" / "python"
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Setting up {args.venv} with Python {version} ({sys.executable}).", flush=True)
    print("Once, and after pyproject.toml changes; usually 1 to 4 minutes, most of it PyTorch.", flush=True)
    if args.torch != TORCH:
        print(
            f"{args.torch}: of an index that has no CPU build of it a CUDA build comes, of several gigabytes.",
            flush=True,
        )
    log = args.venv / "install.log"
    begin = time.monotonic()
    if not python.exists() and run_visibly([sys.executable, "-m", "venv", str(args.venv)], "making it", None):
        print(
            f"The environment could not be made.\n  why: this Python ({sys.executable}) lacks its venv module\n"
            "  fix: install it (Debian, Ubuntu: apt install python3.11-venv), or use another Python",
            file=sys.stderr,
        )
        return 1
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    install += ["-e", f"{ROOT}[dev]", args.torch]
    if run_visibly(install, "installing", log):
        tail = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("WARNING")][-15:]
        print("\n".join(tail), file=sys.stderr)
        print(
            f"\nThe installation failed; the lines above are its last, all of them are in {log}.\n"
            "  fix: check the network or the package index, then give the same command again",
            file=sys.stderr,
        )
        return 1
    compile_all = [str(python), "-m", "compileall", "-q", "-j", "0", "-x", RARE]  # pip would use one core of all
    compile_all.append(str(args.venv))
    run_visibly(compile_all, "compiling", args.venv / "compile.log")  # files for other Pythons do not compile
    (args.venv / ".ready").touch()
    print(f"Ready after {time.monotonic() - begin:.0f} s.", flush=True)
    return 0


def run_visibly(command: Sequence[str], label: str, log: Path | None) -> int:
    """Run a command, showing its latest line and the time so far at least every two seconds.

    Args:
        command: what to run.
        label: what it does, in a word.
        log: file for its whole output; None: the output is shown if it fails.

    Returns:
        The command's exit status.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines: list[str] = []
    begin = shown = time.monotonic()
    latest = ""
    try:
        for line in _lines_or_beats(process):
            if line is not None:
                lines.append(line)
                latest = _headline(line) or latest
            if time.monotonic() - shown >= BEAT_S:
                shown = time.monotonic()
                _show(f"  {shown - begin:4.0f} s  {label}{': ' if latest else ''}{latest}")
        status = process.wait()
    except BaseException:  # Ctrl-C: leave no installer behind
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        if log is not None and log.parent.is_dir():
            log.write_text("".join(lines))
    if status and log is None:
        print("".join(lines), file=sys.stderr)
    return status


def _lines_or_beats(process: "subprocess.Popen[str]") -> Iterator[str | None]:
    """The lines of a process as they come, and None whenever it has been quiet for half a second."""
    found: queue.Queue[str | None] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            found.put(line)
        found.put(None)

    if process.stdout is None:
        return
    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    while True:
        try:
            line = found.get(timeout=0.5)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def _headline(line: str) -> str:
    """What is worth showing of a line of pip."""
    text = line.strip()
    if text.startswith("Installing collected packages:"):
        return f"writing {text.count(',') + 1} packages, then their bytecode"
    known = ("Collecting", "Downloading", "Processing", "Building", "Installing", "Preparing", "Obtaining", "Using")
    return text[:90] if text.startswith(known) else ""


def _show(text: str) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    else:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
