"""What a block writes into a list, dict or object that it is given is the caller's, and has its gradients.

Containers were made anew on the way into a unit, a block that runs again, or a model that casts its inputs: an auxiliary loss
that a mixture of experts notes in a dict was lost without an error."""

import pytest
from techniques.data.containers import BUILDS, after_an_error, collected, count, loss, windows

import shardwise as sw

UNITS = sw.Sharding(min_unit_bytes=0)
RUNS = {
    "units": ("dp_shard=2", 2, {"sharding": UNITS}),
    "remat": ("dp_replicate=2", 2, {"remat": "full"}),
    "both": ("dp_shard=2", 2, {"sharding": UNITS, "remat": "selective"}),
    "compiled": ("dp_shard=2", 2, {"sharding": UNITS, "compile": sw.Compile(backend="eager")}),
    "alone": ("dp_shard=1", 1, {"remat": "full"}),
}
QUICK = {
    ("list", "units"),
    ("dict", "both"),
    ("dataclass", "units"),
    ("list in a dict", "alone"),
    ("nothing returned", "units"),
    ("list in a keyword", "remat"),
    ("list in a tuple", "both"),
}


@pytest.mark.quick("dataclass-units", "dict-both", "list in a keyword-remat", "nothing returned-units")
@pytest.mark.parametrize(
    ("kind", "run"),
    [
        pytest.param(kind, run, marks=() if (kind, run) in QUICK else pytest.mark.soak)
        for kind in BUILDS
        for run in RUNS
        if kind != "nothing returned" or run in ("units", "compiled")
    ],
)
def test_what_a_block_leaves_in_it_is_an_output(ranks, kind, run):
    layout, size, options = RUNS[run]
    report = sw.verify(
        BUILDS[kind], layout, batches=windows(2 * size + 1), loss=loss, count=count, run=ranks.run, **options
    )
    assert report


def test_the_caller_of_a_model_gets_it(ranks):
    for options, dtype in (({}, "float32"), ({"precision": "bf16"}, "bfloat16"), ({"sharding": UNITS}, "float32")):
        assert ranks.run(collected, 1, **options)[0] == (["torch.float32", f"torch.{dtype}"], True)


def test_after_an_error_it_has_the_caller_s_own_tensors(ranks):
    for options in ({"precision": "bf16"}, {"sharding": sw.Sharding(engine="fsdp2", min_unit_bytes=0)}):
        assert ranks.run(after_an_error, 1, **options)[0] == (True, (2, 4))
