"""The work folder of a conversion, next to the result's place, with a journal of the parts that are done.

A line of the journal is written when the values it names are on disk, so that a conversion that was killed continues
where it was. One with another source or other options has another fingerprint, and starts from the beginning.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.launch.lock import release, try_lock
from shardwise.state.staging import exchange, sync_folder

__all__ = ["Workplace", "fingerprint_of"]

SYNC = 256 << 20  # bytes written between two syncs: what a kill can lose


def fingerprint_of(facts: Any) -> str:
    """A digest of ``facts``, which differs if anything about the conversion differs."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class Workplace:
    """The work folder of a conversion; a context manager that locks it. It is kept for the next attempt unless
    :meth:`commit` is reached.

    Attributes:
        files: the folder that the result is written to.
        done: piece -> checksum, of an earlier attempt.
        notes: what the user should know.
    """

    def __init__(self, dest: Path, fingerprint: str, *, fresh: bool):
        self.dest = Path(os.path.abspath(dest))  # absolute: "." has no name
        self.folder = self.dest.with_name(f".{self.dest.name}.converting")
        self.files = self.folder / "files"
        self.done: dict[int, int] = {}
        self.notes: list[str] = []
        self._fingerprint, self._fresh = fingerprint, fresh
        self._waiting: list[tuple[int, int]] = []
        self._unsynced: set[int] = set()
        self._num_unsynced = 0

    def __enter__(self) -> "Workplace":
        self.files.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self.folder / "lock")
        if lock.held is None:
            raise CheckpointError(
                f"the conversion to {self.dest}",
                why=f"another process is writing it: {lock.owner}",
                fix="wait for that one, or name another destination",
            )
        with contextlib.ExitStack() as opened:
            opened.callback(release, lock.held)
            flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
            self._journal = os.open(self.folder / "journal", flags, 0o666)
            opened.callback(os.close, self._journal)
            if lock.note is not None:
                self.notes.append(lock.note)
            self._read()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._opened.close()

    def close_files(self, descriptors: Iterable[int]) -> None:
        """Closes the files of the result; what was written to them counts as done."""
        with contextlib.suppress(OSError):  # parts that could not be synced are done again
            self.sync()
        for descriptor in descriptors:
            os.close(descriptor)

    def _read(self) -> None:
        text = (self.folder / "journal").read_text(encoding="utf-8", errors="replace")
        lines = text.split("\n")[:-1]  # the last one is empty or incomplete
        head, *rest = lines or [""]
        if head == self._fingerprint and not self._fresh:
            with contextlib.suppress(ValueError):  # parts of a damaged line and of those after it are done again
                for line in rest:
                    piece, checksum = json.loads(line)
                    self.done[int(piece)] = int(checksum)
            return
        if head and not self._fresh:
            self.notes.append(
                "an earlier attempt was of another source or had other options; it was started from the beginning"
            )
        shutil.rmtree(self.files)
        self.files.mkdir()
        self._begin()

    def discard_if_empty(self) -> None:
        """Removes the folder if nothing was converted, so that a full disk stays as it was."""
        if os.fstat(self._journal).st_size <= len(self._fingerprint) + 1:
            shutil.rmtree(self.folder, ignore_errors=True)

    def trust(self, homes: Mapping[int, str], sizes: Mapping[str, int]) -> None:
        """Ignores journal lines of files that are missing: a kill after the last rename leaves the journal without
        them.

        Args:
            homes: piece -> its file.
            sizes: file -> its size, which it has from the beginning.
        """
        whole = {
            name
            for name, size in sizes.items()
            if (path := self.files / name).is_file() and path.stat().st_size == size
        }
        believed = {piece: value for piece, value in self.done.items() if homes.get(piece) in whole}
        if believed != self.done:
            # Before the files are made again: the old lines would then seem to describe them.
            self._waiting, self.done = list(believed.items()), believed
            self._begin()
            self.sync()

    def _begin(self) -> None:
        os.ftruncate(self._journal, 0)
        os.write(self._journal, f"{self._fingerprint}\n".encode())

    def note(self, piece: int, checksum: int, descriptor: int, num_bytes: int) -> None:
        """Notes that a piece has been written to ``descriptor``; its journal line is written at the next sync."""
        self._waiting.append((piece, checksum))
        self._unsynced.add(descriptor)
        self._num_unsynced += num_bytes
        if self._num_unsynced >= SYNC:
            self.sync()

    def sync(self) -> None:
        """Syncs what was written to disk, and only then writes its journal lines."""
        for descriptor in self._unsynced:
            os.fdatasync(descriptor)
        if self._waiting:
            os.write(self._journal, "".join(f"{json.dumps(item)}\n" for item in self._waiting).encode())
        self._waiting, self._num_unsynced = [], 0
        self._unsynced = set()

    def commit(self, single: str | None) -> None:
        """Moves the result to its place, where an older one stays until then.

        Args:
            single: the file that is the result; None: the whole folder is.
        """
        result = self.files if single is None else self.files / single
        sync_folder(self.files)
        if single is not None or not os.path.lexists(self.dest):
            os.replace(result, self.dest)
        else:
            os.ftruncate(self._journal, 0)  # from here on the folder has the older result, which it does not describe
            os.fsync(self._journal)
            exchange(result, self.dest)
        sync_folder(self.dest.parent)
        shutil.rmtree(self.folder, ignore_errors=True)
