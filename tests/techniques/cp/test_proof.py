"""The proof on rows: what it accepts, what it names, and that no other plan passes."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from techniques.cp.sequences import PROVED, REFUSED, batch, build

from shardwise.model.positions import Differs, run_on_rows
from shardwise.model.rows import most_rows, rows_of
from shardwise.techniques.cp.search import Search, sequences_in


def searched(name, degree=2, order="zigzag", heads_over=1, fallback=False):
    """The search for a model, and what it found."""
    inputs = {key: value for key, value in batch(1, 24, name).items() if key != "labels"}
    search = Search(
        build(name, torch.float32), next(sequences_in(((), inputs))), degree, order, heads_over, fallback=fallback
    )
    return search, search.run()


@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from(["zigzag", "contiguous"]))
def test_rows_tile_every_length(length, degree, order):
    parts = rows_of(length, degree, order)
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert len(parts) == degree and max(map(len, parts)) <= most_rows(length, degree, order)


def test_zigzag_gives_each_rank_as_many_keys_under_a_causal_mask():
    keys = [float((rows + 1).sum()) for rows in rows_of(4096, 4, "zigzag")]
    assert max(keys) == min(keys)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", PROVED)
def test_what_is_proved(name, degree):
    _, facts = searched(name, degree)
    assert not facts.islands and len(facts.attention) == 2
    assert facts.output == ("whole" if name == "pooled" else "rows") == ("rows" if not facts.join else "whole")
    made = {
        "rotary": [["arange", 0, 0]],
        "rows of a table": [["getitem", 0, 0], ["narrow", 0, 0]],
    }
    assert facts.positions == ({f"blocks.{i}.attention": made[name] for i in (0, 1)} if name in made else {})


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_named_or_runs_whole(name, degree):
    with pytest.raises(Differs) as raised:
        searched(name, degree)
    assert (
        raised.value.name.replace("blocks.1", "blocks.0") == REFUSED[name][0]
    )  # of 17 tokens the best half may be the same by chance
    _, facts = searched(name, degree, fallback=True)
    assert facts.islands and facts.output == "rows"


@pytest.mark.parametrize("name", ["plain", "packed", "grouped", "kernel"])
def test_attention_by_heads_is_proved_too(name):
    _, facts = searched(name, 2, "contiguous", heads_over=2)
    assert len(facts.attention) == 2


def test_heads_that_ranks_cannot_share_are_named():
    with pytest.raises(Differs, match="4 and 2 heads of queries and of keys, which 4 does not divide") as raised:
        searched("grouped", 4, "contiguous", heads_over=4, fallback=True)
    assert raised.value.is_of_heads


# ---- breaks of a plan ------------------------------------------------------------------------------------------------


def broken(facts):
    """Facts with one fault each, and a name for it."""
    for key in ("cut", "join"):
        for module, dims in getattr(facts, key).items():
            for path, dim in dims.items():
                yield f"{key} of {module}{path} dropped", key, module, {p: d for p, d in dims.items() if p != path}
                yield (
                    f"{key} of {module}{path} along another dim",
                    key,
                    module,
                    {**dims, path: 1 - dim if dim < 2 else 0},
                )
    for module, calls in facts.positions.items():
        for i, (kind, number, argument) in enumerate(calls):
            yield f"{kind} of {module} dropped", "positions", module, [*calls[:i], *calls[i + 1 :]]
            for other in (number + 1, number + 7):
                changed = [*calls[:i], [kind, other, argument], *calls[i + 1 :]]
                yield f"{kind} {other} of {module}", "positions", module, changed
    for module in facts.attention:
        yield f"attention of {module} to its own rows", "attention", module, []
        yield f"attention 1 of {module}", "attention", module, [1]


@pytest.mark.parametrize("name", PROVED)
def test_no_broken_plan_passes(name):
    search, facts = searched(name)
    trial, whole = search.trial, search.whole
    length, plan = search.length, search.plan
    parts = rows_of(length, 2, "zigzag")
    assert [run_on_rows(trial, whole, plan, length, rows, facts) for rows in parts] == [facts, facts]
    faults = list(broken(facts))
    for what, key, module, value in faults:
        wrong = copy.deepcopy(facts)
        getattr(wrong, key)[module] = value
        with pytest.raises(Differs):
            for rows in parts:
                if run_on_rows(trial, whole, plan, length, rows, wrong) != wrong:
                    raise Differs(module, f"{what}: it does not follow the plan")
    assert len(faults) >= 6
