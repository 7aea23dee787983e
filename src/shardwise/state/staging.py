"""Makes a directory appear complete or not at all: it is written next to its place, synced, then moved there
atomically.

An older directory of that name stays as it is until then. If the system can, the two are exchanged in one step (Linux:
renameat2 with RENAME_EXCHANGE); otherwise there is a moment in which neither has the name. Other files in the old
directory are kept.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from shardwise.config.folders import KINDS
from shardwise.errors import CheckpointError
from shardwise.state.files import writing
from shardwise.world.collectively import Peers, collectively

TOKEN = ".shardwise-token"
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


class Staged:
    """A new directory next to ``dest``, with a lock file next to it that is held while the directory is being written."""

    def __init__(self, dest: Path):
        self.dest = dest
        dest.parent.mkdir(parents=True, exist_ok=True)
        remove_left_overs(dest.parent, dest.name)
        # The lock first: a directory like this without a held lock is a left-over of a killed save.
        while True:
            self.path = dest.with_name(f".{dest.name}.saving-{secrets.token_hex(4)}")
            self._lock = os.open(_lock_of(self.path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if _hold(self._lock, _lock_of(self.path)):
                break
            os.close(self._lock)
        self.path.mkdir()

    def commit(self, kind: str) -> None:
        """Moves the directory to its place, and syncs that. Its files are on disk already; files of an older directory
        that are not of this kind (:data:`~shardwise.config.folders.KINDS`) are kept.

        Raises:
            OSError: it cannot be moved; what was there is unchanged.
        """
        self.move(KINDS[kind].replaced)
        sync_folder(self.dest.parent)

    def move(self, replaced: re.Pattern[str] | None = None) -> None:
        """Moves the directory to its place without syncing that: a crash of the machine may undo it.

        Args:
            replaced: names of the files of an older directory that are replaced, and the others kept; None: all are replaced.

        Raises:
            OSError: it cannot be moved; what was there is unchanged.
        """
        older = self.dest.exists() and any(self.dest.iterdir())
        if self.dest.exists():  # with the owner and the permissions of the old one
            facts = self.dest.stat()
            with contextlib.suppress(OSError):
                os.chown(self.path, facts.st_uid, facts.st_gid)
            with contextlib.suppress(OSError):
                os.chmod(self.path, stat.S_IMODE(facts.st_mode))  # after chown, which clears set-id bits
        if older and replaced is not None:
            _take_along(self.dest, self.path, replaced)
        sync_folder(self.path)
        if older:
            exchange(self.path, self.dest)  # from here on self.path is the old one
            if replaced is not None:
                _take_late(self.path, self.dest, replaced)
        else:
            os.replace(self.path, self.dest)

    def close(self) -> None:
        """Removes the incomplete directory, or after :meth:`commit` the old one."""
        with contextlib.suppress(OSError):
            _tidy(self.path, self.dest)
            _lock_of(self.path).unlink()
        os.close(self._lock)


class StagedSave:
    """A save into a new directory next to its place, which all ranks write to. Rank 0 makes :attr:`staged`.

    Attributes:
        then: what to do where it cannot be written.
        dest: the final path of the directory: rank 0's, once the ranks have met.
        staged: the directory, on rank 0.
        folder: where files are written: rank 0's path.
    """

    what: str
    then = "free space or choose a directory you can write to; an older one there is as it was"

    def __init__(self, peers: Peers, dest: Path):
        self.peers, self.dest, self.folder = peers, dest, dest
        self.staged: Staged | None = None

    def meet(self, place: str) -> list[int]:
        """Finds out which ranks do not see the directory: by a random token in it, since its name may exist on any disk."""
        token = os.urandom(8) if self.peers.is_main else b""
        collectively(
            self.peers, f"{place}, leaving a token", lambda: (self.folder / TOKEN).write_bytes(token), on_main=True
        )
        told = (self.dest, self.folder, token)
        self.dest, self.folder, token = self.peers.agreement.gather(told, f"{place}, telling where it is")[0]
        everyone = self.peers.agreement.gather(sees_token(self.folder, token), f"{place}, looking for the directory")
        return [rank for rank, sees in enumerate(everyone) if not sees]

    def errors_of_writing(self) -> contextlib.AbstractContextManager[None]:
        """Within: an error of the disk is raised as a CheckpointError."""
        return writing(f"{self.what} {self.dest}", self.then)

    def close(self) -> None:
        """Removes the directory if it has not been moved to its place."""
        if self.staged is not None:
            self.staged.close()


def resolved(dest: Path, what: str) -> Path:
    """The path that ``dest`` is, of ``what`` will be written there; raises CheckpointError for a cycle of links, or an invalid name."""
    try:
        return dest.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{what} to {dest}", why=str(error), fix="name another folder") from error


def sees_token(folder: Path, token: bytes) -> bool:
    """Whether this rank sees the directory that rank 0 made, by the token in it."""
    try:
        return (folder / TOKEN).read_bytes() == token
    except OSError:
        return False


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _hold(descriptor: int, path: Path) -> bool:
    """Takes the lock; returns whether it is held now and still is the file that others find under its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: left-overs are not removed
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def sync_folder(path: Path) -> None:
    """Syncs a directory, so that the names in it are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync directories
            raise
    finally:
        os.close(descriptor)


def remove_left_overs(folder: Path, name: str | None = None) -> None:
    """Removes the directories of killed saves to ``folder / name`` (None: to any name in it): those whose lock is not
    held."""
    for lock in folder.glob(f".{'*' if name is None else glob.escape(name)}.saving-*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _tidy(lock.with_suffix(""), folder / lock.name[1:].rpartition(".saving-")[0])
            lock.unlink(missing_ok=True)
        except OSError:
            continue  # a save that is still running
        finally:
            os.close(descriptor)


def _tidy(path: Path, dest: Path) -> None:
    """Removes what a save has left beside ``dest``; one that ended while neither directory had the name gives it back."""
    if os.path.lexists(old := _aside(path)) and not os.path.lexists(dest):
        os.rename(old, dest)
    for left in (path, old):
        if left.is_symlink():  # the old one was a link; its target is not ours
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}-old")


def _take_along(old: Path, new: Path, replaced: re.Pattern[str]) -> None:
    """Adds the other files of the old directory to the new one, by hard links, so that they are in both."""
    for entry in old.iterdir():
        target = new / entry.name
        if replaced.fullmatch(entry.name) or os.path.lexists(target):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=link)
        elif entry.is_symlink() or entry.is_file():
            link(entry, target)


def _take_late(old: Path, new: Path, replaced: re.Pattern[str] | None) -> None:
    """Moves files that were added to the old directory while the new one was prepared, at any depth."""
    for entry in old.iterdir():
        target = new / entry.name
        if replaced is not None and replaced.fullmatch(entry.name):
            continue
        if not os.path.lexists(target):
            os.replace(entry, target)
        elif entry.is_dir() and not entry.is_symlink() and target.is_dir():
            _take_late(entry, target, None)


def link(source: str | Path, target: str | Path) -> None:
    """Gives a file a second name, or copies it on a file system without links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def exchange(a: Path, b: Path) -> None:
    """Exchanges the names of two directories, in one step if the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = -100  # AT_FDCWD of fcntl.h
    if rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), _EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if rename is not None else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(b))
    aside = _aside(a)
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except OSError:
        os.rename(aside, b)
        raise
    os.rename(aside, a)
