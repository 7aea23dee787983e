"""A second sharded model in ``extra``, as an exponential moving average is kept: saved, resumed and opened as the first is."""

import json
import shutil
import warnings

import pytest
import torch
from models.drops import Drops
from safetensors.torch import load_file
from state.runs import EVERY, Texts, equal, make, state

import shardwise as sw
from shardwise.cli import main as cli

PLACES = {
    "fsdp-2": ("dp_shard=2", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "ddp-2": ("dp_replicate=2", 2),
    "one": ("", 1),
}


def averaged(layout, root, until, save_at=(), *, batch=4, average=True, dtype=torch.float64, **options):
    """Trains with an average of the weights beside; its state at the beginning and at the end, and the run's."""
    world, model, step = make(layout or "dp_shard=1", dtype)
    found = {}
    with world:
        torch.manual_seed(world.rank)  # of the average nothing is to come but from the checkpoint
        ema = sw.parallelize(Drops().to(dtype), world, sharding=EVERY)
        extra = {"ema": ema} if average else {}
        with sw.CheckpointManager(root, step, extra=extra, **options) as manager:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                windows = manager.resume(sw.Loader(Texts(), world, global_batch=batch, micro_batch=1))
            found["warnings"] = [str(w.message) for w in caught]
            found["began"], found["first"] = step.num_steps, sw.full_state_dict(ema)
            for window in windows if step.num_steps < until else ():
                step(window)
                with torch.no_grad():
                    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.25)
                if step.num_steps in save_at:
                    manager.save()
                if step.num_steps == until:
                    break
        found["last"], found["run"] = sw.full_state_dict(ema), state(model, step.optim)
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A directory with the checkpoints of steps 2 and 3, and the run that wrote them."""
    root = tmp_path_factory.mktemp("average")
    return root, ranks.run(averaged, 2, "dp_shard=2", root, 3, (2, 3), keep=None)[0]


@pytest.mark.parametrize("place", PLACES)
def test_an_average_is_resumed_to_the_last_bit_under_any_layout(ranks, saved, place):
    root, wrote = saved
    layout, num_ranks = PLACES[place]
    again = ranks.run(averaged, num_ranks, layout, root, 3, async_save=False)[0]
    assert again["began"] == 3
    assert equal(again["first"], wrote["last"]) and equal(again["run"], wrote["run"])
    assert not equal(wrote["last"], wrote["run"][0])  # it is no copy of the model


@pytest.mark.quick("async")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_run_with_an_average_goes_on_as_if_nobody_had_stopped_it(ranks, tmp_path, async_save):
    options = {"batch": 2, "dtype": torch.float32, "async_save": async_save}
    whole = ranks.run(averaged, 2, "dp_shard=2", tmp_path / "whole", 5, **options)[0]
    ranks.run(averaged, 2, "dp_shard=2", tmp_path / "run", 2, (2,), **options)
    rest = ranks.run(averaged, 2, "dp_shard=2", tmp_path / "run", 5, **options)[0]
    assert rest["began"] == 2 and equal(rest["last"], whole["last"]) and equal(rest["run"], whole["run"])


def test_the_weights_of_an_average_are_a_plain_model_directory(saved, capsys):
    root, wrote = saved
    weights = load_file(root / "step-00000003" / "extra" / "ema" / "model.safetensors")
    assert set(wrote["last"]) - set(weights) == {"head.weight"}  # tied
    assert all(torch.equal(weights[name], wrote["last"][name]) for name in weights)
    assert cli.main(["checkpoint", "show", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra"] == ["ema"]


def told(layout, root, names):
    """The error, or the warnings, of resuming with objects of these names in ``extra``."""
    world, _, step = make(layout)
    with world:
        models = {name: sw.parallelize(Drops().double(), world, sharding=EVERY) for name in names}
        before = {name: sw.full_state_dict(model) for name, model in models.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with sw.CheckpointManager(root, step, extra=models) as manager:
                    manager.load()
            except sw.CheckpointError as error:
                assert step.num_steps == 0 and equal(before, {n: sw.full_state_dict(m) for n, m in models.items()})
                return str(error)
        return [str(w.message) for w in caught]


def test_an_average_that_is_not_there_or_that_nobody_takes_is_told(ranks, saved, tmp_path):
    root, _ = saved
    assert ranks.run(told, 2, "dp_shard=2", root, ())[0] == ["extra['ema'] is in the checkpoint, and nothing takes it"]
    for error in ranks.run(told, 2, "dp_shard=2", root, ("ema", "other")):
        assert "a checkpoint without extra['other']" in error and "it was saved with ema" in error
    ranks.run(averaged, 2, "dp_shard=2", tmp_path, 1, (1,), average=False)
    for error in ranks.run(told, 2, "dp_shard=2", tmp_path, ("ema",)):
        assert "a checkpoint without extra['ema']" in error and "no extra objects" in error


def test_a_flipped_bit_in_the_weights_of_an_average_is_found(ranks, saved, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(saved[0], root, symlinks=True)
    path = root / "step-00000003" / "extra" / "ema" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)
    again = ranks.run(averaged, 1, "", root, 2, async_save=False)[0]
    assert again["began"] == 2
    assert "step-00000003/extra/ema/model.safetensors" in " ".join(again["warnings"])
