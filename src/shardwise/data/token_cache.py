"""The folder that keeps tokens of texts and records, so that a tokenizer reads a file once.

An entry is named by all that its tokens depend on: the digest of the whole file, the tokenizer, the libraries, the settings. What
has changed has another name, so that an entry is never out of date, and two runs may use one folder.

The first process that needs an entry makes it, and others on the same file system wait for it: ranks of a node, of a cluster whose
nodes share the folder, and other runs. They wait for a lock of the system, which a process that is killed loses, and only as long
as the file grows. Whatever goes wrong with the folder (a full disk, no right to write, no locks) costs time only: the tokens are
made in memory then.
"""

import contextlib
import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.file_digest import digest_of, size_of, state_of
from shardwise.data.token_store import Produce, StoredTokens, in_memory, open_tokens, write_tokens
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.lock import release, try_lock

__all__ = ["Say", "TokenCache", "cache_of"]

_NONE = "none"  # the value of data.cache for which nothing is kept

_LEAST = 1 << 20  # bytes of a file that is kept without being asked for: a smaller one takes less than a second
_SAID_S, _PATIENCE_S, _HASHED_PER_S = 10.0, 300.0, 50e6
_LEFT_S = 3600.0  # what has not grown for so long is not being written any more


Say = Callable[[str, str], object]


def _warn(kind: str, text: str) -> None:
    warnings.warn(text, stacklevel=2)


class _UnusableError(Exception):
    """The folder cannot be used, for a reason that is not the data's."""


@dataclass
class TokenCache:
    """Keeps tokens in a folder.

    Args:
        folder: is made if it is not there.
        least: files of fewer bytes are not kept.
        say: called as ``say(kind, text)`` with what a user should know. "trouble": nothing can be kept; "phase": whom this process
            waits for.
        patience_s: how long this process waits for another that does not write anything.

    Attributes:
        notes: what was done for each file, a line each.
    """

    folder: Path
    least: int = 0
    say: Say = _warn
    patience_s: float = _PATIENCE_S
    notes: list[str] = field(default_factory=list)

    def tokens(
        self, source: str | Path, inputs: Mapping[str, Any], produce: Produce, dtype: type[np.generic]
    ) -> StoredTokens:
        """The tokens of a file, kept or made by ``produce``; in memory where the folder cannot be used.

        Args:
            source: the file, or the directory of a saved dataset.
            inputs: what the tokens depend on besides its content, as JSON has it.
            produce: reads the file. What it raises is raised here.
            dtype: of the tokens.

        Raises:
            ConfigError: the file was changed while it was read.
        """
        file = Path(source)
        try:
            size = size_of(file)
        except OSError:
            return in_memory(produce, dtype)  # which says what is wrong with the file
        if size < self.least:
            return in_memory(produce, dtype)
        try:
            return self._kept(file, size, inputs, produce, dtype)
        except (_UnusableError, OSError) as error:
            text = f"the tokens of {source} are not kept in {self.folder} (data.cache): {_reason(error)}; they are made at each start, in memory"
            if text not in self.notes:
                self.notes.append(text)
                self.say("trouble", text)
        return in_memory(produce, dtype)

    def _kept(
        self, file: Path, size: int, inputs: Mapping[str, Any], produce: Produce, dtype: type[np.generic]
    ) -> StoredTokens:
        state = state_of(file)
        with contextlib.suppress(OSError):  # a folder that can be read only may have what is wanted
            self.folder.mkdir(parents=True, exist_ok=True)
        place = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
        try:
            with self._alone(f"file-{place}", file, size / _HASHED_PER_S):
                content = digest_of(file, self.folder)
        except (_UnusableError, OSError):
            content = digest_of(file, self.folder)
        made_from = {**inputs, "content": content}
        name = f"tokens-{hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]}"
        path = self.folder / name
        found = open_tokens(path, made_from)
        if found is not None:
            self.notes.append(f"{len(found.tokens):,} of {file}, as kept in {path}")
            return found
        with self._alone(name, file) as is_alone:
            found = open_tokens(path, made_from)
            if found is None:
                began = time.monotonic()
                found = self._made(path, made_from, produce, dtype, is_alone)
                seconds = time.monotonic() - began
                self.notes.append(f"{len(found.tokens):,} of {file}, made in {seconds:.1f} s and kept in {path}")
            else:
                self.notes.append(f"{len(found.tokens):,} of {file}, made by another process and kept in {path}")
        if state_of(file) != state and digest_of(file, self.folder) != content:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"data file {str(file)!r}",
                why="it was changed while its tokens were made, which are of neither state of it",
                fix="start again once nothing writes to it",
            )
        return found

    def _made(
        self, path: Path, inputs: Mapping[str, Any], produce: Produce, dtype: type[np.generic], is_alone: bool
    ) -> StoredTokens:
        host = socket.gethostname()
        for left in self.folder.glob(f".{path.name}.*.part") if is_alone else ():
            # Of a process that was killed. Locks of some network file systems hold on one node only.
            if f".{host}-" in left.name or time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink(missing_ok=True)
        part = path.with_name(f".{path.name}.{host}-{os.getpid()}.part")
        try:
            with part.open("wb", buffering=1 << 20) as file:
                write_tokens(file, produce, dtype, inputs)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        found = open_tokens(path, inputs)
        if found is None:
            raise _UnusableError("what was written is not what is read")
        return found

    @contextlib.contextmanager
    def _alone(self, name: str, source: Path, patience_s: float = 0.0) -> Iterator[bool]:
        """Within, no other process makes the entry ``name``; gives False on a file system without locks, where one may.

        Raises:
            OSError: there cannot be a lock in the folder.
            _UnusableError: another process has it, and writes nothing.
        """
        began = grown = time.monotonic()
        size, is_said = -1, False
        while True:
            tried = try_lock(self.folder / f".{name}.lock")
            held = tried.held
            if held is not None:
                break
            now = time.monotonic()
            if (new := self._size(name)) != size:
                size, grown = new, now
            if now - began > _SAID_S and not is_said:
                is_said = True
                self.say("phase", f"waiting for process {tried.owner}, which makes the tokens of {source}")
            if now - grown > self.patience_s + patience_s:
                raise _UnusableError(
                    f"process {tried.owner} has been making them, and has written nothing for {now - grown:.0f} s"
                )
            time.sleep(0.1)
        try:
            yield tried.note is None
        finally:
            release(held)

    def _size(self, name: str) -> int:
        """Bytes that another process has written of an entry."""
        with contextlib.suppress(OSError):
            return sum(part.stat().st_size for part in self.folder.glob(f".{name}.*.part"))
        return -1


def cache_of(given: str | None, say: Say) -> TokenCache | None:
    """The cache that ``data.cache`` names: None where it is none. Where it says nothing: in ``$SHARDWISE_CACHE``, else
    ``$XDG_CACHE_HOME/shardwise``, else ``~/.cache/shardwise``, and only for files of 1 MB and more."""
    if given is None:
        named = os.environ.get("SHARDWISE_CACHE") or ""
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder, least = named or f"{base}/shardwise", _LEAST
    else:
        folder, least = given, 0
    if folder == _NONE:
        return None
    try:
        return TokenCache(Path(folder).expanduser(), least, say)
    except RuntimeError:  # a user without a home
        say(
            "trouble",
            f"tokens are not kept: {folder} is not known for this user; --data.cache=PATH names another folder",
        )
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, ShardwiseError):
        return error.why
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
