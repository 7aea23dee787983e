"""The manifest of a checkpoint: its files with sizes and block checksums, written last. A directory without a manifest
is not a checkpoint.

It is JSON in exactly one spelling, so that it can contain its own SHA-256: another spelling of the same facts is
refused too.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from shardwise.config.folders import FORMAT, MANIFEST, step_of
from shardwise.errors import CheckpointError
from shardwise.state.integrity.sums import BLOCK

VERSION = 1
_MOST = 1 << 30  # bytes of a manifest; one of this size would describe a checkpoint of some 8 TB


class DamagedError(CheckpointError):
    """A checkpoint that is damaged or cannot be read; an older one may be good."""


@dataclass(frozen=True, eq=False)
class FileFact:
    """A file of a checkpoint: its size in bytes, and the checksum (uint32) of each of its blocks."""

    size: int
    sums: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        layout: of the run that wrote it, as text.
        fingerprint: of the model, from its recipe.
        files: path inside the directory -> size and checksums.
    """

    step: int
    layout: str
    num_ranks: int
    fingerprint: str
    versions: Mapping[str, str]
    files: Mapping[str, FileFact]

    @property
    def num_bytes(self) -> int:
        return sum(fact.size for fact in self.files.values())

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "layout": self.layout,
            "num_ranks": self.num_ranks,
            "fingerprint": self.fingerprint,
            "versions": dict(self.versions),
            "block_bytes": BLOCK,
            "files": {
                name: {"size": fact.size, "crc32c": fact.sums.astype(">u4").tobytes().hex()}
                for name, fact in self.files.items()
            },
        }
        return _signed(content)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a checkpoint, checks it, and checks that the directory contains exactly its files."""
        path = folder / MANIFEST
        content = _content(path)
        try:
            found = _from(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, f"an entry is not what it has to be: {type(error).__name__}: {error}") from error
        if folder_name(found.step) != folder.name and step_of(folder) is not None:
            raise damaged(folder, f"its manifest is of step {found.step}")
        _check_files(folder, found.files)
        return found


def folder_name(step: int) -> str:
    """The directory name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps of the checkpoints below ``root``, ascending, complete or not; also of links to checkpoints that were moved
    to another disk."""
    found = (step_of(path) for path in root.iterdir() if path.is_dir())
    return sorted(step for step in found if step is not None)


def damaged(path: Path, why: str) -> DamagedError:
    """The error for a file that is not as it was written."""
    return DamagedError(
        str(path),
        why=why,
        fix="use an older checkpoint: what is named here is not what was written, and nothing of it was loaded",
    )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Within: an OSError is raised as the error of a checkpoint that cannot be read."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise DamagedError(
            str(path),
            why=f"reading failed: {error.strerror or error}",
            fix="look whether it is there, and whether you may read it",
        ) from error


def _signed(content: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(_text({**content, "sha256": ""})).hexdigest()
    return _text({**content, "sha256": digest})


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _content(path: Path) -> dict[str, Any]:
    with _reading(path):
        if path.is_symlink() or not path.exists():
            raise DamagedError(
                f"the checkpoint {path.parent}",
                why=f"it has no {MANIFEST}, which is written last: it was never finished"
                if not path.is_symlink()
                else f"its {MANIFEST} is a link",
                fix="use another checkpoint",
            )
        if not path.is_file():  # opening a pipe would block
            raise damaged(path, "it is no plain file")
        if path.stat().st_size > _MOST:
            raise damaged(path, f"it has {path.stat().st_size} bytes, and no manifest is that long")
        data = path.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no JSON: {error}"[:200]) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise damaged(path, "it is not the manifest of a checkpoint")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {str(content.get('version'))[:40]}",
            why=f"this release reads version {VERSION}",
            fix="use the release of Shardwise that wrote it",
        )
    content.pop("sha256", None)
    if _signed(content) != data:
        raise damaged(path, "its SHA-256 is not that of what stands in it: it was changed after it was written")
    return content


def _from(content: Mapping[str, Any]) -> Manifest:
    if content["block_bytes"] != BLOCK:
        raise ValueError(f"blocks of {content['block_bytes']} bytes")
    files = {}
    for name, entry in content["files"].items():
        sums = np.frombuffer(bytes.fromhex(entry["crc32c"]), dtype=">u4").astype(np.uint32)
        size = _count(entry["size"])
        if len(sums) != -(-size // BLOCK) or not is_inside(name):
            raise ValueError(f"the file {name[:200]!r}")
        files[name] = FileFact(size, sums)
    return Manifest(
        step=_count(content["step"]),
        layout=str(content["layout"]),
        num_ranks=_count(content["num_ranks"]),
        fingerprint=str(content["fingerprint"]),
        versions=dict(content["versions"]),
        files=files,
    )


def is_inside(name: str) -> bool:
    """Whether a text is a relative path inside a directory, in its normal spelling."""
    pure = PurePosixPath(name)
    return (
        bool(pure.parts)
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == name
        and "\0" not in name
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _check_files(folder: Path, files: Mapping[str, FileFact]) -> None:
    """Refuses a directory that does not contain exactly the named files, as plain files (no links) of those sizes."""
    found: dict[str, int] = {}
    with _reading(folder):
        for place, folders, names in os.walk(folder):
            for name in (*folders, *names):
                path = Path(place) / name
                if path.is_symlink() or not (path.is_dir() or path.is_file()):
                    raise damaged(path, "it is a link, or no file at all, and a checkpoint has plain files only")
            for name in names:
                path = Path(place) / name
                found[path.relative_to(folder).as_posix()] = path.stat().st_size
    found.pop(MANIFEST, None)
    for name in files:
        if name not in found:
            raise damaged(folder / name, "the manifest names it, and it is missing")
        if found[name] != files[name].size:
            raise damaged(folder / name, f"it has {found[name]} bytes, and was written with {files[name].size}")
    strange = sorted(set(found) - set(files))
    if strange:
        raise damaged(folder / strange[0], "the manifest does not name it: it was added later")
