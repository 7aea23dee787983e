"""Models that their user has wrapped by PEFT: their layers are computed as our own, with the numbers of PEFT."""

import copy
import functools
import warnings

import pytest
import torch
from safetensors.torch import load_file
from techniques.lora import wrapped
from techniques.lora.test_parity import compared
from techniques.lora.wrapped import KINDS, building

import shardwise as sw
from shardwise.model.adapted import adapted_layers
from shardwise.model.adopted import not_adopted
from shardwise.techniques import Parallel
from shardwise.techniques.fold import prepared

peft = pytest.importorskip("peft")


@pytest.mark.quick("llama-tp=2-dora", "gpt2-dp_shard=2-rslora")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", ["dp_replicate=2", "dp_shard=2", "tp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_parity(ranks, name, layout, kind):
    kind = "lora" if kind == "dropout" and "tp" in layout else kind
    compared(ranks, name, layout, None, build=building(name, **KINDS[kind]), max_grad_norm=0.05)


@pytest.mark.soak
def test_no_sum_is_added_under_tp(ranks):
    num_sums, cut = ranks.run(wrapped.sums, 2, "tp=2", "llama", ())[0]
    assert num_sums == 13 and cut > 20  # as of sw.LoRA(rank=2)


@pytest.mark.quick("llama-lora", "gpt2-rslora", "llama-dora", "gpt2-dropout")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbers_are_those_of_pefts_own_forward(name, kind):
    theirs = wrapped.wrapped(name, KINDS[kind]).double()
    ours = prepared(copy.deepcopy(theirs), Parallel.of())
    assert adapted_layers(ours) and not not_adopted(ours)
    found = []
    for module in (theirs, ours):
        torch.manual_seed(5)  # of dropout
        answer = wrapped.logits(module, name, training=True)
        answer.square().mean().backward()
        found.append(
            {key: p.grad for key, p in module.named_parameters() if p.grad is not None} | {"": answer.detach()}
        )
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        bound = 1e-12 if kind == "dora" else 0.0
        assert float((value - found[1][key]).abs().max()) <= bound * float(value.abs().max()), key


def test_layers_of_bitsandbytes_keep_their_bytes(ranks):
    pytest.importorskip("bitsandbytes")
    theirs = wrapped.in_4_bits()
    ours = prepared(copy.deepcopy(theirs), Parallel.of())
    assert not not_adopted(ours)
    answers = [wrapped.logits(each, "llama", training=True) for each in (theirs, ours)]
    assert torch.equal(*answers)
    compared(ranks, "llama", "tp=2", None, build=wrapped.in_4_bits)
    with pytest.raises(sw.UsageError, match=r"(?s)q_proj: lora= with a module that holds weights of bitsandbytes"):
        prepared(theirs.unload(), Parallel.of(lora=sw.LoRA(rank=2)))
    theirs = wrapped.in_4_bits()
    theirs.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(sw.UnsupportedError, match=r"(?s)layers.0.self_attn.q_proj.base_layer: .*reordered its bytes"):
        prepared(theirs, Parallel.of())
    with pytest.raises(sw.UnsupportedError, match=r"(?s)q_proj.base_layer: .*no double quantisation.*quantize=\"nf4\""):
        prepared(wrapped.in_4_bits(compress_statistics=False), Parallel.of())


def test_a_class_with_other_code_is_not_adopted():
    module = wrapped.wrapped()
    layer = module.base_model.model.model.layers[1].mlp.up_proj

    class Twice(type(layer)):
        def forward(self, x, *args, **kwargs):
            return super().forward(x, *args, **kwargs) + self.lora_B["default"](self.lora_A["default"](x))

    layer.__class__ = Twice
    found = not_adopted(prepared(module, Parallel.of()))
    assert found == {"base_model.model.model.layers.1.mlp.up_proj": "Twice computes something else than LoRA or DoRA"}


@pytest.mark.quick("table-tp=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize(
    "case",
    [
        "nf4",
        "table",
        *(pytest.param(case, marks=pytest.mark.soak) for case in ("saved", "ranks", "injected", "ia3", "bias")),
    ],
)
def test_other_models(ranks, case, layout):
    options = {
        "table": {"target_modules": ["embed_tokens", "q_proj"]},
        "saved": {"modules_to_save": ["lm_head", "norm"]},
        "ranks": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 9}},
    }
    build = functools.partial(wrapped.put_in, case) if case in ("injected", "ia3", "bias") else None
    build = build or building("llama", **options.get(case, {}))
    compared(ranks, "llama", layout, None, build=build, quantize="nf4" if case == "nf4" else None)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp_replicate=2", "tp=2"])
def test_parameters_with_adapters_of_peft_are_computed_by_its_code(ranks, layout):
    compared(ranks, "mixtral", layout, None, build=functools.partial(wrapped.put_in, "parameters"))


@pytest.mark.quick(
    "ia3-is not LoRA",
    "several-several adapters",
    "shared-those of another layer",
    "parameters-is of a parameter (target_parameters)",
    "bias-has a bias",
)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ia3", "is not LoRA"),
        ("bias", "has a bias"),
        ("several", "several adapters"),
        ("shared", "those of another layer"),
        ("parameters", "is of a parameter (target_parameters)"),
    ],
)
def test_what_is_not_adopted_is_said_and_not_written_as_what_it_is_not(ranks, tmp_path, kind, why):
    text, errors = ranks.run(wrapped.said, 2, kind, str(tmp_path))[0]
    assert "computed as PEFT does" in text and why in text
    assert len(errors) == 2 and all(why in error and ": adapters of PEFT" in error for error in errors)


def test_parameters_with_adapters_of_peft_are_refused_where_they_would_be_cut(ranks):
    """Not at the first step: PEFT puts another tensor over the parameter in each forward."""
    with pytest.raises(sw.RankError, match=r"(?s)experts: adapters of parameters by PEFT .*sw.LoRA\(experts="):
        ranks.run(wrapped.said, 2, "parameters", "", "dp_shard=2")


def test_what_pefts_files_cannot_say_is_not_written_to_them(ranks, tmp_path):
    text, errors = ranks.run(wrapped.said, 2, "scaled", str(tmp_path))[0]
    assert "LoRA of PEFT: rank 2" in text and len(errors) == 1 and "their scale is 28" in errors[0]


def test_adapters_beside_adapters_and_changes_after_parallelize_are_refused(ranks):
    with pytest.raises(sw.UsageError, match=r"k_proj: lora= with a module that has adapters"):
        prepared(wrapped.put_in("ia3"), Parallel.of(lora=sw.LoRA(targets="v_proj")))
    scale, merged, around, within = ranks.run(wrapped.changed, 1)[0]
    assert "another scale after parallelize" in scale and "adapters that were merged" in merged
    assert "a PeftModel around a model" in around and "layers.0.self_attn.q_proj: the module changed" in within


CASES = {
    "dora": (
        "llama",
        {
            "use_dora": True,
            "modules_to_save": ["lm_head", "input_layernorm"],
            "rank_pattern": {"0.self_attn.q_proj": 3},
            "alpha_pattern": {"v_proj": 9},
        },
    ),
    "gpt2": ("gpt2", {"use_rslora": True}),
}


@pytest.mark.quick("dora-tp=2")
@pytest.mark.parametrize("layout", ["tp=2", "dp_shard=2"])
@pytest.mark.parametrize("case", CASES)
def test_files_and_merged_weights_are_those_of_peft(ranks, tmp_path, layout, case):
    name, options = CASES[case]
    found = ranks.run(wrapped.files, 2, layout, str(tmp_path), name, tuple(options.items()))[0]
    truth = wrapped.wrapped(name, options).double()
    answer = wrapped.logits(truth, name)
    assert (found["answer"] - answer).abs().max() < 1e-12
    with truth.disable_adapter():
        assert (found["base"] - wrapped.logits(truth, name)).abs().max() < 1e-12
    assert found["state"].keys() == truth.state_dict().keys()
    truth.save_pretrained(tmp_path / "theirs")
    theirs, ours = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("theirs", "adapter"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
    from transformers import AutoModelForCausalLM

    merged, base = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("merged", "base"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' next version
        again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
        expected = truth.merge_and_unload().state_dict()
    for each in (merged, again):  # positions of transformers' rotary embedding are in float32 there
        assert (wrapped.logits(each, name) - answer).abs().max() < 1e-7
    assert all(torch.allclose(value, expected[key], rtol=0, atol=1e-15) for key, value in merged.state_dict().items())
    read, _ = ranks.run(wrapped.loaded, 2, layout, str(tmp_path), name, tuple(options.items()))[0]
    assert (read - answer).abs().max() < 1e-12


@pytest.mark.soak
def test_checkpoints_resume_under_another_layout(ranks, tmp_path):
    name, options = CASES["dora"]
    given = (str(tmp_path), name, tuple(options.items()))
    expected = ranks.run(wrapped.resumed, 2, "dp_shard=2", *given, False)[0]
    assert ranks.run(wrapped.resumed, 2, "tp=2", *given, True)[0] == pytest.approx(expected[1:], rel=1e-12)
