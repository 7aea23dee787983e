"""Plans that name layers: they are cut as the code says, and what cannot be cut so is an error that says why."""

import models
import pytest
from techniques.tp.plans import CASES, MLPS, REGISTERED, Mlp, described, described_by_rank_0

import shardwise as sw

SAYS = {
    "auto": ("17 of 30 parameters",),
    "auto beside the model's own": (
        "plan: what the code allows. The model's own tp_plan is another: it also cuts model.layers.0.mlp.experts.gate_up_proj and 5 more",
    ),
    "hf": ("17 of 30 parameters", "tensor_parallel: plan: hf; how its layers are cut was found in the code, and proved"),
    "hf with norms": ("17 of 36 parameters", "plan: hf"),
    "hf with experts": ("UnsupportedError", "'moe_tp_experts'", "experts, which are whole on every rank"),
    "hf without one": ("UsageError: TensorParallel(plan='hf') for a GPT2LMHeadModel", 'leave it at "auto"'),
    "llama": ("17 of 30 parameters", "plan: llama"),
    "llama on other names": ("PlanError: TensorParallel(plan='llama')", "no modules of these names"),
    "some layers": ("9 of 40 parameters", "lm_head", "transformer.h.0.attn.c_attn.weight: whole on every rank of tp, and 2 like it: the plan does not cut"),
    "of a module": ("3 of 11 parameters", "tp: 1 module (more): column-parallel", "plan: techniques.tp.plans:second_of"),
    "by path": ("3 of 11 parameters", "tp: 1 module (more): column-parallel", "plan: techniques.tp.plans:SECOND"),
    "by path to something else": ("ConfigError", "it is a int, and no mapping"),
    "one block": ("3 of 40 parameters",),
    "the vocabulary alone, tied": ("1 of 40 parameters", "vocabulary-parallel head"),
    "a layer without its other half": (
        "UnsupportedError: more.weight: a plan in which this is column-parallel over tp=2",
        "the plan does not cut less.weight, which is cut with it",
    ),
    "the wrong way round": ("UnsupportedError: more.weight", "it would be column-parallel"),
    "what cannot be cut": ("UnsupportedError: blocks.0.mlp.up.weight", "is used by norm too"),
    "an embedding by columns": ("UnsupportedError: embed.weight", "it would be cut as an embedding"),
    "a head by rows": ("UnsupportedError: head.weight", "it would be cut as a head"),
    "no such module": ("PlanError: TensorParallel(plan=...: 'transformer.h.*.mlp.c_fcc')", "did you mean"),
    "no such style": ("ConfigError", "there is no such style", "did you mean 'colwise'"),
    "a norm": ("PlanError", "have no weight of two dims"),
    "two styles": ("PlanError: transformer.h.0.mlp.c_fc.weight", "another pattern makes it column"),
    "sequence parallel": ("UnsupportedError", "it is no style of one module"),
    "nothing": ("ConfigError: TensorParallel(plan={})",),
    "no such plan": ("ConfigError: TensorParallel(plan='lama')", "did you mean 'llama'"),
    "another type": ("ConfigError: tensor_parallel=3", "that is a int"),
    "registered": (
        "3 of 11 parameters", "plan: the one registered for techniques.tp.plans:Mlp; how its layers are cut was found",
        'plan="all" would be what the code allows. This plan is another: it leaves more.weight and 3 more whole',
    ),
    "registered for a base class": ("3 of 11 parameters", "registered for techniques.tp.plans:Mlp"),
    "registered for a part": ("3 of 13 parameters", "tp: 1 module (inner.up): column-parallel"),
    "registered, and not asked for": ("9 of 11 parameters",),
    "registered, and another given": ("3 of 11 parameters", "tp: 1 module (more): column-parallel", "plan: the one that was given"),
    "registered, and wrong": ("PlanError", "register_tp_plan(techniques.tp.plans:Other, ...: 'upp')", "did you mean"),
}  # fmt: skip


ON_BOTH = ("hf with experts", "the vocabulary alone, tied", "no such module", *REGISTERED)
"""The cases that two ranks agree on. Each of them would search for all the plans again."""


@pytest.fixture(scope="module")
def found(ranks):
    """What rank 0 of two says."""
    return ranks.run(described_by_rank_0, 1, 2)[0]


@pytest.mark.parametrize("case", [*CASES, *REGISTERED])
def test_what_is_said(found, case):
    for words in SAYS[case]:
        assert words in found[case], found[case]


def test_both_ranks_say_the_same(ranks, found):
    for of_rank in ranks.run(described, 2, "tp=2", ON_BOTH):
        assert of_rank == {case: found[case] for case in ON_BOTH}


@pytest.mark.parametrize(
    ("of", "plan", "says"),
    [
        (Mlp(), {"up": "colwise"}, "neither a class nor the name of one"),
        ("Mlp", {"up": "colwise"}, "neither a class nor the name of one"),
        (Mlp, "hf", "it is a str, and no mapping"),
        (Mlp, {"up": "colwis"}, "did you mean 'colwise'"),
        (Mlp, {}, "it names no module"),
    ],
)
def test_what_cannot_be_registered(of, plan, says):
    with pytest.raises(sw.ConfigError, match=says):
        sw.register_tp_plan(of, plan)


def test_without_ranks_to_cut_over_a_plan_has_no_effect_and_is_read(ranks):
    found = ranks.run(described, 1, "dp_shard=1")[0]
    assert "tensor_parallel: no effect: tp=1" in found["some layers"]
    wrong = [case for case in CASES if "PlanError" in str(SAYS[case])]
    assert wrong and all(found[case].startswith("PlanError") for case in wrong)


@pytest.mark.quick("gpt2-plan0", "linears: weight-norm-plan1")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt2", MLPS),
        (
            "linears: weight-norm",
            {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.gate": "colwise", "blocks.*.mlp.down": "rowwise"},
        ),
        ("llama", "llama"),
        pytest.param("qwen3", "hf", marks=pytest.mark.soak),
    ],
)
def test_training_is_that_of_one_process(ranks, name, plan):
    model = models.get(name)
    option = sw.TensorParallel(plan=plan)
    windows = model.windows(2, 3)
    assert sw.verify(model.build, "tp=2", batches=windows, forward=model.forward, tensor_parallel=option, run=ranks.run)
