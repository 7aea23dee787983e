"""Loss, every gradient, the norm and every updated parameter equal those of one plain process, in float64."""

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
from layouts import MATRIX
from verify.faults import FAULTS, run_with_fault
from verify.matrix import DEFAULT_UNIT, KINDS, Cell, all_cells, sample_cells

from shardwise.errors import ConfigError, RankError, VerifyError

pytestmark = pytest.mark.timeout(180)


def _parity(ranks, cell: Cell, run=None, **changes) -> None:
    """The one parity test: the sample, the whole matrix and the faults all go through it."""
    report = cell.run(run or ranks.run, **changes)
    cell.assert_sharded(report)
    assert report.num_steps == 3


@pytest.mark.quick(
    "reference-ddp-2-acc1-noclip-default",
    "reference-fsdp-4-acc3-clip-default",
    "reference-hsdp-2x2-acc1-clip-blocks",
    "conv-fsdp-2-acc1-noclip-blocks",
    "recurrent-ddp-2-acc1-clip-default",
    "odd-ddp-4-acc1-noclip-blocks",
    "odd-fsdp-2-acc3-clip-blocks",
    "odd-one-acc1-clip-default",
    "branches-fsdp-4-acc1-noclip-default",
    "branch-first-fsdp2-2x1-acc1-clip-blocks",
    "qwen3-fsdp2-2x1-acc3-clip-default",
    "t5-one-acc1-noclip-blocks",
)
@pytest.mark.parametrize("cell", list(sample_cells()), ids=str)
def test_sharded_equals_one_process(ranks, cell):
    _parity(ranks, cell)


@pytest.mark.soak
@pytest.mark.parametrize("cell", list(all_cells()), ids=str)
def test_sharded_equals_one_process_everywhere(ranks, cell):
    _parity(ranks, cell)


_IN_TURN = ("fsdp-2", "ddp-2")
_IN_FP32 = ("reference", "odd", "conv", "llama")  # the others in soak


@pytest.mark.quick("reference-fsdp-2", "odd-ddp-2")
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if case in _IN_FP32 and layout == _IN_TURN[i % 2] else pytest.mark.soak)
        for i, case in enumerate(models.select("matrix"))
        for layout in ("ddp-2", "fsdp-2", "hsdp-2x2")
    ],
)
def test_in_fp32_every_gradient_is_within_1e_5(ranks, case, layout):
    _parity(ranks, Cell(case, layout, 3, True, 0), dtype=torch.float32)


def test_five_parts_in_100_000_are_too_much_in_fp32(ranks):
    fault, case, layout = ("slightly_divided", "reference", "fsdp-2")
    faulty = functools.partial(_run_faulty, ranks, fault)
    with pytest.raises(VerifyError, match=r"error 4\.99.e-05, allowed 1e-05"):
        _parity(ranks, Cell(case, layout, 3, True, 0), run=faulty, dtype=torch.float32)


_ADAMW = (("reference", "fsdp-2"), ("odd", "ddp-2"), ("llama", "hsdp-2x2"))  # the other pairs in soak


@pytest.mark.quick("reference-fsdp-2", "odd-ddp-2")
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if (case, layout) in _ADAMW else pytest.mark.soak)
        for case in ("reference", "odd", "llama")
        for layout in ("ddp-2", "fsdp-2", "hsdp-2x2")
    ],
)
def test_adamw_equals_where_gradients_count(ranks, case, layout):
    _parity(ranks, Cell(case, layout, 3, True, 0), optimizer="adamw")


@pytest.mark.quick(
    "averaged-reference-fsdp-2", "local_norm-reference-fsdp-2", "stale_buffer-conv-ddp-2", "unused_as_zero-odd-fsdp-2"
)
@pytest.mark.parametrize(
    ("fault", "case", "layout"),
    [
        ("averaged", "reference", "fsdp-2"),
        pytest.param("averaged", "conv", "hsdp-2x2", marks=pytest.mark.soak),  # each fault once
        ("averaged_ddp", "reference", "ddp-2"),
        ("all_reduce_dropped", "reference", "hsdp-2x2"),
        ("local_norm", "reference", "fsdp-2"),
        pytest.param("mean_of_means", "reference", "fsdp-2", marks=pytest.mark.soak),
        ("mean_of_means", "gpt2", "ddp-2"),
        pytest.param("stale_buffer", "conv", "fsdp-2", marks=pytest.mark.soak),
        ("stale_buffer", "conv", "ddp-2"),
        ("whole_parameters_not_summed", "odd", "fsdp-2"),
        ("unused_as_zero", "odd", "fsdp-2"),
    ],
)
def test_the_same_test_turns_red_for_a_faulty_library_and_names_the_tensor(ranks, fault, case, layout):
    cell = Cell(case, layout, 3, True, 0)
    _be_green(ranks, cell)
    faulty = functools.partial(_run_faulty, ranks, fault)
    with pytest.raises(VerifyError) as caught:
        _parity(ranks, cell, run=faulty)
    module = models.get(case).build()
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    assert caught.value.name is not None and caught.value.name.split(" ")[0] in names


_green: set[Cell] = set()


def _be_green(ranks, cell: Cell) -> None:
    """As the library is, the cell is equal; seen once for all its faults."""
    if cell not in _green:
        _parity(ranks, cell)
        _green.add(cell)


def _run_faulty(ranks, fault, function, num_ranks, *args):
    assert function.__name__ == "run_sharded"
    return ranks.run(run_with_fault, num_ranks, fault, *args)


def test_the_sample_covers_every_pair():
    cells = list(sample_cells())
    kind_of = {layout: kind for kind, layouts in KINDS.items() for layout in layouts}
    assert set(kind_of) == set(MATRIX)
    values = [(c.case, kind_of[c.layout], c.layout, c.accumulate, c.clip, c.min_unit_bytes) for c in cells]
    domains = [list(models.select("matrix")), list(KINDS), list(MATRIX), [1, 3], [True, False], [0, DEFAULT_UNIT]]
    missing = [
        (a, b)
        for i in range(len(domains))
        for j in range(i)
        if {i, j} not in ({0, 2}, {1, 2})  # a model meets one layout of each kind
        for a in domains[i]
        for b in domains[j]
        if not any(v[i] == a and v[j] == b for v in values)
    ]
    assert not missing


def test_every_fault_is_tried():
    source = Path(__file__).read_text()
    assert all(f'("{name}"' in source for name in FAULTS)


def _verified():
    import shardwise as sw
    import shardwise.verify.compare

    sw.verify(1, 2, batches=[])  # type: ignore[arg-type]


def test_verify_is_the_function_whatever_was_imported_before(fresh_ranks):
    """Python puts an imported module under its name in the package: `sw.verify` could then not be called."""
    with pytest.raises(RankError) as caught:  # on a rank, where nobody has asked for it before
        fresh_ranks.run(_verified, 1)
    assert isinstance(caught.value.__cause__, ConfigError)


def test_an_element_that_adamw_moved_by_rounding_is_not_compared_later():
    """Its first step is like a sign: where the gradient was only rounding, what it did stays in the parameter."""
    compare = importlib.import_module("shardwise.verify.compare")
    task = SimpleNamespace(optimizer="adamw")
    grads = [torch.tensor([1.0, 1e-9, 1.0]), torch.tensor([1.0, 1.0, 1e-9]), torch.tensor([1.0, 1.0, 1.0])]
    steps = [SimpleNamespace(num_tokens=1, grads={"w": grad}, params={"w": torch.arange(3.0)}) for grad in grads]
    kept = [compare._comparable(task, {"w": torch.arange(3.0)}, steps[: i + 1])[0]["w"].tolist() for i in range(3)]
    assert kept == [[0.0, 2.0], [0.0], [0.0]]
