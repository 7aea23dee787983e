"""Models that their user has wrapped by PEFT: their layers are computed as our own, with the numbers of PEFT."""

import warnings

import pytest
import torch
from safetensors.torch import load_file
from techniques.lora import adapters, wrapped
from techniques.lora.test_parity import compared
from techniques.lora.wrapped import KINDS, building

import shardwise as sw

peft = pytest.importorskip("peft")


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


CASES = {
    "dora": ("llama", {"use_dora": True, "modules_to_save": ["lm_head", "input_layernorm"]}),
    "gpt2": ("gpt2", {"use_rslora": True}),
}


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
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


def test_checkpoints_resume_under_another_layout(ranks, tmp_path):
    name, options = CASES["dora"]
    given = (str(tmp_path), name, tuple(options.items()))
    expected = ranks.run(wrapped.resumed, 2, "dp_shard=2", *given, False)[0]
    assert ranks.run(wrapped.resumed, 2, "tp=2", *given, True)[0] == pytest.approx(expected[1:], rel=1e-12)
