"""The benchmark of context parallelism counts what the page says, and that contenders compute the same."""

import pytest
from benchmarks.scripts import script


def kept(layout, method):
    return script("context").measure_kept(layout, method, 128)


def sent(layout, method, kv):
    return script("context").measure_sent(layout, method, kv)


def times(layout, method):
    return script("context").measure_times(layout, method, 64, 2, 2, 32)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_blocks_keep_their_share(ranks, cp):
    one = ranks.run(kept, 1, "dp_shard=1", "gather")[0]
    assert max(ranks.run(kept, cp, f"cp={cp}", "gather")) <= 1.03 / cp * one
    assert max(ranks.run(kept, cp, f"cp={cp}", "ulysses")) <= 1.08 / cp * one


@pytest.mark.parametrize(("method", "kv"), [("gather", 4), ("gather", 2), ("ulysses", 4), ("ulysses", 2)])
def test_what_is_sent_is_what_the_formula_says(ranks, method, kv):
    for num, told in ranks.run(sent, 2, "cp=2", method, kv):
        assert num == told > 0


@pytest.mark.soak
def test_its_tables(ranks):
    found = {name: ranks.run(times, 2, "cp=2", name)[0] for name in ("gather", "by hand")}
    assert "| gather |" in script("context").table({"one": 2, "two": 1}, {"one": 3.0}, {"gather": (3, 3)}, found)


@pytest.mark.soak
def test_the_proof_of_70b_parameters():
    assert "| an example of 4,096 positions |" in script("context").proof_table()
