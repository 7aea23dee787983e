"""What a user does with a manager that it was not made for: told, or done right; never a loss without a word."""

import errno
import fcntl
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from models.drops import Drops
from state.runs import EVERY, Average, Texts, equal, make, run, state
from torch import nn

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.launch import launch_local
from shardwise.launch.lock import release, try_lock
from shardwise.state.checkpoint import writer
from shardwise.state.checkpoint.contents import check_texts


def train(windows, step, num: int) -> list[float]:
    return [step(window).loss for _, window in zip(range(num), windows, strict=False)]


def fresh(world, **options):
    """Model, step and loader of a run whose optimizer has kept nothing yet."""
    torch.manual_seed(0)
    model = sw.parallelize(Drops().double(), world, sharding=EVERY)
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, sw.TrainStep(model, optim, **options), sw.Loader(Texts(), world, global_batch=12, micro_batch=1)


# ---- loading --------------------------------------------------------------------------------------------------------


def back_to_the_start(layout, root) -> tuple[dict, dict]:
    """State after two windows from the beginning, and after going back to the beginning and doing the same again."""
    with sw.init(layout, device="cpu") as world:
        model, step, loader = fresh(world)
        with sw.CheckpointManager(root, step, async_save=False, keep=None) as manager:
            manager.resume(loader)
            manager.save()
            train(loader, step, 2)
            first = state(model, step.optim)
            manager.load(0)
            train(loader, step, 2)
            return first, state(model, step.optim)


@pytest.mark.parametrize(("layout", "num"), [("dp_shard=2", 2), ("dp_replicate=2", 2), ("dp_shard=1", 1)])
def test_a_checkpoint_from_before_the_first_step_takes_the_moments_away(ranks, tmp_path, layout, num):
    first, second = ranks.run(back_to_the_start, num, layout, tmp_path)[0]
    assert equal(first, second) and len(second[1]["state"]) > 0


def load_before_resume(root) -> list[list[float]]:
    """The losses behind step 2, of the run itself and of one that names the step first."""
    found = []
    for number in range(2):
        with sw.init("dp_shard=2", device="cpu") as world:
            _, step, loader = fresh(world)
            with sw.CheckpointManager(root, step, async_save=False, keep=None) as manager:
                if number == 0:
                    windows = manager.resume(loader)
                    train(windows, step, 1)
                    manager.save()
                else:
                    manager.load(1)
                    windows = manager.resume(loader)
                found.append(train(windows, step, 2))
    return found


def test_a_step_that_is_loaded_first_is_where_the_data_goes_on(ranks, tmp_path):
    whole, resumed = ranks.run(load_before_resume, 2, tmp_path)[0]
    assert whole == resumed


def test_a_loader_that_cannot_say_where_it_is_is_refused_before_it_is_used(ranks, tmp_path):
    with pytest.raises(sw.RankError, match=r"resume\(list\)[\s\S]*use sw.Loader"):
        ranks.run(resume_a_list, 1, tmp_path)


def resume_a_list(root) -> None:
    world, _, step = make("dp_shard=1")
    with world, sw.CheckpointManager(root, step) as manager:
        manager.resume([])


# ---- directories ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("good")
    ranks.run(run, 2, "dp_shard=2", root, 3, (1, 2, 3), async_save=False, keep=None)
    return root


@pytest.fixture
def copy(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize("name", ["latest", "step-00000002"])
def test_a_checkpoint_is_no_directory_for_checkpoints(ranks, copy, name):
    before = sorted(path.name for path in copy.rglob("*"))
    with pytest.raises(sw.RankError, match=r"it is one checkpoint[\s\S]*the directory that it lies in"):
        ranks.run(run, 2, "dp_shard=2", copy / name, 4)
    assert sorted(path.name for path in copy.rglob("*")) == before


def test_a_checkpoint_that_was_moved_to_another_disk_is_gone_on_with(ranks, copy, tmp_path):
    for path in sorted(copy.glob("step-*")):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    found = ranks.run(run, 2, "dp_shard=2", copy, 4, (4,), async_save=False, keep=1)[0]
    assert found["began"] == 3 and found["warnings"] == []
    assert [path.name for path in copy.glob("*step-*")] == ["step-00000004"]  # the links are pruned,
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 3  # and not what they name


def save_without_loading(root) -> None:
    world, _, step = make("dp_shard=2")
    with world:
        loader = sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
        with sw.CheckpointManager(root, step, extra={"average": Average()}, keep=1) as manager:
            for _ in range(5):
                step(next(iter(loader)))
            manager.save()


def test_an_older_run_is_not_pruned_by_one_that_has_nothing_to_do_with_it(ranks, copy):
    with pytest.raises(sw.RankError, match=r"those of an earlier run \(step 1, 2, 3\)"):
        ranks.run(save_without_loading, 2, copy)
    assert len(list(copy.glob("step-*"))) == 3


def open_without_locks(root) -> list[str]:
    def without_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    world, _, step = make("dp_shard=2")
    real, fcntl.flock = fcntl.flock, without_locks
    try:
        with world, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with sw.CheckpointManager(root, step, async_save=False) as manager:
                manager.save()
    finally:
        fcntl.flock = real
    return [f"{Path(warning.filename).name}: {warning.message}" for warning in told if "locks" in str(warning.message)]


def test_a_file_system_without_locks_is_told(ranks, tmp_path):
    first, second = ranks.run(open_without_locks, 2, str(tmp_path))
    assert len(first) == 1 and second == []
    assert first[0].startswith(f"{Path(__file__).name}: {tmp_path} lies on a file system without locks")


def test_the_lock_is_given_back_though_a_forked_child_has_it_too(tmp_path):
    held = try_lock(tmp_path / "lock").held
    assert held is not None
    refused = try_lock(tmp_path / "lock")
    assert refused.held is None and "which has not closed it" in refused.owner
    child = os.fork()
    if not child:
        import time

        time.sleep(60)
        os._exit(0)
    try:
        release(held)
        with (tmp_path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# ---- what is saved --------------------------------------------------------------------------------------------------


class Mine:
    """State that somebody has made to differ."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def saved_with(root, options: dict) -> None:
    world, model, step = make("dp_shard=2")
    with world:
        for name, kind in list(options.get("extra", {}).items()):
            options["extra"][name] = {
                "by rank": lambda: Mine(world.rank),
                "tensor by rank": lambda: Mine(torch.full((3,), float(world.rank))),
                "alike": lambda: Mine(torch.ones(3)),
                "cut": lambda: Mine(next(p for p in model.parameters() if p.dim()).detach().unsqueeze(-1)),
            }[kind]()
        with sw.CheckpointManager(root, step, async_save=False, **options) as manager:
            manager.save()


@pytest.mark.parametrize("kind", ["by rank", "tensor by rank"])
def test_an_extra_object_that_differs_by_rank_is_named(ranks, tmp_path, kind):
    with pytest.raises(
        sw.RankError, match=r"not equal on every rank: extra/mine\n[\s\S]*rank 1 has another than rank 0"
    ):
        ranks.run(saved_with, 2, tmp_path, {"extra": {"other": "alike", "mine": kind}})
    assert not list(tmp_path.glob("step-*"))


def test_a_tensor_that_is_cut_as_no_parameter_is_is_named(ranks, tmp_path):
    with pytest.raises(sw.RankError, match=r"extra/mine/value: a tensor that is cut over the ranks"):
        ranks.run(saved_with, 2, tmp_path, {"extra": {"mine": "cut"}})


@pytest.mark.parametrize(
    "path",
    ["manifest.json", "training/state.json", "training/recipe.json", "model.safetensors", "model.safetensors.index.json",
     "training/optimizer-00001-of-00002.safetensors", "extra/a/b", "../x", "/abs", "a//b", "./a", "a/../../b", ""],
)  # fmt: skip
def test_a_text_whose_name_cannot_be_is_refused(path):
    with pytest.raises(sw.ConfigError, match="texts="):
        check_texts({path: "x"})


def test_a_manager_refuses_such_a_text(ranks, tmp_path):
    with pytest.raises(sw.RankError, match="ConfigError: texts="):
        ranks.run(saved_with, 2, tmp_path, {"texts": {"../x": "x"}})


def test_a_text_beside_lies_in_the_checkpoint(ranks, tmp_path):
    ranks.run(saved_with, 2, tmp_path, {"texts": {"notes/run.txt": "mine"}})
    assert (tmp_path / "latest" / "notes" / "run.txt").read_text() == "mine"


def other_state_by_rank(root) -> None:
    """Something in the optimizer that is no tensor, and not alike."""
    world, model, step = make("dp_shard=2")
    with world:
        train(sw.Loader(Texts(), world, global_batch=12, micro_batch=1), step, 1)
        step.optim.state[next(iter(model.parameters()))]["mine"] = float(world.rank)
        with sw.CheckpointManager(root, step, async_save=False) as manager:
            manager.save()


def test_optimizer_state_that_is_no_tensor_has_to_be_alike(ranks, tmp_path):
    with pytest.raises(sw.RankError, match="not equal on every rank: optimizer"):
        ranks.run(other_state_by_rank, 2, tmp_path)


# ---- which stay -----------------------------------------------------------------------------------------------------


def ranked(root, best: str | None, values: list[float]) -> list[str]:
    world, _, step = make("dp_shard=2")
    with warnings.catch_warnings(record=True) as caught, world:
        warnings.simplefilter("always")
        loader = sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
        with sw.CheckpointManager(root, step, best=best, keep=1) as manager:
            windows = manager.resume(loader)
            for window, value in zip(windows, values, strict=False):
                step(window)
                manager.save(metrics={"acc": value, "loss": value})
    return [str(each.message).partition(";")[0] for each in caught if "was the best" in str(each.message)]


def steps_of(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


@pytest.mark.parametrize("now", ["loss", None])
def test_what_is_best_by_another_figure_is_not_compared_and_stays(ranks, tmp_path, now):
    assert not ranks.run(ranked, 2, tmp_path, "-acc", [0.9, 0.1])[0]  # by "-acc" step 1 is the best, at -0.9
    assert steps_of(tmp_path) == [1, 2]
    for value in (0.3, 0.5, 0.7):
        first, second = ranks.run(ranked, 2, tmp_path, now, [value])
        told = f"the checkpoint of step 1, which was the best by best='-acc', stays: now it is best={now!r}, and it has no such figure"
        assert [text.partition(". Delete")[0] for text in first] == [told] and not second
    assert steps_of(tmp_path) == ([1, 3, 5] if now else [1, 5])


@pytest.mark.parametrize(
    ("before", "now", "values"), [("acc", "-acc", [1.0, 7.0, 5.0, 3.0]), ("-acc", "acc", [9.0, 2.0, 5.0, 7.0])]
)
def test_a_figure_of_the_same_name_is_ranked_by_the_rule_of_now(ranks, tmp_path, before, now, values):
    ranks.run(ranked, 2, tmp_path, before, values[:3])
    assert steps_of(tmp_path) == [1, 3]  # the best, and the newest
    told = ranks.run(ranked, 2, tmp_path, now, values[3:])
    assert steps_of(tmp_path) == [3, 4] and not any(told)


FIGURES = {
    "by rank": (lambda rank: {"acc": 0.5 + rank}, "acc differs between ranks", "by rank it is 0.5, 1.5"),
    "none": (lambda rank: {"acc": None}, "acc=None", "it is a number"),
    "a text": (lambda rank: {"acc": "high"}, "acc='high'", "it is a number"),
    "missing on one": (lambda rank: {"acc": 0.5} if rank else {"loss": 1.0}, "a save without acc", "given loss"),
    "a text on one": (lambda rank: {"acc": 0.5 if rank else "x"}, "acc='x'", "it is a number"),
}


def with_figures(root, given: str):
    world, _, step = make("dp_shard=2")
    with world:
        step([next(iter(sw.Loader(Texts(), world, global_batch=2, micro_batch=1)))[0]])
        with sw.CheckpointManager(root, step, best="acc") as manager:
            try:
                manager.save(metrics=FIGURES[given][0](world.rank))
            except sw.ConfigError as error:
                return "\n".join((str(error), *error.__notes__))
    return ""


@pytest.mark.quick("none", "missing on one", "a text on one")
@pytest.mark.parametrize("given", FIGURES)
def test_figures_that_rank_nothing_are_an_error_on_all_ranks(ranks, tmp_path, given):
    """And not one about the state, or about a rank that was lost. What was trained is saved before it is raised."""
    for text in ranks.run(with_figures, 2, tmp_path, given):
        assert all(words in text for words in FIGURES[given][1:]), text
        assert "the checkpoint of step 1 is on disk" in text
    assert steps_of(tmp_path) == [1]


@pytest.mark.quick("-acc-kept1")
@pytest.mark.parametrize(("best", "kept"), [("acc", [2, 3]), ("-acc", [1, 3])])
def test_best_is_the_least_or_with_a_minus_the_greatest_and_never_nan(ranks, tmp_path, best, kept):
    ranks.run(ranked, 2, tmp_path, best, [0.9, 0.1])
    ranks.run(ranked, 2, tmp_path, best, [float("nan")])
    assert steps_of(tmp_path) == kept


def test_the_command_line_keeps_the_best_of_the_run_too(ranks, tmp_path):
    ranks.run(ranked, 2, tmp_path, "loss", [0.1, 0.9])
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "copy")
    assert cli.main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert steps_of(tmp_path) == [1, 2]


def faulty_pruning(root, background: bool) -> tuple[int, list[str]]:
    """An input-output error on rank 0, after the checkpoint is on disk."""
    from shardwise.state.checkpoint import retention

    world, _, step = make("dp_shard=2")
    real = retention.steps_in

    def fails(folder):
        raise OSError(5, "Input/output error")

    with world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
        with sw.CheckpointManager(root, step, keep=1, async_save=background) as manager:
            for window, _ in zip(manager.resume(loader), range(3), strict=False):
                step(window)
                retention.steps_in = fails if step.num_steps == 2 else real
                manager.save()
                manager.wait()
        retention.steps_in = real
    return step.num_steps, [str(warning.message) for warning in caught if "removed" in str(warning.message)]


@pytest.mark.parametrize("background", [True, False])
def test_a_fault_in_pruning_is_told_and_no_fault_of_the_save(ranks, tmp_path, background):
    (steps, told), (others, nothing) = ranks.run(faulty_pruning, 2, tmp_path, background)
    assert steps == others == 3 and nothing == []
    assert len(told) == 1 and "older checkpoints" in told[0] and "Input/output error" in told[0]
    assert steps_of(tmp_path) == [3]


# ---- the end --------------------------------------------------------------------------------------------------------


# Once for both ranks, where each would import it: `left_open` is in this file.
IMPORTS = ("pytest", "shardwise.verify.preload", "shardwise.state.checkpoint", "state.runs", "seldom_collected")


def left_open(root: str, how: str) -> str:
    """A script that saves in the background, slowly, and does not close its manager."""
    import time

    real = writer.pwrite
    writer.pwrite = lambda *args: (time.sleep(0.1), real(*args))[1]
    if how == "fails":

        def fails(*args):
            raise OSError(28, "No space left on device")

        writer.pwrite = fails
    world = sw.init("dp_shard=2", device="cpu")
    model = sw.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), world, sharding=EVERY)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sw.CheckpointManager(root, step).save()
    if how == "world":
        world.close()
    return "done"


@pytest.mark.parametrize("how", [pytest.param("world", marks=pytest.mark.soak), "nothing"])
@pytest.mark.soak
def test_a_save_in_the_background_is_finished_though_nobody_closes_the_manager(tmp_path, how):
    assert launch_local(f"{__file__}:left_open", nproc=2, args=(str(tmp_path), how), timeout_s=60) == ["done", "done"]
    assert json.loads((tmp_path / "latest" / "manifest.json").read_text())["step"] == 0


def test_a_save_that_failed_is_told_though_nobody_closes_the_manager(tmp_path):
    lines: list[str] = []
    launch_local(
        f"{__file__}:left_open", nproc=2, args=(str(tmp_path), "fails"), timeout_s=60, preload=IMPORTS,
        on_line=lambda rank, stream, line: lines.append(line),
    )  # fmt: skip
    assert any("the last checkpoint was not written" in line for line in lines), lines
    assert not list(tmp_path.glob("*step-*"))
