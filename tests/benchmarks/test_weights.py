"""The benchmark of weights runs, compares what comes out, and its claims about memory hold on a model of some size."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load():
    if "weights_benchmark" not in sys.modules:
        spec = importlib.util.spec_from_file_location("weights_benchmark", ROOT / "benchmarks" / "weights.py")
        sys.modules["weights_benchmark"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["weights_benchmark"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("weights") / "model"
    path.mkdir()
    torch.manual_seed(0)
    save_file(load().build(48).state_dict(), path / "model.safetensors")
    return path


def call(what, *given):
    return getattr(load(), what)(*given)


def contenders(kind):
    """Those of another environment alone do the same as one of the others."""
    names = [name for name in getattr(load(), kind) if name not in load().ENVIRONMENTS]
    return [name for name in names if "accelerate" not in name or importlib.util.find_spec("accelerate")]


@pytest.mark.soak
def test_all_ways_to_load_give_the_same_shards_and_ours_holds_a_shard_and_sends_nothing(ranks, folder):
    found = {name: ranks.run(call, 2, "run_load", name, 48, str(folder), True) for name in contenders("LOADERS")}
    ours, *others = found.values()
    assert all([a["digest"] for a in answers] == [a["digest"] for a in ours] for answers in others)
    assert all(answer["wire"] == 0 for answer in ours) and others[1][0]["wire"] == 0 < others[2][0]["wire"]
    assert all(answer["memory"] < 1.2 for answer in ours), "an eighth of a MiB of Python counts here"
    timed = ranks.run(call, 2, "run_load", "Shardwise `load_weights`", 48, str(folder), False)
    assert all(answer["seconds"] > 0 < answer["again"] for answer in timed)


@pytest.mark.soak
def test_all_ways_to_gather_give_the_same_tensors_and_the_other_ranks_hold_nothing(ranks, folder):
    found = {name: ranks.run(call, 2, "run_gather", name, 48, str(folder), True) for name in contenders("GATHERERS")}
    ours, *others = found.values()
    assert all(answers[0]["digest"] == ours[0]["digest"] for answers in others)
    assert len(ours[0]["digest"]) > 10 and ours[1]["digest"] == {}
    assert ours[0]["memory"] > 0.5 and ours[1]["memory"] < 0.1
    timed = ranks.run(call, 2, "run_gather", "Shardwise `full_state_dict`", 48, str(folder), False)
    assert all(answer["seconds"] > 0 < answer["again"] for answer in timed)


@pytest.mark.soak
def test_all_ways_to_save_give_the_same_files_and_ours_gathers_nothing(ranks, folder, tmp_path):
    digests = []
    for number, name in enumerate(contenders("SAVERS")):
        answers = ranks.run(call, 2, "run_save", name, 48, str(folder), str(tmp_path / str(number)), True)
        digests.append(load()._digest(iter(load()._whole_files(str(tmp_path / str(number))).items())))
        if number == 0:
            assert all(answer["memory"] < 0.1 for answer in answers)
            (timed, _) = ranks.run(call, 2, "run_save", name, 48, str(folder), str(tmp_path / "timed"), False)
            assert timed["seconds"] > 0
    assert all(digest == digests[0] for digest in digests)


def test_a_result_that_differs_is_not_put_into_a_table():
    with pytest.raises(AssertionError, match="theirs gives other values than ours"):
        load()._assert_equal({"ours": {"w": [[2], 1]}, "theirs": {"w": [[2], 2]}})
    load()._assert_equal({"ours": 1, "theirs": 1})


def test_each_time_is_told_as_what_ours_takes_of_it():
    rows = {"ours": {"seconds": 1.0, "again": 0.3}, "theirs": {"seconds": 2.0, "again": 0.4}}
    columns = {"seconds": "time", "again": "in use"}
    assert load().table(rows, "load", columns).splitlines()[-1] == "| theirs | 2.00 s | 0.40 s | 0.50 | 0.75 |"
