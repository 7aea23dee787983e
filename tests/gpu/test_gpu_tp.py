"""Tensor parallelism on one CUDA device: the numbers of plain torch there, dropout drawn there, the loss without logits.

Two and four ranks share the device, over gloo. Collected with `make gpu`; see test_gpu.py.
"""

import os
import pathlib

import pytest
from techniques.tp.dropping import HEADS, HIDDEN, WIDTH

from shardwise.launch import launch_local

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]
MODELS = (
    "linears: kv-2", "linears: qkv-kv-1", "linears: slopes", "linears: tempered", "linears: lora", "linears: norm-of-width",
    "llama", "gpt2", "t5", "qwen3", "bloom",
)  # fmt: skip
ON_TWO = [
    *((name, "tp=2", {}) for name in MODELS),
    ("llama", "tp=2", {"remat": "full"}),
    ("linears: kv-2", "tp=2", {"compile": "blocks"}),
    ("llama", "tp=2", {"fused": True}),
    ("gpt2", "tp=2", {"fused": True}),
]
ON_FOUR = [("linears: kv-2", "tp=4", {}), ("gpt2", "dp_replicate=2,tp=2", {}), ("linears: kv-2", "dp_shard=2,tp=2", {})]


def results(cases: list, nproc: int) -> list[tuple]:
    """The results of all ranks, by case."""
    tests = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    device = os.environ.get("SHARDWISE_TEST_DEVICE", "cuda:0")  # the CPU, to try the tests themselves
    found = launch_local(
        "gpu.on_device:all_of", nproc=nproc, args=(cases, device), env={"PYTHONPATH": path}, timeout_s=380
    )
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(("nproc", "cells"), [(2, ON_TWO), (4, ON_FOUR)])
def test_the_numbers_of_plain_torch_on_the_device(nproc, cells):
    wrong = []
    for (name, layout, options), found in zip(
        cells,
        results([("beside_plain", (name, layout), options) for name, layout, options in cells], nproc),
        strict=True,
    ):
        most = 1e-10 if name.startswith("linears") else 1e-6  # norms of transformers compute in float32
        if not all(isinstance(of_rank, tuple) and of_rank[0] <= most and of_rank[1] < 0.85 for of_rank in found):
            wrong.append((name, layout, options, found))
    assert not wrong, "\n".join(map(str, wrong))


def test_what_ranks_send_and_compare():
    weights, over_ranks, said, fused = results(
        [("weights_out_and_in", ("tp=2",), {}), ("losses_over_ranks", (), {}), ("other_inputs", (), {}), ("fused_losses", ("tp=2",), {})],
        2,
    )  # fmt: skip
    assert weights == (True, True)
    assert max(over_ranks) <= 1e-12
    assert all("with other inputs in a forward" in text for text in said)
    for plain, without_logits in fused:
        assert without_logits == pytest.approx(plain, rel=2e-2)


def test_masks_are_equal_where_values_are_and_differ_where_parts_are():
    part, whole = {(2, HEADS // 2, 8, 8), (2, 8, HIDDEN // 2)}, {(2, 8, WIDTH)}
    runs, again = results([("masks", (), {}), ("masks", (), {"remat": "full"})], 2)
    one, other = runs
    assert {shape for shape, _ in one[0]} == part | whole
    for (shape, mask), (its_shape, its_mask) in zip(one[0], other[0], strict=True):
        assert shape == its_shape
        assert (mask == its_mask) == (shape in whole)
    everything = [str(mask) for found in (one, other) for shape, mask in found[0] if shape in part]
    assert len(set(everything)) == len(everything)
    assert one[1] == other[1]
    for plain, twice in zip(runs, again, strict=True):
        assert twice[1] == pytest.approx(plain[1], rel=1e-6)
        assert {str(mask) for _, mask in twice[0]} == {str(mask) for _, mask in plain[0]}
