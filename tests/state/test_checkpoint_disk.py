"""The order in which a save reaches the disk: what a loss of power could undo is never vouched for by what it leaves."""

import os
import time
from pathlib import Path

import numpy as np
from models.drops import Drops
from state.runs import EVERY, make

import shardwise as sw
from shardwise.state.checkpoint import writer
from shardwise.state.checkpoint.fault_points import on_reach
from shardwise.state.integrity.sums import Sums

Event = tuple[int, int, str, str]  # when, which rank, what, about which path


class Recorded:
    """What this rank does to the disk, within."""

    def __init__(self, rank: int):
        self.rank, self.events = rank, list[Event]()

    def __enter__(self) -> list[Event]:
        self._real = os.fsync, os.replace, writer.pwrite
        fsync, replace, pwrite = self._real

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self._add("sync", descriptor)

        def replaced(source, dest) -> None:
            self._add("replace", source)
            replace(source, dest)
            self._add("replaced", dest)

        def written(descriptor: int, memory, offset: int) -> int:
            self._add("write", descriptor)
            return pwrite(descriptor, memory, offset)

        os.fsync, os.replace, writer.pwrite = synced, replaced, written
        on_reach(lambda point: self._add(point, ""))
        return self.events

    def __exit__(self, *_: object) -> None:
        os.fsync, os.replace, writer.pwrite = self._real
        on_reach(None)

    def _add(self, what: str, about: object) -> None:
        path = os.readlink(f"/proc/self/fd/{about}") if isinstance(about, int) else str(about)
        self.events.append((time.monotonic_ns(), self.rank, what, path))


def recorded(root: str) -> list[Event]:
    """All ranks' events of a second save, in the order of the clock that they share."""
    world, _, step = make("dp_shard=2")
    with world:
        extra = {"ema": sw.parallelize(Drops().double(), world, sharding=EVERY)}
        texts = {"notes/deep/run.txt": "mine"}
        with sw.CheckpointManager(root, step, extra=extra, texts=texts, keep=1, async_save=False) as manager:
            manager.save()
            step._runtime.step = 1
            with Recorded(world.rank) as events:
                manager.save()
        return sorted(event for part in world.gather(events) for event in part)


def test_a_save_is_on_disk_before_its_name_is_and_its_name_before_older_ones_go(ranks, tmp_path):
    root = tmp_path.resolve()
    events = ranks.run(recorded, 2, str(root))[0]
    dest = root / "step-00000001"
    (staged,) = (Path(path) for _, _, what, path in events if what == "replace" and ".saving-" in path)
    told = [(rank, what, Path(path) if path else None) for _, rank, what, path in events]

    def at(*wanted: object) -> list[int]:
        return [number for number, (_, *what) in enumerate(told) if tuple(what) == wanted]

    # Each rank's bytes are on disk before there is a manifest, which vouches for them.
    (manifest,) = at("manifest-half-written", None)
    seen = {(rank, path) for rank, what, path in told if what == "write"}
    for rank, path in seen:
        writes = max(n for n, event in enumerate(told) if event == (rank, "write", path))
        assert any(event == (rank, "sync", path) for event in told[writes + 1 : manifest]), (rank, path)
    files = {staged / path.relative_to(dest) for path in dest.rglob("*") if path.is_file()}
    assert {path for _, path in seen} == files - {staged / "manifest.json"}
    assert {rank for rank, _ in seen} == {0, 1}
    # So are the manifest, and the names of everything, before the checkpoint has its own.
    (begins,), (ends,) = at("replace", staged), at("replaced", dest)
    (whole,) = at("manifest-written", None)
    assert manifest < whole < begins < ends
    folders = [staged, *(staged / path.relative_to(dest) for path in dest.rglob("*") if path.is_dir())]
    assert {path.name for path in folders} > {"training", "ema", "notes", "deep"}
    for path in (staged / "manifest.json", *folders):
        assert any(whole < number < begins for number in at("sync", path)), path
    # The name is on disk before anything points to it, and all that before an older checkpoint goes.
    (latest,) = at("replaced", root / "latest")
    (goes,) = at("replace", root / "step-00000000")
    assert any(ends < number < latest for number in at("sync", root))
    assert ends < latest < goes and not (root / "step-00000000").exists()


def synced_folders(root: str) -> list[str]:
    world, _, step = make("dp_shard=1")
    with world, Recorded(world.rank) as events, sw.CheckpointManager(root, step):
        return [path for _, _, what, path in events if what == "sync"]


def test_the_names_of_new_directories_are_on_disk_before_a_checkpoint_is(ranks, tmp_path):
    root = tmp_path.resolve() / "runs" / "a"
    assert set(ranks.run(synced_folders, 1, str(root))[0]) == {str(tmp_path.resolve()), str(root.parent)}
    assert ranks.run(synced_folders, 1, str(root))[0] == []  # they are there


def left_over(root: str) -> list[str]:
    """What stands there after a save by a manager that was open when another's save was killed."""
    world, _, step = make("dp_shard=2")
    with world, sw.CheckpointManager(root, step, async_save=False) as manager:
        for number in (0, 7):
            step._runtime.step = number
            if number and world.is_main:
                for name in (".step-00000003.saving-0a0b0c0d", f".step-{number:08d}.saving-0a0b0c0d"):
                    Path(root, name).mkdir()
                    Path(root, name, "model.safetensors").write_bytes(bytes(100))
                    Path(root, f"{name}.lock").touch()
            manager.save()
    return sorted(os.listdir(root))


def test_what_a_killed_save_left_is_gone_after_the_next_of_the_same_manager(ranks, tmp_path):
    assert ranks.run(left_over, 2, str(tmp_path))[0] == [".lock", "latest", "step-00000000", "step-00000007"]


def test_a_window_is_filled_again_only_when_the_disk_has_it(tmp_path, monkeypatch):
    size = 20 * writer.WINDOW // 8 + 12345
    monkeypatch.setattr(writer, "WINDOW", writer.WINDOW // 8)

    def slowly(*given) -> int:
        time.sleep(0.01)
        return os.pwrite(*given)

    monkeypatch.setattr(writer, "pwrite", slowly)
    values = np.random.default_rng(0).integers(0, 256, size + 1, np.uint8)[1:]  # nowhere as it lies in the file
    (tmp_path / "file").write_bytes(bytes(size))
    with writer.BlockWriter(Sums()) as own, own.file(tmp_path / "file", "file", size):
        own.write(0, values.data)
    assert (tmp_path / "file").read_bytes() == values.tobytes()
