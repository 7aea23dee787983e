"""Models that their user has wrapped by PEFT: their layers are computed as our own, with the numbers of PEFT."""

import pytest
from techniques.lora import adapters, wrapped
from techniques.lora.test_parity import compared
from techniques.lora.wrapped import KINDS, building

import shardwise as sw

pytest.importorskip("peft")


@pytest.mark.combinations("values")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2", "dp_shard=2,tp=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_parity(ranks, name, layout, kind):
    kind = "lora" if kind == "dropout" and "tp" in layout else kind
    compared(ranks, name, layout, None, build=building(name, **KINDS[kind]), max_grad_norm=0.05)


def test_no_sum_is_added_under_tp(ranks):
    ours, cut = ranks.run(adapters.sums_per_micro_batch, 2, "tp=2", "llama", sw.LoRA(rank=2))[0]
    theirs, cut_too = ranks.run(wrapped.sums, 2, "tp=2", "llama", ())[0]
    assert (theirs, cut_too) == (ours, cut) == (13, cut)
