"""Adapters in PEFT's files, merged into weights, and beside a base that is loaded: PEFT and transformers say what is right."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state.adapting import CASES, base, begun, loaded, logits, option, plain, refusals, saved, trained

import shardwise as sw

LAYOUTS = {"dp_shard=1": 1, "dp_shard=2": 2, "dp_replicate=2": 2, "tp=2": 2, "dp_shard=2,tp=2": 4}


def of_peft(case, folder):
    """PEFT's model of a directory, or a new one with the same adapters as ours."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and of types
        if folder is not None:
            return peft.PeftModel.from_pretrained(base(case), folder, autocast_adapter_dtype=False).eval()
        lora = option(case)
        targets = list(lora.targets) if lora.targets != "all-linear" else lora.targets
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, use_rslora=lora.rslora, use_dora=lora.dora,
            modules_to_save=["norm", "input_layernorm", "post_attention_layernorm", "lm_head"] if case == "trained" else None,
            fan_in_fan_out=case.startswith("gpt2"), task_type="CAUSAL_LM",
        )  # fmt: skip
        return peft.get_peft_model(base(case), config, autocast_adapter_dtype=False).eval()


def merged_by_peft(case, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_peft(case, folder).merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Directory of a case's base, as transformers writes it."""
    made = {}

    def folder(case):
        kind = CASES[case][0]
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            base(case).save_pretrained(made[kind])
        return str(made[kind])

    return folder


@pytest.mark.parametrize("case", CASES)
def test_peft_and_transformers_read_what_is_saved(ranks, tmp_path, bases, case):
    refused = ranks.run(saved, 2, case, "dp_shard=2", str(tmp_path), bases(case))[0]
    truth = plain(case)
    theirs = of_peft(case, tmp_path / "adapter")
    assert (logits(theirs) - logits(truth)).abs().max() <= 1e-14
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == bases(case) and config["task_type"] == "CAUSAL_LM"
    assert not refused
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (logits(merged) - logits(truth)).abs().max() <= 1e-12
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert (logits(alone) - logits(truth)).abs().max() > 1e-3
    stored, expected = load_file(tmp_path / "merged/model.safetensors"), merged_by_peft(case, tmp_path / "adapter")
    for name, value in stored.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("case", ["rslora", "dora", "gpt2-dora", "trained"])
def test_what_peft_has_saved_is_loaded_under_every_layout(ranks, tmp_path, bases, case):
    theirs = of_peft(case, None)
    for name, param in theirs.named_parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, 1.0 if "magnitude" in name or "norm" in name else 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    there = load_file(tmp_path / "peft/adapter_model.safetensors")
    for layout, num_ranks in LAYOUTS.items():
        states, found = zip(
            *ranks.run(loaded, num_ranks, case, layout, bases(case), str(tmp_path / "peft")), strict=True
        )
        assert (found[0] - logits(theirs)).abs().max() <= 1e-12, layout
        for key, value in there.items():
            name = (
                key.removeprefix("base_model.model.")
                .replace(".lora_A.", ".lora_A.default.")
                .replace(".lora_B.", ".lora_B.default.")
            )
            name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
            assert torch.equal(states[0][name], value), (layout, name)


@pytest.mark.parametrize("case", ["dora", "gpt2-dora", "trained"])
def test_files_do_not_depend_on_the_layout_to_the_last_bit(ranks, tmp_path, case):
    folders = {}
    for i, (layout, num_ranks) in enumerate(LAYOUTS.items()):
        folders[layout] = tmp_path / str(i)
        folders[layout].mkdir()
        assert not ranks.run(saved, num_ranks, case, layout, str(folders[layout]))[0]
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors", "base/model.safetensors"):
        first = load_file(folders["dp_shard=1"] / file)
        for layout, folder in folders.items():
            found = load_file(folder / file)
            assert found.keys() == first.keys() and all(torch.equal(found[n], v) for n, v in first.items()), (
                layout,
                file,
            )


@pytest.mark.parametrize("case", ["lora", "dora", "gpt2-dora"])
def test_a_base_is_loaded_strictly_and_magnitudes_follow_it(ranks, tmp_path, bases, case):
    stored = base(case).state_dict()
    of_theirs = {name: p for name, p in of_peft(case, None).named_parameters() if "magnitude" in name}
    first = None
    for layout, num_ranks in {**LAYOUTS, "dp_shard=3": 3}.items():
        found = ranks.run(begun, num_ranks, case, layout, bases(case))[0]
        for init in ("load", "seeded"):
            state = found[init]
            own = {name: value for name, value in state.items() if "lora_" in name}
            assert all(torch.equal(state[name], value) for name, value in stored.items())
            assert f"adapters not there ({len(own)} tensors)" in found[f"{init} report"]
            assert all(not value.any() for name, value in own.items() if "lora_B" in name)
            for name, value in of_theirs.items():
                assert torch.equal(state[name.removeprefix("base_model.model.")], value), (layout, init, name)
            first = own if first is None else first
            assert all(torch.equal(first[name], value) for name, value in own.items()), layout
        assert set(found["kept"]) == set(own)


@pytest.mark.parametrize("case", ["dora", "trained"])
def test_a_checkpoint_of_adapters_resumes_under_another_layout(ranks, tmp_path, case):
    expected = ranks.run(trained, 2, case, "dp_shard=2", str(tmp_path), 3, False)[0]
    shutil.rmtree(tmp_path)
    assert ranks.run(trained, 2, case, "dp_shard=2", str(tmp_path), 1, False)[0] == pytest.approx(
        expected[:1], rel=1e-14
    )
    assert ranks.run(trained, 2, case, "tp=2", str(tmp_path), 3, True)[0] == pytest.approx(expected[1:], rel=1e-12)
