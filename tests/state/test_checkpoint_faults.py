"""A disk that fails on one rank is one error on all ranks: training continues, and the checkpoints before are as they were."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from disks import mounted
from state.runs import Average, Texts, equal, make, run, state

import shardwise as sw
from shardwise.config import folders
from shardwise.state import staging
from shardwise.state.checkpoint import writer

FAULTS = ("ENOSPC", "EIO", "short", "later")


def failing(layout, root, fault, rank, mode):
    """Saves after step 1, fails to after step 2, trains on, saves after step 3."""
    world, model, step = make(layout)
    average, loader = Average(), sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
    real, errors = writer.pwrite, []

    def faulty(descriptor, memory, offset):
        if fault == "short":
            return real(descriptor, memory[: max(1, len(memory) // 3)], offset)
        if fault == "later" and offset == 0:
            return real(descriptor, memory, offset)
        raise OSError(
            errno.EIO if fault == "EIO" else errno.ENOSPC, os.strerror(errno.EIO if fault == "EIO" else errno.ENOSPC)
        )

    with (
        world,
        sw.CheckpointManager(root, step, keep=None, extra={"average": average}, async_save=mode == "async") as manager,
    ):
        for window in manager.resume(loader):
            step(window)
            writer.pwrite = faulty if step.num_steps == 2 and world.rank == rank else real
            try:
                manager.save()
                manager.wait()
            except sw.CheckpointError as error:
                errors.append((step.num_steps, error))
            writer.pwrite = real
            if step.num_steps == 3:
                break
        return errors, state(model, step.optim)


@pytest.mark.quick("ENOSPC-1-async", "short-0-sync")
@pytest.mark.parametrize(
    ("fault", "rank", "mode"),
    [
        # Each fault on each rank and in each mode, all of these together in soak.
        pytest.param(fault, rank, mode, marks=() if (number + rank + (mode == "sync")) % 2 else pytest.mark.soak)
        for number, fault in enumerate(FAULTS)
        for rank in (0, 1)
        for mode in ("sync", "async")
    ],
)
def test_a_fault_on_one_rank_is_told_on_all_and_costs_one_save(ranks, tmp_path, fault, rank, mode):
    root = tmp_path / "run"
    answers = ranks.run(failing, 2, "dp_shard=2", str(root), fault, rank, mode)
    kept = sorted(path.name for path in root.glob("step-*"))
    if fault == "short":  # the system took less than it was given, and is given the rest
        assert all(errors == [] for errors, _ in answers)
        assert kept == ["step-00000001", "step-00000002", "step-00000003"]
    else:
        for errors, _ in answers:
            ((step, error),) = errors
            assert step == 2 and "writing failed" in error.why and "step-00000002" in error.given
        assert kept == ["step-00000001", "step-00000003"]
    assert sorted(p.name for p in root.iterdir() if p.name not in kept) == [".lock", "latest"]
    again = ranks.run(run, 2, "dp_shard=2", str(root), 3, async_save=False)[0]
    assert again["began"] == 3 and again["warnings"] == [] and equal(again["first"], answers[0][1])


def full(root, big):
    world, _, step = make("dp_shard=2", dim=8)
    with world:
        errors = []
        manager = sw.CheckpointManager(root, step, async_save=False)
        manager.save()
        if world.is_main:
            folders.SPARE, spare = -(1 << 30), folders.SPARE
            usage = os.statvfs(root)
            with open(os.path.join(root, "filler"), "wb") as file:
                file.write(bytes(max(0, usage.f_bavail * usage.f_frsize - big)))
        for _ in range(2):
            step._runtime.step += 1
            try:
                manager.save()
            except sw.CheckpointError as error:
                errors.append(error)
            if world.is_main:
                folders.SPARE = spare
        return errors


def failing_twice(root):
    world, _, step = make("dp_shard=2")

    def faulty(descriptor, memory, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with world:
        real, writer.pwrite = writer.pwrite, faulty
        try:
            with sw.CheckpointManager(root, step) as manager:
                manager.save()
                raise ValueError("of the loop")
        except ValueError as error:
            return getattr(error, "__notes__", [])
        finally:
            writer.pwrite = real


def test_a_save_that_failed_is_told_with_the_error_that_ended_the_block(ranks, tmp_path):
    for notes in ranks.run(failing_twice, 2, str(tmp_path)):
        assert len(notes) == 1 and "was not finished" in notes[0] and "step-00000000" in notes[0]


def test_a_full_disk_is_told_on_every_rank_and_nothing_is_lost(ranks, tmp_path):
    with mounted(tmp_path / "small", "size=96m") as small:
        for errors in ranks.run(full, 2, str(small), 20_000):
            late, early = errors
            assert "No space left" in late.why  # found when the files are made
            assert "are free on its disk" in early.why  # found by looking first
        assert sorted(path.name for path in small.iterdir()) == [".lock", "filler", "latest", "step-00000000"]


def refused(root, name=None):
    world, _, step = make("dp_shard=2")
    with world:
        try:
            sw.CheckpointManager(root, step, async_save=False).close()
        except sw.CheckpointError as error:
            return error
    return None


def test_a_root_that_is_a_file_is_told(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for error in ranks.run(refused, 2, str(tmp_path / "file")):
        assert isinstance(error, sw.CheckpointError) and "file" in error.given


def test_a_read_only_root_is_told_on_every_rank(ranks, tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        for name in ("", "below/it"):
            for error in ranks.run(refused, 2, str(disk / name)):
                assert isinstance(error, sw.CheckpointError)
                assert str(disk / name) in error.given and "Read-only file system" in error.why


def turned_read_only(root) -> list[str]:
    """The directory takes no new names at the second of three saves, as on a disk that was remounted after a fault."""
    world, _, step = make("dp_shard=2")
    real, told = Path.mkdir, []

    def refuses(self, *args, **kwargs):
        if ".saving-" in self.name and step.num_steps == 2:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return real(self, *args, **kwargs)

    with world, sw.CheckpointManager(root, step, keep=None, extra={"average": Average()}, async_save=False) as manager:
        Path.mkdir = refuses
        try:
            for window, _ in zip(
                manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)), range(3), strict=False
            ):
                step(window)
                try:
                    manager.save()
                except sw.CheckpointError as error:
                    told.append(str(error))
        finally:
            Path.mkdir = real
    return told


def test_a_directory_that_turned_read_only_is_told_on_every_rank_and_training_goes_on(ranks, tmp_path):
    for told in ranks.run(turned_read_only, 2, str(tmp_path)):
        (error,) = told
        assert "step-00000002" in error and "Read-only file system" in error
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def holder(path, seconds):
    """A process that has the lock of a directory for so long."""
    code = (
        "import sys, time; from pathlib import Path; from shardwise.launch.lock import try_lock;"
        f"held = try_lock(Path({str(path / '.lock')!r})).held; print('held', flush=True); time.sleep({seconds})"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    return other


def test_a_second_job_on_one_directory_is_refused_and_a_dead_one_is_not_in_the_way(ranks, tmp_path):
    other = holder(tmp_path, 60)
    try:
        for error in ranks.run(refused, 2, str(tmp_path)):
            assert isinstance(error, sw.CheckpointError) and f"process {other.pid} on" in error.why
    finally:
        other.kill()
        other.communicate()
    assert ranks.run(refused, 2, str(tmp_path)) == [None, None]


def test_a_run_started_again_at_once_waits_for_the_last_of_the_old_one_to_end(ranks, tmp_path):
    other = holder(tmp_path, 0.5)
    try:
        assert ranks.run(refused, 2, str(tmp_path)) == [None, None]
    finally:
        other.communicate()


class Unplain:
    def state_dict(self):
        return {"inner": [1, {"fn": print}]}

    def load_state_dict(self, state):
        raise AssertionError


def with_extra(extra, **options):
    world, _, step = make("dp_shard=2")
    with world:
        try:
            with sw.CheckpointManager(options.pop("root"), step, extra=extra, async_save=False, **options) as manager:
                manager.save()
        except sw.ShardwiseError as error:
            return error
    return None


@pytest.mark.parametrize(
    ("extra", "options", "told"),
    [
        ({"mine": Unplain()}, {}, "extra/mine/inner/1/fn: a builtins.builtin_function_or_method"),
        ({"mine": 5}, {}, "has no state_dict"),
        ({"a/b": Average()}, {}, "becomes that of a file"),
        ({}, {"keep": 0}, "keep=0"),
        ({}, {"keep_every": -1}, "keep_every=-1"),
        ({}, {"best": "accuracy"}, "a save without accuracy"),
    ],
    ids=["function", "number", "name", "keep", "every", "best"],
)
def test_what_cannot_be_saved_is_refused_by_name(ranks, tmp_path, extra, options, told):
    for error in ranks.run(with_extra, 2, extra, root=str(tmp_path / "run"), **options):
        assert error is not None and told in str(error)
    # Without its figure a checkpoint is on disk all the same, as the newest: the steps since the last one are not lost.
    assert bool(list(tmp_path.glob("run/step-*"))) == ("best" in options)


def rewound(root):
    world, _, step = make("dp_shard=2")
    with world, sw.CheckpointManager(root, step, async_save=False, keep=None) as manager:
        for number in (1, 5):
            step._runtime.step = number
            manager.save()
        assert manager.load(1) == 1
        try:
            manager.save()
        except sw.CheckpointError as error:
            return error
    return None


def test_a_run_that_went_back_does_not_save_below_newer_checkpoints(ranks, tmp_path):
    for error in ranks.run(rewound, 2, str(tmp_path)):
        assert "there are newer ones" in error.why


def elsewhere(root, hidden):
    world, _, step = make("dp_shard=2")
    with world:
        real = staging.sees_token
        staging.sees_token = lambda folder, token: world.rank != hidden and real(folder, token)
        try:
            sw.CheckpointManager(root, step, async_save=False).save()
        except sw.CheckpointError as error:
            return error
        finally:
            staging.sees_token = real
    return None


def test_a_rank_that_does_not_see_the_directory_is_named(ranks, tmp_path):
    for error in ranks.run(elsewhere, 2, str(tmp_path), 1):
        assert "rank 1 does not see" in error.why
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == [".lock"]


def other_model(root, dim):
    world, _, step = make("dp_shard=2", dim=dim)
    before = {name: value.clone() for name, value in step._runtime.local_tensors().items()}
    with world:
        try:
            with sw.CheckpointManager(root, step, async_save=False) as manager:
                manager.load()
        except sw.CheckpointError as error:
            return error, all(torch.equal(v, before[n]) for n, v in step._runtime.local_tensors().items())
    return None, False


def test_a_checkpoint_of_another_model_is_no_damaged_one(ranks, tmp_path):
    ranks.run(run, 2, "dp_shard=2", tmp_path, 1, (1,), async_save=False)
    for error, unchanged in ranks.run(other_model, 2, str(tmp_path), 9):
        assert unchanged and "shape" in error.given and "none of them" not in error.why


class FailsOn(Average):
    """Fails on one rank alone, when it is asked for its state or given it."""

    def __init__(self, rank, method, problem):
        super().__init__()
        self.rank, self.method, self.problem = rank, method, problem

    def state_dict(self):
        return {"fn": print} if self._fails("plain") else {} if self._fails("state_dict") else super().state_dict()

    def load_state_dict(self, state):
        self._fails("load_state_dict")
        super().load_state_dict(state)

    def _fails(self, method):
        if self.method != method or torch.distributed.get_rank() != self.rank:
            return False
        if self.problem is not None:
            raise self.problem
        return True


def with_one_that_fails(root, rank, method, problem, mode):
    """Errors of the three saves, or of loading, and how long the longest took, in seconds."""
    world, _, step = make("dp_shard=2")
    extra = {"average": FailsOn(rank, method, problem)}
    errors, seconds = [], 0.0
    with world, sw.CheckpointManager(root, step, extra=extra, async_save=mode == "async") as manager:
        for number in (1, 2, 3):
            step._runtime.step = number
            extra["average"].method = method if number == 2 else ""
            start = time.monotonic()
            try:
                manager.load(1) if number == 2 and method == "load_state_dict" else manager.save()
            except Exception as error:
                errors.append((number, type(error).__name__, str(error)))
            seconds = max(seconds, time.monotonic() - start)
    return errors, seconds


@pytest.mark.combinations("values")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("method", "problem", "own"),
    [
        ("state_dict", ValueError("mine"), "ValueError"),
        ("state_dict", OSError(errno.EIO, "disk"), "CheckpointError"),
        ("plain", None, "UnsupportedError"),
        ("load_state_dict", KeyError("mine"), "KeyError"),
    ],
    ids=["value", "disk", "plain", "load"],
)
def test_an_extra_object_that_fails_on_one_rank_is_one_error_on_all_at_once(
    ranks, tmp_path, method, problem, own, rank, mode
):
    answers = ranks.run(with_one_that_fails, 2, str(tmp_path), rank, method, problem, mode)
    for number, (errors, seconds) in enumerate(answers):
        ((step, kind, told),) = errors
        assert step == 2 and seconds < 10  # the world waits 600 s
        foreign = own in ("ValueError", "KeyError")
        assert kind == (own if number == rank or not foreign else "RankError")
        assert ("mine" in told) == foreign and (number == rank or f"rank {rank}" in told)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [1, 3]
