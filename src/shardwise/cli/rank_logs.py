"""A file for what each rank prints, besides the screen. Only where this process started the ranks: torchrun has
``--log-dir`` of its own."""

import contextlib
import threading
import time
from pathlib import Path
from typing import TextIO

_MOST_HELD = 10_000  # lines


class RankLogs:
    """``ranks/rank-N.log`` below a run's folder: each line with its time and the name of its stream.

    Nothing is written until :meth:`begin`, so that a run that is refused leaves the folder as it was; lines that came before
    are written then. A line that cannot be written is dropped: the screen has it.
    Files of earlier runs in the folder are continued.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "ranks"
        self._held: list[tuple[int, str]] | None = []
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()

    def write(self, rank: int, stream: str, line: str) -> None:
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {stream}: {line}\n"
        with self._lock:
            if self._held is None:
                self._write(rank, text)
            elif len(self._held) < _MOST_HELD:
                self._held.append((rank, text))

    def begin(self) -> None:
        """Called when the run has begun, with files of its own."""
        with self._lock:
            held, self._held = self._held or [], None
            for rank, text in held:
                self._write(rank, text)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _write(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError):
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"rank-{rank}.log"
                self._files[rank] = path.open("a", encoding="utf-8", buffering=1)
            self._files[rank].write(text)
