"""Checkpoints go from any layout into any other to the last bit, and a resumed run is the uninterrupted one."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, RESHARDED, RESUMED
from safetensors.torch import load_file
from state.runs import close, equal, run

import shardwise as sw

_NAMES = list(RESHARDED)
# Every layout once as the first and once as the second in each run of the tests; all pairs in soak.
PAIRS = [
    *(pytest.param(first, (_NAMES[i - 3],), id=f"{first}-{_NAMES[i - 3]}") for i, first in enumerate(_NAMES)),
    *(pytest.param(first, tuple(_NAMES), id=f"{first}-all", marks=pytest.mark.soak) for first in _NAMES),
]


@pytest.mark.quick("ddp-2-fsdp-4", "hsdp-2x2-fsdp-2")
@pytest.mark.parametrize(("first", "seconds"), PAIRS)
def test_any_layout_resumes_what_any_other_saved(ranks, tmp_path, first, seconds):
    layout, num_ranks, _ = LAYOUTS[first]
    whole = ranks.run(run, num_ranks, layout, tmp_path, 5, (2,), async_save=False, shows_saved=True)[0]
    assert whole["began"] == 0
    (at_two,) = whole["saved"]
    for layout, num_ranks, _ in (LAYOUTS[second] for second in seconds):
        again, *others = ranks.run(run, num_ranks, layout, tmp_path, 5, async_save=False)
        assert again["began"] == 2
        assert [w.partition(" of steps")[0] for w in again["warnings"]] == (
            ["random streams outside"] if num_ranks != LAYOUTS[first].num_ranks else []
        )
        assert all(other["warnings"] == [] for other in others)
        assert equal(again["first"], at_two)
        assert again["samples"] == whole["samples"][2:]
        for mine, theirs in zip(again["figures"], whole["figures"][2:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
        assert close(again["last"][0], whole["last"][0], 1e-12)
        assert again["average"][1] == pytest.approx(whole["average"][1], rel=1e-12)


@pytest.mark.quick("ddp-2-sync", "fsdp-2-sync", "one-async")
@pytest.mark.parametrize(
    ("name", "async_save"),
    [
        # Each way of saving with every other layout, the rest in soak, and so what 4 ranks do that 2 do not.
        pytest.param(
            name,
            async_save,
            id=f"{name}-{'async' if async_save else 'sync'}",
            marks=() if (number + async_save) % 2 and name not in ("ddp-4", "fsdp-4") else pytest.mark.soak,
        )
        for number, name in enumerate(RESUMED)
        for async_save in (False, True)
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(ranks, tmp_path, name, async_save):
    layout, num_ranks, _ = LAYOUTS[name]
    options = {"dtype": torch.float32, "batch": (num_ranks, 1), "async_save": async_save}  # accumulation 1
    wholes = ranks.run(run, num_ranks, layout, None, 12, dtype=torch.float32, batch=(num_ranks, 1))
    halves = ranks.run(run, num_ranks, layout, tmp_path, 9, (3, 9), **options)
    rests = ranks.run(run, num_ranks, layout, tmp_path, 12, **options)
    whole, half, rest = wholes[0], halves[0], rests[0]
    assert rest["began"] == 9
    assert half["figures"] + rest["figures"] == whole["figures"]
    assert half["samples"] + rest["samples"] == whole["samples"]
    assert equal(rest["last"], whole["last"])
    assert equal(rest["average"], whole["average"])
    for mine, before, after in zip(wholes, halves, rests, strict=True):  # the global streams of each rank
        assert before["draws"] + after["draws"] == mine["draws"]


def test_the_weights_are_a_plain_model_directory_and_no_file_needs_pickle(ranks, tmp_path):
    found = ranks.run(run, 2, "dp_shard=2", tmp_path, 2, (2,), async_save=False)[0]
    folder = tmp_path / "step-00000002"
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], found["last"][0][name]) for name in weights)
    assert set(found["last"][0]) - set(weights) == {"head.weight"}
    assert (tmp_path / "latest").resolve() == folder
    for path in folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json")
        json.loads(path.read_text()) if path.suffix == ".json" else None


def test_the_same_state_is_the_same_bytes_whatever_the_layout(ranks, tmp_path):
    ranks.run(run, 2, "dp_shard=2", tmp_path / "a", 2, (2,), async_save=False)
    ranks.run(_saved_again, 3, "dp_shard=3", tmp_path / "a", tmp_path / "b")
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        one, other = (tmp_path / root / "step-00000002" / name for root in ("a", "b"))
        assert one.read_bytes() == other.read_bytes()


def _saved_again(layout, source, dest):
    from state.runs import make

    world, _, step = make(layout)
    with world:
        with sw.CheckpointManager(source, step, async_save=False) as manager:
            assert manager.load() == 2
        with sw.CheckpointManager(dest, step, async_save=False) as manager:
            manager.save()


def kept(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@pytest.mark.quick("best", "every")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 2}, [5, 6]),
        ({"keep": 1, "keep_every": 3}, [3, 6]),
        ({"keep": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "best": "loss"}, None),
    ],
    ids=["last", "every", "all", "best"],
)
def test_which_checkpoints_stay(ranks, tmp_path, options, expected):
    found = ranks.run(run, 2, "dp_shard=2", tmp_path, 6, (1, 2, 3, 4, 5, 6), **options)[0]
    if expected is None:
        losses = [loss for loss, *_ in found["figures"]]
        expected = sorted({losses.index(min(losses)) + 1, 6})
    assert kept(tmp_path) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "latest", *(f"step-{step:08d}" for step in expected)
    ]  # fmt: skip


def other_seed(layout, root, seed, until):
    from models.drops import Drops
    from state.runs import EVERY, Texts

    with sw.init(layout, device="cpu", seed=seed) as world:
        torch.manual_seed(0)
        model = sw.parallelize(Drops(), world, sharding=EVERY)
        step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        loader = sw.Loader(Texts(), world, global_batch=4, micro_batch=1)
        with sw.CheckpointManager(root, step, async_save=False) as manager:
            losses = []
            for window in manager.resume(loader):
                losses.append(step(window).loss)
                if step.num_steps == until:
                    manager.save()
                    return losses
    return []


def test_a_resumed_run_goes_on_with_the_seed_it_began_with(ranks, tmp_path):
    whole = ranks.run(other_seed, 2, "dp_shard=2", tmp_path / "a", 3, 4)[0]
    half = ranks.run(other_seed, 2, "dp_shard=2", tmp_path / "b", 3, 2)[0]
    rest = ranks.run(told_of_a_seed, 2, "dp_shard=2", tmp_path / "b", 8, 4)[0]
    assert half + rest == whole
    assert ranks.run(other_seed, 2, "dp_shard=2", tmp_path / "c", 8, 4)[0] != whole


def told_of_a_seed(layout, root, seed, until):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = other_seed(layout, root, seed, until)
    wanted = "the seed is 3, that of the saved run; sw.init was given 8"
    assert (wanted in str([str(each.message) for each in told])) == (os.environ["RANK"] == "0")
    return losses


def own_loop(layout, root, stops, until):
    from models.drops import Drops
    from state.runs import EVERY, Texts
    from state.test_changed_settings import OwnLoop

    with sw.init(layout, device="cpu", seed=3) as world:
        torch.manual_seed(0)
        model = sw.parallelize(Drops(), world, sharding=EVERY)
        optim = sw.local_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
        loader, losses = sw.Loader(Texts(), world, global_batch=4, micro_batch=1), []
        with sw.CheckpointManager(root, OwnLoop(model, optim), async_save=False) as manager:
            for window in manager.resume(loader):
                with sw.window(model, window) as w:
                    for given in w:
                        output = model(given["input_ids"]).flatten(0, 1)
                        loss = F.cross_entropy(output, given["labels"].flatten(), reduction="sum", ignore_index=-100)
                        (loss / w.num_tokens).backward()
                        losses.append(float(loss))
                optim.step()
                optim.zero_grad()
                until -= 1
                if until == 0:
                    if stops:
                        manager.save()
                    break
        names = sorted(path.name for path in root.iterdir() if path.name.startswith("step-")) if stops else []
        return losses, names


def test_random_numbers_of_a_loop_of_ones_own_go_on_where_it_was_saved(ranks, tmp_path):
    """The streams of dropout began again with those of the first window, and the second save was of a step that had been."""
    whole, _ = ranks.run(own_loop, 2, "dp_shard=2", tmp_path / "a", False, 4)[0]
    half, _ = ranks.run(own_loop, 2, "dp_shard=2", tmp_path / "b", True, 2)[0]
    rest, saved = ranks.run(own_loop, 2, "dp_shard=2", tmp_path / "b", True, 2)[0]
    assert half + rest == whole and saved == ["step-00000002", "step-00000004"]


def saved_without_a_loader(root):
    from models.drops import Drops
    from state.runs import EVERY, Texts

    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Drops(), world, sharding=EVERY)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.02))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with sw.CheckpointManager(root, step, async_save=False) as manager:
                for window in sw.Loader(Texts(), world, global_batch=4, micro_batch=1):
                    step(window)
                    manager.save_every(2)
        return [str(each.message) for each in told if "no position in the data is saved" in str(each.message)]


def test_a_save_says_once_that_it_has_no_position_of_a_loader_it_does_not_know(ranks, tmp_path):
    first, second = ranks.run(saved_without_a_loader, 2, tmp_path)
    assert len(first) == 1 and "iterate over ckpt.resume(loader), at the first start too" in first[0] and not second


def saved_slowly(layout, root):
    """Two steps and two saves while nothing reaches the disk; the states at the saves."""
    import threading

    from state.runs import Average, Texts, make, state

    from shardwise.state.checkpoint import writer

    world, model, step = make(layout)
    real, may_write = writer.pwrite, threading.Event()

    def waits(descriptor, memory, offset):
        assert may_write.wait(30)
        return real(descriptor, memory, offset)

    with world:
        writer.pwrite = waits
        manager = sw.CheckpointManager(root, step, keep=None, extra={"average": Average()})
        found = []
        windows = iter(manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)))
        for _ in range(2):
            step(next(windows))
            found.append(state(model, step.optim))
            manager.save()
            step(next(windows))  # what is being written is not what this changes
            may_write.set()
            manager.wait()
            may_write.clear()
        may_write.set()
        manager.close()
        writer.pwrite = real
    return found


def test_what_is_saved_in_the_background_is_what_was_there_when_save_was_called(ranks, tmp_path):
    found = ranks.run(saved_slowly, 2, "dp_shard=2", tmp_path)[0]
    for number, expected in zip((1, 3), found, strict=True):
        other = tmp_path / f"only-{number}"
        other.mkdir()
        (tmp_path / f"step-{number:08d}").rename(other / f"step-{number:08d}")
        again = ranks.run(run, 2, "dp_shard=2", other, 0, async_save=False)[0]
        assert again["began"] == number and equal(again["first"], expected)


def saved_on(root, weights, steps):
    """Goes on from what is in ``root``, or from ``weights``, and saves as these steps, keeping one checkpoint."""
    from state.runs import make

    world, model, step = make("dp_shard=2")
    with world, sw.CheckpointManager(root, step, keep=1) as manager:
        if manager.load() is None:
            sw.load_weights(model, weights)
        for number in steps:
            step._runtime.step = number
            manager.save()


def test_tokenizer_files_outlive_the_checkpoint_that_the_run_went_on_from(ranks, tmp_path):
    ranks.run(_weights_to, 2, tmp_path / "weights")
    (tmp_path / "weights" / "tokenizer.json").write_text('{"kept": true}')
    ranks.run(saved_on, 2, tmp_path / "run", tmp_path / "weights", (1,))
    ranks.run(saved_on, 2, tmp_path / "run", tmp_path / "weights", (2, 3, 4))
    assert kept(tmp_path / "run") == [4]
    assert (tmp_path / "run" / "step-00000004" / "tokenizer.json").read_text() == '{"kept": true}'


def _weights_to(dest):
    from state.runs import make

    world, model, _ = make("dp_shard=2")
    with world:
        sw.save_weights(model, dest)


DAY = 86400


def saved_backwards(root, days):
    """Saves after each step, the clock a day further back each time; every file there is given the time that the clock shows."""
    import time

    from state.runs import Texts, make, state

    world, model, step = make("dp_shard=2")
    real, now = {name: getattr(time, name) for name in ("time", "time_ns", "gmtime")}, [time.time()]
    time.time, time.time_ns = lambda: now[0], lambda: int(now[0] * 1e9)
    time.gmtime = lambda seconds=None: real["gmtime"](now[0] if seconds is None else seconds)
    found = []
    try:
        with world, sw.CheckpointManager(root, step, keep=2) as manager:
            for window in manager.resume(sw.Loader(Texts(), world, global_batch=4, micro_batch=1)):
                now[0] -= DAY
                step(window)
                found.append((step.num_steps, state(model, step.optim)))
                manager.save()
                manager.wait()
                for path in Path(root).rglob("*") if world.is_main else ():
                    os.utime(path, (now[0], now[0]), follow_symlinks=False)
                world.barrier()
                if len(found) == days:
                    break
    finally:
        for name, function in real.items():
            setattr(time, name, function)
    return found


def test_a_clock_that_goes_back_changes_nothing(ranks, tmp_path):
    root = tmp_path / "run"
    first = ranks.run(saved_backwards, 2, str(root), 3)[0]
    assert kept(root) == [2, 3]  # by their steps: the last by the clock is the first
    times = [json.loads((root / f"step-{step:08d}" / "training" / "state.json").read_text())["time"] for step in (2, 3)]
    assert times[0] > times[1]
    assert (root / "latest").resolve().name == "step-00000003"
    # What a killed save and a killed removal have left, of a time that is still to come.
    for name in (".step-00000004.saving-0a0b0c0d", ".step-00000001.removing-0a0b0c0d"):
        (root / name).mkdir()
    (root / ".step-00000004.saving-0a0b0c0d.lock").touch()
    for path in root.iterdir():
        os.utime(path, (4e9, 4e9), follow_symlinks=False)
    os.utime(root / "step-00000002", (4.1e9, 4.1e9))
    second = ranks.run(saved_backwards, 2, str(root), 2)[0]
    assert [number for number, _ in first + second] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in root.iterdir()) == [".lock", "latest", "step-00000004", "step-00000005"]
    whole = ranks.run(saved_backwards, 2, str(tmp_path / "other"), 5)[0]
    assert equal(second, whole[3:])
