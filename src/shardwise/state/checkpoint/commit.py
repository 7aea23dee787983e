"""The commit protocol of a checkpoint: under its name it is complete, or it does not exist.

::

    make a locked directory next to its place, all files in full size     (rank 0)   a full disk is found here
    write each rank's bytes at their offsets, with checksums; sync        (all)
    write the manifest (sizes and checksums); sync                        (rank 0)
    rename the directory to its name; sync the name                       (rank 0)   from here on it exists
    point `latest` to it; only then remove older ones                     (rank 0)

A rank that fails before the rename leaves everything as it was, and the error is raised on every rank; what a killed
save leaves behind is removed by the next one.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.config.folders import MANIFEST, check_place, spare_bytes
from shardwise.errors import CheckpointError
from shardwise.model.tensors import bytes_of
from shardwise.recipe import human_bytes
from shardwise.state.checkpoint.contents import REST, Contents
from shardwise.state.checkpoint.fault_points import at_fault_point
from shardwise.state.checkpoint.writer import BlockWriter
from shardwise.state.integrity.manifest import FileFact, Manifest, folder_name
from shardwise.state.integrity.sums import PartialSums, Sums, put_together
from shardwise.state.origin import Origin
from shardwise.state.staging import TOKEN, Staged, StagedSave, remove_left_overs, sync_folder
from shardwise.state.writing import opened, reserve, stretches, write_at
from shardwise.world import package_versions
from shardwise.world.collectively import Peers, collectively

LATEST = "latest"


def write_checkpoint(peers: Peers, root: Path, contents: Contents, layout: str, fingerprint: str) -> Path:
    """Writes a checkpoint below ``root``. All ranks must call it; when it returns on any rank, it is on disk.

    Args:
        peers: the group to communicate in: the world, or a side group for background saves.
        root: the directory of the run's checkpoints; all ranks must see it.

    Raises:
        CheckpointError: on every rank, if one of them cannot write; nothing has changed then.
        RankError: a rank does not take part, or is lost.
    """
    commit = _Commit(peers, root, contents, layout, fingerprint)
    place = f"the checkpoint of step {contents.step}"
    try:
        collectively(peers, f"{place}, making the files", commit.make_files, on_main=True)
        if ranks := commit.meet(place):
            raise CheckpointError(
                f"the checkpoint {commit.dest}",
                why=f"rank {ranks[0]} does not see the directory that rank 0 has made there",
                fix="name a directory on a file system that every node mounts",
            )
        at_fault_point("met")
        told = collectively(peers, f"{place}, writing", commit.write_own)
        everyone = peers.agreement.gather(told, f"{place}, telling checksums")
        collectively(peers, f"{place}, putting it in place", lambda: commit.finish(everyone), on_main=True)
    finally:
        commit.close()
    for group in contents.groups:  # the older checkpoint that the model's tokenizer files are in may be pruned now
        origin = group.runtime.memory(Origin)
        if origin.files is not None and origin.files.is_relative_to(root):
            origin.files = commit.dest / group.prefix
    at_fault_point("acknowledged")
    return commit.dest


class _Commit(StagedSave):
    """One save on one rank, with a method per stage of the protocol."""

    what = "the checkpoint"
    then = "free space, or look at the disk; training can go on, and the checkpoints before are as they were"

    def __init__(self, peers: Peers, root: Path, contents: Contents, layout: str, fingerprint: str):
        super().__init__(peers, root / folder_name(contents.step))
        self.root, self.contents, self.layout, self.fingerprint = root, contents, layout, fingerprint

    def make_files(self) -> None:
        """On rank 0: makes the directory, and its files in their final size."""
        at_fault_point("begun")
        check_place(self.dest, "checkpoint", f"the checkpoint {self.dest}")
        with self.errors_of_writing():
            remove_left_overs(self.root)
            sizes = self.contents.sizes()
            self._refuse_full(sum(sizes.values()))
            self.staged = Staged(self.dest)
            self.folder = self.staged.path
            at_fault_point("staged")
            for path, size in sizes.items():
                target = self.folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened(target, os.O_CREAT) as descriptor:
                    reserve(descriptor, size) if size else None
            at_fault_point("reserved")

    def _refuse_full(self, num_bytes: int) -> None:
        usage = shutil.disk_usage(self.root)
        spare = spare_bytes(usage.total)
        if usage.free < num_bytes + spare:
            raise CheckpointError(
                f"the checkpoint {self.dest}",
                why=f"it takes {human_bytes(num_bytes)}, and {human_bytes(usage.free)} are free on its disk; {human_bytes(spare)} "
                "stay free for others",
                fix="free space, keep fewer checkpoints (keep=), or name another directory",
            )

    def write_own(self) -> PartialSums:
        """Writes this rank's shards, and on rank 0 all that is not sharded; returns the checksums."""
        sums = Sums()
        sizes = self.contents.sizes() if self.peers.is_main else {}
        with self.errors_of_writing(), BlockWriter(sums) as writer:
            for path, size, found in self._files(sizes):
                with writer.file(self.folder / path, path, size):
                    for offset, memory in found:
                        writer.write(offset, memory)
        return sums.partial_sums()

    def _files(self, sizes: dict[str, int]) -> Iterator[tuple[str, int, Iterator[tuple[int, memoryview]]]]:
        """``(path, size, (offset, bytes) pairs)`` of each file that this rank writes to."""
        heads = self.contents.heads() if self.peers.is_main else {}
        for group in self.contents.groups:
            mine: dict[str, list[Any]] = {}
            for path, file, part, values in group.parts(self.peers.rank):
                mine.setdefault(path, [file.size]).append((part, values))
            for file in group.file_layout.files:
                path = group.prefix + file.name
                if path in mine or path in heads:
                    yield path, file.size, _in_order(heads.get(path), mine.get(path, [0])[1:])
        if self.peers.is_main:
            rest = self.contents.rest_file
            values = ((t.offset, bytes_of(self.contents.rest[t.name]).numpy().data) for t in rest.tensors)
            yield REST, rest.size, itertools.chain([(0, memoryview(rest.head))], values)
            for path, text in self.contents.whole_texts.items():
                yield path, sizes[path], iter([(0, memoryview(text))])

    def finish(self, everyone: list[PartialSums]) -> None:
        """On rank 0: writes the manifest, and renames the directory to its place."""
        assert self.staged is not None
        sizes = self.contents.sizes()
        sums = put_together(sizes, everyone)
        at_fault_point("summed")
        manifest = Manifest(
            step=self.contents.step,
            layout=self.layout,
            num_ranks=self.peers.size,
            fingerprint=self.fingerprint,
            versions=package_versions(),
            files={path: FileFact(size, sums[path]) for path, size in sizes.items()},
        )
        data = memoryview(manifest.to_bytes())
        with self.errors_of_writing():
            (self.folder / TOKEN).unlink()
            with opened(self.folder / MANIFEST, os.O_CREAT | os.O_EXCL) as descriptor:
                write_at(descriptor, data[: len(data) // 2], 0)
                at_fault_point("manifest-half-written")
                write_at(descriptor, data[len(data) // 2 :], len(data) // 2)
                at_fault_point("manifest-written")
                os.fsync(descriptor)
            for folder, _, _ in os.walk(self.folder):
                sync_folder(Path(folder))
            at_fault_point("manifest-synced")
            self.staged.move()
            at_fault_point("renamed")
            sync_folder(self.root)
            at_fault_point("durable")
            link = self.root / f".{LATEST}-new"  # for people and other tools; loading does not use it
            with contextlib.suppress(OSError):  # a file system without links, or something else of that name
                link.unlink(missing_ok=True)
                link.symlink_to(self.dest.name)
                os.replace(link, self.root / LATEST)
                sync_folder(self.root)
            at_fault_point("latest")


def _in_order(head: bytes | None, parts: list[Any]) -> Iterator[tuple[int, memoryview]]:
    if head is not None:
        yield 0, memoryview(head)
    for part, values in parts:
        yield from stretches(part, values)
