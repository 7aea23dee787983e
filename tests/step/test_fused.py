"""``fused=True``: the same numbers, and no logits; under every layout, and refused where the model goes on with its logits."""

import models
import pytest
from step import fuses

import shardwise as sw

LAYOUTS = ("dp_shard=1", "dp_replicate=2", "dp_shard=2", "tp=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2")
NAMES = ("llama", "gpt2", "linears: kv-2", "t5", "qwen3")


@pytest.mark.quick("gpt2-dp_replicate=2", "linears: kv-2-dp_shard=2", "llama-tp=2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            layout,
            marks=[] if name == NAMES[i % 3] or (name, layout) == ("qwen3", "tp=2") else [pytest.mark.soak],
        )
        for i, layout in enumerate(LAYOUTS)
        for name in NAMES
    ],
)
def test_training_is_that_of_one_process_with_logits(ranks, name, layout):
    model = models.get(name)
    report = sw.verify(
        model.build,
        layout,
        batches=model.windows(2, 3),
        forward=model.forward,
        fused=True,
        max_grad_norm=0.1,
        run=ranks.run,
    )
    assert report


@pytest.mark.quick("{'remat': 'full'}")
@pytest.mark.parametrize("options", [{"remat": "full"}, {"compile": sw.Compile(backend="aot_eager")}], ids=str)
def test_with_other_options(ranks, options):
    model = models.get("llama")
    assert sw.verify(model.build, "tp=2", batches=model.windows(2, 3), fused=True, run=ranks.run, **options)


def test_no_tensor_is_as_large_as_the_logits(ranks):
    for layout, size in (("dp_shard=1", 1), ("dp_shard=2", 2), ("tp=2", 2)):
        for with_logits, without, loss, other in ranks.run(fuses.largest, size, layout):
            assert with_logits >= fuses.LOGITS and without < fuses.LOGITS / 4
            assert loss == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("layout", [pytest.param("dp_shard=2", marks=pytest.mark.soak), "tp=2"])
def test_an_evaluation_and_half_precision(ranks, layout):
    for found in ranks.run(fuses.evaluated, 2, layout):
        for plain, fused in found.values():
            assert fused == pytest.approx(plain, rel=2e-3 if "16" in str(found) else 1e-6)


SAYS = {
    "another loss": ("UsageError: fused=True with a loss that is not sw.next_token_loss", "sw.linear_cross_entropy"),
    "capped logits": ("UsageError: lm_head: fused: ", "the model goes on to compute with its logits"),
    "an unknown name": ("UsageError: fused='heat'", "'head'"),
    "two heads": ("UsageError: fused=True for a TwoHeads", "2 such layers: one, two", 'fused="head"'),
    "one of two heads": ("UsageError: two: fused: the output of the model is a Tensor", "did not call the head"),
    "no head": ("UsageError: fused=True for a Embedded", "it has no such layer"),
    "a head of another class": ("UnsupportedError: head: fused, with a head that is a Scaled",),
    "a parametrised head": ("UnsupportedError: head: fused, with a head that is a Parametrized",),
    "a head whose forward is another": (
        "UnsupportedError: head: fused, with a head that is a Linear whose forward was replaced",
    ),
    "data of the logits": ("UsageError: head: fused: .data of what the head returns",),
    "a hook on the logits": ("UsageError: head: fused: register_hook of what the head returns",),
    "a compiled head": ("UnsupportedError: head: fused, with a head that is compiled", 'compile="blocks"'),
    "other labels": ("UsageError: head: fused: the head is called with [2, 6, 16], for labels [2, 3]",),
    "a frozen head": ("no error",),
    "a named head": ("no error",),
}


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(fuses.misused, 1)[0]


@pytest.mark.parametrize("case", fuses.MISUSES)
def test_refused_by_name(found, case):
    for words in SAYS[case]:
        assert words in found[case]
