"""Tensor parallelism beside the options of other techniques: the numbers are those of one process, or of one rank."""

import models
import pytest
from techniques.tp.halves import train

import shardwise as sw

NAMES = ("linears: kv-1", "qwen3", "vocabularies: tied, with a bias")
OPTIONS = {
    "offload": {"sharding": sw.Sharding(offload=True)},
    "offload, clipped by value": {"sharding": sw.Sharding(offload=True), "clip_grad_value": 0.01},
    "sums after every micro-batch": {"sharding": sw.Sharding(sync_every_microbatch=True)},
    "blocks recomputed": {"sharding": sw.Sharding(reshard_after_forward=False, min_unit_bytes=0), "remat": "full"},
    "blocks, without logits": {"sharding": sw.Sharding(min_unit_bytes=0), "fused": True},
}


@pytest.mark.quick("offload, clipped by value-qwen3", "sums after every micro-batch-vocabularies: tied, with a bias")
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[] if name == NAMES[i % 3] else [pytest.mark.soak])
        for i, case in enumerate(OPTIONS)
        for name in NAMES
    ],
)
def test_training_is_that_of_one_process(ranks, case, name):
    model = models.get(name)
    windows = model.windows(2, 3)
    assert sw.verify(model.build, "dp_shard=2,tp=2", batches=windows, run=ranks.run, **OPTIONS[case])


@pytest.mark.quick("bf16-0.005-False-tp=2-2")
@pytest.mark.parametrize(("layout", "size"), [("tp=2", 2), ("dp_shard=2,tp=2", 4)])
@pytest.mark.parametrize(
    ("precision", "gate", "fused"),
    [("bf16", 5e-3, False), ("fp16", 1e-3, True), ("bf16", 5e-3, True), ("fp16", 1e-3, False)],
)
def test_half_precision_is_that_of_one_rank(ranks, precision, gate, fused, layout, size):
    """Under fp16 the same steps overflow, and are skipped."""
    alone = ranks.run(train, 1, "dp_shard=1", precision, False)[0]
    for losses, skipped in ranks.run(train, size, layout, precision, fused):
        assert losses == pytest.approx(alone[0], rel=gate)
        assert skipped == alone[1] and any(skipped) == (precision == "fp16")
