"""Calls that ended in an error of Python, or of another call, are answered by name; what the answer says is done."""

import errno
import threading
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.state.checkpoint.saves import Saves

pytestmark = [pytest.mark.timeout(60)]
X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
BATCH = {"x": X}


def square(output: Tensor, _batch: Any) -> Tensor:
    return output.square().sum()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()


@pytest.fixture
def world():
    with sw.init("dp_shard=-1", device="cpu") as world:
        yield world


# ---- several optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["TrainStep", "local", "unscale", "state", "load", "manager", "own step"])
def test_several_optimizers_are_answered_by_each_call(world, tmp_path, call):
    """AttributeError: 'list' object has no attribute 'param_groups'."""
    model = sw.parallelize(build(), world)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    both = [first, second]

    class Own:
        def __init__(self):
            self.model, self.optim = model, both
            self.state_dict = self.load_state_dict = self.check_state_dict = print

    calls = {
        "TrainStep": lambda: sw.TrainStep(model, both),
        "local": lambda: sw.local_optimizer(both),
        "unscale": lambda: sw.unscale_gradients_(model, both, torch.amp.GradScaler("cpu")),
        "state": lambda: sw.full_optimizer_state_dict(model, both),
        "load": lambda: sw.load_full_optimizer_state_dict(model, both, {}),
        "manager": lambda: sw.CheckpointManager(tmp_path, optimizer=both),
        "own step": lambda: sw.CheckpointManager(tmp_path, Own()),
    }
    with pytest.raises(sw.ShardwiseError) as told:
        calls[call]()
    assert "extra={'second': second}" in told.value.fix
    if call != "TrainStep":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that the first does not have
        step = sw.TrainStep(model, first, loss=square, count=len)
    with sw.CheckpointManager(tmp_path, step, extra={"second": second}) as saved:
        for _ in range(2):
            with sw.window(model, [BATCH], count=len) as w:
                for batch in w:
                    square(model(batch["x"]), batch).backward()
            for optim in both:
                optim.step()
                optim.zero_grad()
        saved.save()
    plain = build()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        square(plain(X), BATCH).backward()
        optim.step()
        optim.zero_grad()
    for name, value in sw.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-13)


def test_what_is_no_optimizer_is_named(world):
    model = sw.parallelize(build(), world)
    for wrong in (None, "adam", torch.optim.SGD):
        with pytest.raises(sw.UsageError, match=r"in place of an optimizer") as told:
            sw.full_optimizer_state_dict(model, wrong)
        assert "torch.optim.AdamW(model.parameters()" in told.value.fix


# ---- an evaluation beside training ------------------------------------------------------------------------------------


def test_an_evaluation_in_a_thread_beside_training_is_refused(world):
    """It was a RankError about different exchanges, or gloo ended the rank."""
    model = sw.parallelize(build(), world)
    told: list[Any] = []

    def evaluate() -> None:
        try:
            told.append(sw.evaluate(model, [BATCH], loss=square, count=len))
        except sw.UsageError as error:
            told.append(error)

    def in_thread() -> None:
        thread = threading.Thread(target=evaluate, name="beside")
        thread.start()
        thread.join()

    with sw.window(model, [BATCH], count=len) as w:
        in_thread()
        for batch in w:
            square(model(batch["x"]), batch).backward()
    in_thread()  # one after the other
    refused, done = told
    assert (
        "sw.evaluate in the thread 'beside', while a window of the same model runs in the thread 'MainThread'"
        in refused.given
    )
    assert done["loss"] > 0
    with pytest.raises(sw.ShardwiseError), sw.window(model, [{"x": 3}], count=len) as w:
        pass
    in_thread()  # a window that did not begin holds nothing
    assert told[-1] == done


# ---- a spectral norm --------------------------------------------------------------------------------------------------


def warned(layout: str) -> list[str]:
    with sw.init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = nn.utils.parametrizations.spectral_norm
        sw.parallelize(nn.Sequential(made(nn.Linear(4, 4)), made(nn.Linear(4, 4))), world)
        return [str(w.message) for w in caught if "spectral norm" in str(w.message)]


@pytest.mark.parametrize(("layout", "num"), [("dp_shard=2", 1), ("dp_replicate=2", 1)])
def test_a_spectral_norm_over_data_ranks_is_warned_of(ranks, layout, num):
    """Only describe said that numbers depend on the number of ranks."""
    first, other = ranks.run(warned, 2, layout)
    assert len(first) == num and not other and first[0].startswith("0: warning: the power iteration"), first
    assert ranks.run(warned, 1, layout.replace("2", "1")) == [[]]


# ---- a task under tp ---------------------------------------------------------------------------------------------------


def task() -> sw.TaskModel:
    return sw.TaskModel(build(), lambda output, batch: (output - batch["labels"]).square().sum())


def trained_task(layout: str) -> tuple:
    batch = {"x": X, "labels": X + 1}
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        said = None
        if "tp" in layout:
            with pytest.raises(sw.UsageError) as told:
                sw.parallelize(task(), world)
            said = told.value.fix
        model = sw.parallelize(task(), world, example=batch)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=None, count=len)
        step([batch])
        cut = [name for name, param in sw.recipe_of(model).params.items() if param.cuts]
        return said, cut, sw.full_state_dict(model)


@pytest.mark.parametrize("layout", ["tp=2", "dp_shard=2"])
def test_a_task_takes_a_batch_as_its_example(ranks, layout):
    """example= was given to the task's forward by names, or was a mapping that had no tensors: no example could be given."""
    said, cut, state = ranks.run(trained_task, 2, layout)[0]
    if layout == "tp=2":
        assert "example=batch" in said and "model.0.weight" in cut
    plain = task()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    (plain({"x": X, "labels": X + 1}) / 2).backward()
    optim.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13)


# ---- buffers, figures, and where a warning points ----------------------------------------------------------------------


@pytest.mark.parametrize("given", ["sum", {"count": "summ"}, ["count"]], ids=str)
def test_wrong_words_for_buffers_show_the_mapping_and_its_words(given):
    with pytest.raises(sw.ConfigError) as told:
        sw.Sharding(buffers=given)
    assert "{'name': word}, each word one of 'sum', 'mean', 'min', 'max', 'rank0', 'own'" in told.value.fix
    sw.Sharding(buffers={"count": "sum"})


def test_figures_for_the_best_checkpoint_can_be_given_to_save_every(world, tmp_path):
    model = sw.parallelize(build(), world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, count=len)
    with sw.CheckpointManager(tmp_path, step, best="val_loss") as saved:
        out = step([BATCH])
        with pytest.raises(sw.ConfigError, match="a save without val_loss") as told:
            saved.save_every(1, out)
        assert "save_every(n, out, metrics={'val_loss': value})" in told.value.fix
        assert saved.save_every(1, out, metrics={"val_loss": 0.5}) is not None


def manager_of(world: sw.World, root: Path, **options: Any) -> sw.CheckpointManager:
    model = sw.parallelize(build(), world)
    return sw.CheckpointManager(
        root, sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, count=len), **options
    )


def test_a_loop_that_gives_no_figures_is_warned_at_its_first_step_and_loses_nothing(world, tmp_path):
    """It trained up to its first save, which was an error: nothing was on disk."""
    with manager_of(world, tmp_path, best="loss") as saved:
        out = saved.step([BATCH])
        with pytest.warns(UserWarning, match=r"best='loss', and this save_every\(2\) is given no figures") as told:
            assert saved.save_every(2) is None
        assert told[0].filename == __file__ and "save_every(2, out)" in str(told[0].message)
        out = saved.step([BATCH])
        with pytest.raises(sw.ConfigError, match="a save without loss") as error:
            saved.save_every(2)  # warned of once
        assert error.value.__notes__ == [
            "the checkpoint of step 2 is on disk, as the newest: a run can be resumed from it"
        ]
    with manager_of(world, tmp_path, best="loss") as saved:
        assert saved.load() == 2
        assert saved.save_every(2, out) is not None  # as the fix says, without a warning


@pytest.mark.parametrize(
    "loop", [lambda saved, out: saved.save_every(2, out), lambda saved, out: saved.save_every(None)]
)
def test_a_loop_whose_figures_may_come_later_is_not_warned(world, tmp_path, loop):
    with manager_of(world, tmp_path, best="val_loss") as saved:
        loop(saved, saved.step([BATCH]))


def test_a_nan_is_never_the_best_and_is_warned_of_once(world, tmp_path):
    with manager_of(world, tmp_path, best="val_loss", keep=1) as saved:
        for value, warned in ((0.5, False), (float("nan"), True), (0.7, False), (float("nan"), False)):
            saved.step([BATCH])
            with pytest.warns(UserWarning, match="a NaN, at step 2, is never the best") if warned else nullcontext():
                saved.save(metrics={"val_loss": value})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000004"]


WRONG_SAVES = {
    "save(model)": (lambda saved, out: saved.save(saved.step.model), "save() saves the model"),
    "save(path)": (lambda saved, out: saved.save("run.pt"), "save() saves the model"),
    "save(model=)": (lambda saved, out: saved.save(model=saved.step.model), "save() saves the model"),
    "save(metrics=loss)": (lambda saved, out: saved.save(metrics=out.loss), "metrics={'val_loss': 0.25}"),
    "save_every(n, model)": (lambda saved, out: saved.save_every(1, saved.step.model), "manager.save_every(100, out)"),
    "save_every(n, loss)": (
        lambda saved, out: saved.save_every(1, out.loss),
        "save_every(100, metrics={'loss': value})",
    ),
    "resume()": (lambda saved, out: saved.resume(), "manager.load()"),
    "load(path)": (lambda saved, out: saved.load("runs/a"), "load(step=100)"),
}


@pytest.mark.parametrize("given", WRONG_SAVES)
def test_wrong_objects_for_calls_of_a_checkpoint_manager_are_answered(world, tmp_path, given):
    """Raw TypeErrors and AttributeErrors, and a number for metrics= passed without a word."""
    call, fix = WRONG_SAVES[given]
    with manager_of(world, tmp_path) as saved:
        out = saved.step([BATCH])
        with pytest.raises(sw.ConfigError) as told:
            call(saved, out)
        assert fix in told.value.fix and "2 positional" not in told.value.given
        saved.save(metrics={"val_loss": 0.25})
        assert saved.save_every(100, out) is None and saved.save_every(100, metrics={"loss": out.loss}) is None
        assert saved.load() == 1


def test_a_save_that_finds_the_disk_full_says_that_the_run_stops(world, tmp_path, monkeypatch):
    """The error came with lines of concurrent.futures, and no word that the run ends."""
    model = sw.parallelize(build(), world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, count=len)

    def full(*_: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise sw.CheckpointError("a checkpoint", why="No space left on device", fix="make room") from error

    with sw.CheckpointManager(tmp_path, step) as saved:
        step([BATCH])
        with monkeypatch.context() as patched:
            patched.setattr(Saves, "_write", full)
            saved.save()
            with pytest.raises(sw.CheckpointError) as told:
                saved.wait()
        text = "".join(traceback.format_exception(told.value))
        assert "concurrent" not in text and "No space left on device" in text
        assert "the run stops here unless this error is caught" in text
        saved.save()  # once there is room


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += int(x.sum() > -100)
        return self.layer(x)


def places(layout: str) -> list[str]:
    with sw.init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sw.parallelize(Counts(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, count=len)
        step([BATCH])
        return [Path(w.filename).name for w in caught if "forwards of this rank only" in str(w.message)]


def test_a_warning_about_what_forwards_write_points_to_the_users_line(ranks):
    assert ranks.run(places, 2, "dp_replicate=2")[0] == [Path(__file__).name]
