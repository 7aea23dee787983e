"""Attention that is written out in products: all positions of keys and values are gathered, as is proved; what only looks so is named."""

import pytest
import torch
from techniques.cp.sequences import batch, count, loss_of, windows
from techniques.cp.written_out import EQUAL, REFUSED, Inner, Rolled, build
from torch import nn

import shardwise as sw
from shardwise.layout import layout_of
from shardwise.model.row_facts import Differs
from shardwise.techniques.cp.probe import proof
from shardwise.techniques.row_search import Search
from shardwise.techniques.sequences import sequences_in
from shardwise.techniques.technique import Example


def proof_of(how, degree=2, blocks=None):
    inputs, model = {"input_ids": batch(1, 24)["input_ids"]}, build(how, torch.float32)
    model.blocks = model.blocks if blocks is None else nn.ModuleList(blocks)
    return Search(model, next(sequences_in(((), inputs))), degree, "zigzag").run()


@pytest.mark.quick("table", "tril", "best", "float32", "dropped", "viewed", "ends", "relative")  # others: test_parity
@pytest.mark.parametrize("how", EQUAL)
def test_what_is_proved(how):
    facts = proof_of(how)
    assert not facts.islands and bool(facts.attention) == (how == "relative")
    assert facts.output == ("whole" if how == "prompted" else "rows")
    if how in ("samples", "relative"):
        assert not facts.products and not facts.keys
    elif how in ("checked", "viewed"):
        assert facts.keys == {f"blocks.{i}.attention.{name}": {"": 1} for i in (0, 1) for name in "kv"}
    else:
        assert list(facts.products) == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.quick("keys of the length", "over queries", "gated by all", "drawn")
@pytest.mark.parametrize("how", REFUSED)
def test_what_only_looks_like_attention_is_named(how):
    with pytest.raises(Differs) as raised:
        proof_of(how)
    assert raised.value.name == "blocks.0.attention" and raised.value.is_drawn == (how == "drawn")


def test_what_a_module_within_returns_is_named_if_that_is_why():
    """It may return something else where what is made of it is right, as an order of tokens is."""
    with pytest.raises(Differs) as raised:
        proof_of("table", blocks=[Inner(), Inner()])
    assert raised.value.name == "blocks.0.shift"


def test_a_module_that_would_return_all_positions_is_named():
    with pytest.raises(Differs) as raised:
        proof_of("table", blocks=[Rolled(), Rolled()])
    assert raised.value.name == "blocks.0"


def test_dropped_weights_are_the_ranks_own():
    assert proof_of("dropped").draws


def test_names_of_implementations_stay():
    """Code of models asks for them, as those that choose keys by an index do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    search = Search(model, next(sequences_in(((), {"input_ids": batch(1, 24)["input_ids"]}))), 2, "zigzag")
    assert len(search.run().attention) == 2
    assert model.config._attn_implementation == search.trial.module.config._attn_implementation == "sdpa"


class Build:
    def __init__(self, how):
        self.how = how

    def __call__(self):
        return build(self.how)


def loss(output, given):
    return loss_of(output[0] if isinstance(output, tuple) else output, given)


def test_what_draws_numbers_for_positions_runs_on_all_of_them(ranks):
    inputs = {"input_ids": batch(1, 24)["input_ids"]}
    with pytest.raises(
        sw.UnsupportedError, match=r"(?s)draws random numbers by rand_like .*fallback=\"gather\"\) draws"
    ):
        proof(build("drawn"), Example(lambda model: model(**inputs)), layout_of("cp=2", 2), sw.ContextParallel())
    sw.verify(
        Build("drawn"), "cp=2", batches=windows("drawn"), loss=loss, count=count, run=ranks.run,
        context_parallel=sw.ContextParallel(fallback="gather"),
    )  # fmt: skip


QUICK = {
    ("viewed", "cp=2"),
    ("ends", "cp=4"),
    ("prompted", "cp=2"),
    ("relative", "cp=2"),
    ("table", "cp=2"),
    ("distances", "cp=4"),
    ("checked", "dp_shard=2,cp=2"),
    ("alibi", "cp=2"),
}
LAYOUTS = {"cp=2": {}, "cp=4": {}, "dp_shard=2,cp=2": {"remat": "full"}, "cp=2,tp=2": {}}


@pytest.mark.quick("alibi-cp=2", "checked-dp_shard=2,cp=2", "prompted-cp=2", "ends-cp=4")
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
