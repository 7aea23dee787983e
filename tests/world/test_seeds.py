"""A seed that a script gives torch before ``sw.init`` is lost: said once, with the line that keeps it. And a world of one process that stands for
a rank of many."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.testing import RankPool


def started(before, given):
    """What is said on this rank, and torch's numbers afterwards."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if before is not None:
            torch.manual_seed(before)
        with sw.init("dp_shard=-1", device="cpu", timeout_s=30, **given):
            drawn = torch.rand(3)
        with sw.init("dp_shard=-1", device="cpu", timeout_s=30, **given):  # after one of ours
            pass
        return [str(w.message) for w in seen if "torch was seeded" in str(w.message)], drawn


@pytest.mark.parametrize("before", [7, 1234, 2**32 - 1])  # 0 is what the worlds of other tests have set
def test_a_seed_from_before_is_named_once_with_what_keeps_it(ranks: RankPool, before):
    (told, _), (other, _) = ranks.run(started, 2, before, {})
    assert len(told) == 1 and not other
    assert f"torch was seeded ({before})" in told[0] and f"sw.init(seed={before})" in told[0]
    assert [each for each, _ in ranks.run(started, 2, before, {"seed": before})] == [[], []]


def test_done_as_it_says_the_numbers_are_those_of_the_seed(ranks: RankPool):
    torch.manual_seed(1234)
    assert torch.equal(ranks.run(started, 2, 1234, {"seed": 1234})[0][1], torch.rand(3))


def test_torchs_own_first_seed_is_nobodys(ranks: RankPool):
    """In a process in which nothing was seeded."""
    script = "import shardwise as sw\nwith sw.init(device='cpu'): pass\nwith sw.init('dp_shard=1', seed=5): pass\nwith sw.init(): pass"
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_one_process_goes_on_as_the_seed_of_sw_init_gives():
    """torch.manual_seed(0) as a first line, and sw.init(), which takes 0: nothing to say."""
    script = (
        "import torch, shardwise as sw\ntorch.manual_seed(0)\nwith sw.init(device='cpu'): print(torch.rand(1).item())"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    torch.manual_seed(0)
    assert done.returncode == 0 and float(done.stdout) == torch.rand(1).item(), done.stderr


# ---- one process as a rank of many ---------------------------------------------------------------------------------------


def imagined(environ, layout):
    os.environ.update(environ)
    try:
        with sw.init(layout, device="cpu", backend="fake") as world:
            model = sw.parallelize(torch.nn.Linear(6, 16), world)
            return world.rank, world.size, tuple(model.weight.to_local().shape)
    finally:
        for name in environ:
            del os.environ[name]


def test_a_layout_or_the_environment_says_how_many_ranks_there_are(ranks: RankPool):
    assert ranks.run(imagined, 1, {}, "dp_shard=8") == [(0, 8, (2, 6))]
    assert ranks.run(imagined, 1, {}, {"dp_replicate": 2, "dp_shard": 4}) == [(0, 8, (4, 6))]
    assert ranks.run(imagined, 1, {"RANK": "3", "WORLD_SIZE": "4"}, "dp_shard=-1") == [(3, 4, (4, 6))]


def test_without_a_number_it_is_refused():
    assert "WORLD_SIZE" not in os.environ
    with pytest.raises(ConfigError) as caught:
        sw.init("dp_shard=-1", device="cpu", backend="fake")
    assert "without a number of ranks" in caught.value.given and "WORLD_SIZE" in caught.value.fix


def saved(what, root):
    with sw.init("dp_shard=4", device="cpu", backend="fake") as world:
        model = sw.parallelize(torch.nn.Linear(6, 16), world)
        step = sw.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, _: out.sum(), count=len
        )
        try:
            if what == "weights":
                sw.save_weights(model, root)
            else:
                with sw.CheckpointManager(root, step, keep=1) as manager:
                    manager.save() if what == "save" else manager.save_every(1)
        except sw.UsageError as error:
            return str(error), repr(world)
        return "", ""


@pytest.mark.parametrize("what", ["weights", "save", "save_every"])
def test_a_rank_without_the_others_saves_nothing_over_what_is_there(ranks: RankPool, tmp_path, what):
    (text, shown), *_ = ranks.run(saved, 1, what, str(tmp_path))
    assert 'with backend="fake"' in text and "3 of 4 ranks do not exist" in text and 'backend="fake"' in shown
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]
