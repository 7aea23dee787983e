"""The folder that keeps tokens of texts and records, so that a tokenizer reads a file once.

An entry is named by all that its tokens depend on: the digest of the whole file, the tokenizer, the libraries, the settings. What
has changed has another name, so that an entry is never out of date, and two runs may use one folder.

The first process that needs an entry makes it, and others on the same file system wait for it: ranks of a node, of a cluster whose
nodes share the folder, and other runs. They wait for a lock of the system, which a process that is killed loses, and only as long
as the file grows. Whatever goes wrong with the folder (a full disk, no right to write, no locks) costs time only: the tokens are
made in memory then.

An entry is read and compared with its checksum before it is used, by one process: those that wait for it meanwhile take its word. It
leaves that word, what was damaged, and why an entry cannot be made, in a note beside the entry. Only a note that has changed since a
process began to look is believed: the next start looks, and tries, anew.
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

from shardwise.config.caller import level_of_caller
from shardwise.data.file_digest import digest_of_file, size_of, state_of
from shardwise.data.part_file import leave_note, news_of, note_of, remove_left, size_of_parts, state_of_entry, written
from shardwise.data.token_store import ChangedTokensError, Produce, StoredTokens, in_memory, open_tokens, write_tokens
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.lock import release, try_lock

_NONE = "none"  # the value of data.cache for which nothing is kept

_LEAST = 1 << 20  # bytes of a file that is kept without being asked for: a smaller one takes less than a second
_SAID_S, _PATIENCE_S, _READ_PER_S = 10.0, 300.0, 50e6
_PROGRESS_S = 5.0  # between two words of how far it is


Say = Callable[[str, str], object]


def _warn(kind: str, text: str) -> None:
    if kind != "progress":
        warnings.warn(text, stacklevel=level_of_caller())


class _UnusableError(Exception):
    """The folder cannot be used, for a reason that is not the data's."""


@dataclass
class TokenCache:
    """Keeps tokens in a folder.

    Args:
        folder: is made if it is not there.
        least: files of fewer bytes are not kept.
        say: called as ``say(kind, text)`` with what a user should know. "trouble": nothing can be kept, or something was
            damaged; "phase": whom this process waits for; "progress", every few seconds: how far the phase is.
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
        produce = self._told(produce, file)
        try:
            return self._kept(file, size, inputs, produce, dtype)
        except (_UnusableError, ChangedTokensError, OSError) as error:
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
            with self._alone(f"file-{place}", file, size / _READ_PER_S):
                content = digest_of_file(file, self.folder)
        except (_UnusableError, OSError):
            content = digest_of_file(file, self.folder)
        made_from = {**inputs, "content": content}
        name = f"tokens-{hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]}"
        path = self.folder / name
        before, note, seconds = state_of_entry(path), note_of(path), None
        try:
            with self._alone(name, file, (before[1] if before else 0) / _READ_PER_S):
                remove_left(self.folder)
                found = self._checked(path, file, made_from, note)
                if found is None:
                    began = time.monotonic()
                    found = self._made(path, file, made_from, produce, dtype, note)
                    seconds = time.monotonic() - began
        except (_UnusableError, OSError):
            found = open_tokens(path, made_from, self._checking(file))
            if found is None:
                raise
        is_new = state_of_entry(path) != before
        if is_new and state_of(file) != state and digest_of_file(file, self.folder) != content:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"data file {str(file)!r}",
                why="it was changed while its tokens were made, which are of neither state of it",
                fix="start again once nothing writes to it",
            )
        how = "made by another process and" if is_new else "as"
        how = how if seconds is None else f"made in {seconds:.1f} s and"
        self.notes.append(f"{len(found.tokens):,} of {file}, {how} kept in {path}")
        return found

    def _checked(
        self, path: Path, file: Path, made_from: Mapping[str, Any], before: Mapping[str, Any]
    ) -> StoredTokens | None:
        """The entry; None where it is not there, or was damaged and is removed. ``before``: the note when this process began to
        look.

        Raises:
            OSError: it cannot be read, or removed.
            _UnusableError: another process could not make it meanwhile.
        """
        news = news_of(path, before)
        if news.get("damage"):
            self.say("trouble", news["damage"])
        if news.get("failure"):
            raise _UnusableError(news["failure"])
        is_checked = bool(news) and news.get("checked") == state_of_entry(path)
        try:
            found = open_tokens(path, made_from, None if is_checked else self._checking(file))
        except ChangedTokensError as error:
            path.unlink(missing_ok=True)
            damage = f"the tokens of {file} that were kept in {path} were damaged ({error}): they are made anew"
            self.say("trouble", damage)
            leave_note(path, damage=damage)
            return None
        if found is not None and not is_checked:
            leave_note(path, checked=state_of_entry(path))
        return found

    def _made(
        self,
        path: Path,
        file: Path,
        made_from: Mapping[str, Any],
        produce: Produce,
        dtype: type[np.generic],
        before: Mapping[str, Any],
    ) -> StoredTokens:
        damage = news_of(path, before).get("damage")
        try:
            with written(path) as part:
                write_tokens(part, produce, dtype, made_from)
            found = open_tokens(path, made_from, self._checking(file))
            if found is None:
                raise _UnusableError("what was written is not what is read")
        except (_UnusableError, ChangedTokensError, OSError) as error:
            failure = f"{_reason(error)}, as process {os.getpid()} on {socket.gethostname()} found"
            leave_note(path, damage=damage, failure=failure)
            raise
        leave_note(path, damage=damage, checked=state_of_entry(path))
        return found

    def _told(self, produce: Produce, source: Path) -> Produce:
        """The same, and says how far it is."""

        def told(add: Callable[..., object]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
            num, progress = 0, self._progress()

            def add_and_tell(tokens: np.ndarray, share: float | None = None) -> None:
                nonlocal num
                add(tokens)
                num += len(tokens)
                far = f"{num:,}" if share is None else f"{100 * share:.0f} %"
                progress(f"tokens of {source.name}, {far}")

            return produce(add_and_tell)

        return told

    def _checking(self, source: Path) -> Callable[[float], None]:
        progress = self._progress()
        return lambda share: progress(f"checking the kept tokens of {source.name}, {100 * share:.0f} %")

    def _progress(self) -> Callable[[str], None]:
        """Says a text, if some seconds have passed since the last."""
        last = time.monotonic()

        def progress(text: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _PROGRESS_S:
                last = now
                self.say("progress", text)

        return progress

    @contextlib.contextmanager
    def _alone(self, name: str, source: Path, patience_s: float = 0.0) -> Iterator[None]:
        """Within, no other process makes the entry ``name``, unless the file system has no locks.

        Raises:
            OSError: there cannot be a lock in the folder.
            _UnusableError: another process has it, and writes nothing.
        """
        began = grown = time.monotonic()
        size, is_said, progress = -1, False, self._progress()
        while (held := (tried := try_lock(self.folder / f".{name}.lock")).held) is None:
            now = time.monotonic()
            if (new := size_of_parts(self.folder / name)) != size:
                size, grown = new, now
            if now - began > _SAID_S and not is_said:
                is_said = True
                self.say("phase", f"waiting for process {tried.owner}, which makes or checks the tokens of {source}")
            if size and is_said:
                progress(f"{size / 1e6:,.0f} MB are written")
            if now - grown > self.patience_s + patience_s:
                raise _UnusableError(
                    f"process {tried.owner} has been making them, and has written nothing for {now - grown:.0f} s"
                )
            time.sleep(0.1)
        try:
            yield
        finally:
            release(held)


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
    if isinstance(error, ChangedTokensError):
        return f"they are damaged there ({error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
