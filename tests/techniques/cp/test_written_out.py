"""Attention that is written out in products: all positions of keys and values are gathered, as is proved; what only looks so is named."""

import pytest
import torch
from techniques.cp.sequences import batch, count, loss_of, windows
from techniques.cp.written_out import EQUAL, REFUSED, build

import shardwise as sw
from shardwise.model.row_facts import Differs
from shardwise.techniques.cp.search import Search
from shardwise.techniques.cp.sequences import sequences_in


def proof_of(how, degree=2):
    inputs = {"input_ids": batch(1, 24)["input_ids"]}
    return Search(build(how, torch.float32), next(sequences_in(((), inputs))), degree, "zigzag").run()


@pytest.mark.parametrize("how", EQUAL)
def test_what_is_proved(how):
    facts = proof_of(how)
    assert not facts.islands and not facts.attention
    if how == "samples":
        assert not facts.products and not facts.keys
    elif how == "checked":
        assert facts.keys == {f"blocks.{i}.attention.{name}": {"": 1} for i in (0, 1) for name in "kv"}
    else:
        assert list(facts.products) == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize("how", REFUSED)
def test_what_only_looks_like_attention_is_named(how):
    with pytest.raises(Differs) as raised:
        proof_of(how)
    assert raised.value.name == "blocks.0.attention"


class Build:
    def __init__(self, how):
        self.how = how

    def __call__(self):
        return build(self.how)


def loss(output, given):
    return loss_of(output[0] if isinstance(output, tuple) else output, given)


QUICK = {("table", "cp=2"), ("distances", "cp=4"), ("checked", "dp_shard=2,cp=2"), ("alibi", "cp=2")}
LAYOUTS = {"cp=2": {}, "cp=4": {}, "dp_shard=2,cp=2": {"remat": "full"}, "cp=2,tp=2": {}}


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param(how, layout, marks=[] if (how, layout) in QUICK else [pytest.mark.soak])
        for how in EQUAL
        for layout in LAYOUTS
        if how not in ("dropped", "float32")
    ],
)
def test_parity(ranks, how, layout):
    sw.verify(
        Build(how), layout, batches=windows(how), loss=loss, count=count, run=ranks.run, max_grad_norm=0.3, optimizer="adamw",
        context_parallel=sw.ContextParallel(method="gather"), **LAYOUTS[layout],
    )  # fmt: skip
