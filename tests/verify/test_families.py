"""Every family of transformers in the table: the numbers of one process, and the constructor's values, under every layout.

All of it is soak: each rank must import a family's code, and most take seconds."""

import functools

import pytest
from families import FAMILIES, PARITY_LAYOUTS, constructed, seeded_values, unlike
from matrix import LAYOUTS
from parallel.on_ranks import same, whole

pytestmark = pytest.mark.timeout(300)


def _compare(ranks, name: str, layout: str) -> None:
    report = FAMILIES[name].compare(ranks.run, layout)
    assert report.num_steps == 3
    counts = report.collectives
    assert (report.engine == "ddp") == (layout == "ddp-2")
    if report.engine == "ddp":
        assert counts.get("allreduce", 0) >= 3 and "_reduce_scatter_base" not in counts
    else:
        assert counts["_reduce_scatter_base"] >= 1
        assert max(report.bytes_per_rank) < sum(report.bytes_per_rank)


@pytest.mark.soak
@pytest.mark.parametrize("layout", PARITY_LAYOUTS)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_family_equals_one_process_under_every_layout(ranks, name, layout):
    _compare(ranks, name, layout)


@functools.cache
def _constructors(name: str):
    return constructed(FAMILIES[name].case.build, 0), constructed(FAMILIES[name].case.build, 1)


def _values(ranks, name: str, layout: str):
    text, num_ranks, engine = LAYOUTS[layout]
    answers = ranks.run(seeded_values, num_ranks, name, text, engine, timeout_s=100)
    shapes = {key: tuple(tensor.shape) for key, tensor in _constructors(name)[0].items()}
    return whole([held for held, *_ in answers], shapes), answers[0][2]


@pytest.mark.soak
@pytest.mark.parametrize("name", list(FAMILIES))
def test_family_starts_from_the_same_values_under_every_layout_and_they_are_the_constructors(ranks, name):
    alone, told = _values(ranks, name, "one")
    assert not told, told  # seeded: nothing fell back to rank 0
    for layout in ("fsdp-2", "ddp-2"):
        assert same(alone, _values(ranks, name, layout)[0]), layout
    assert unlike(alone, *_constructors(name)) == []


def test_values_that_differ_from_the_constructors_are_told():
    first, second = _constructors("mistral")
    assert unlike(first, first, second) == []
    name, table = "model.layers.0.self_attn.q_proj.weight", "model.rotary_emb.inv_freq"
    wrong = {**first, name: first[name] * 3.6, table: first[table] * 2}  # a Linear's own spread; a table left alone
    told = unlike(wrong, first, second)
    assert any(text.startswith(f"{name}: std") for text in told)
    assert f"{table}: not the constant of the constructor" in told
