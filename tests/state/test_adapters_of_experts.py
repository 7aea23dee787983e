"""Adapters of stacked experts in PEFT's files, merged into weights, and in checkpoints: PEFT and transformers say what is right."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from state.adapting import base, loaded, logits, option, plain, refusals, saved, trained

import shardwise as sw
from shardwise.cli.main import main
from shardwise.state.files import OpenFiles
from shardwise.state.merged import with_adapter
from shardwise.state.source import open_source
from shardwise.state.stored import InMemoryTensor, Source

LAYOUTS = {"dp_shard=1": 1, "dp_shard=2": 2, "dp_shard=3": 3, "dp_replicate=2": 2, "tp=2": 2, "dp_shard=2,tp=2": 4}


def of_peft(case, folder=None, **options):
    """PEFT's model of a directory, or a new one with the same adapters as ours."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if folder is not None:
            return peft.PeftModel.from_pretrained(base(case), folder, autocast_adapter_dtype=False).eval()
        lora = option(case)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if lora.targets == "all-linear" else [*lora.targets]
        given = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "target_modules": targets}
        own = {"modules_to_save": ["norm", "layernorm"] if lora.train else None, "target_parameters": [*lora.experts]}
        config = peft.LoraConfig(**(given | own | options))
        return peft.get_peft_model(base(case), config, autocast_adapter_dtype=False).eval()


@pytest.mark.quick("mixtral-ranks")
@pytest.mark.parametrize("case", ["mixtral-ranks", pytest.param("qwen3-moe", marks=pytest.mark.soak), "alone"])
def test_peft_and_transformers_read_what_is_saved(ranks, tmp_path, case):
    base(case).save_pretrained(tmp_path / "from")
    assert not ranks.run(saved, 2, case, "dp_shard=2", str(tmp_path), str(tmp_path / "from"))[0]
    truth, theirs = plain(case), of_peft(case, tmp_path / "adapter")
    assert torch.equal(logits(theirs), logits(truth))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_parameters"] == (["gate.weight", "experts.down_proj"] if case == "alone" else ["experts.gate_up_proj", "experts.down_proj"])  # fmt: skip
    theirs.save_pretrained(tmp_path / "again")
    ours, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert ours.keys() == again.keys() and all(torch.equal(again[key], value) for key, value in ours.items())
    expected = theirs.merge_and_unload().state_dict()
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= 1e-15, name
    assert not torch.equal(found["model.layers.1.mlp.experts.down_proj"], alone["model.layers.1.mlp.experts.down_proj"])
    folders = {name: str(tmp_path / name) for name in ("base", "result", "adapter")}
    assert main(["convert", folders["base"], folders["result"], "--adapter", folders["adapter"], "--verify"]) == 0
    result, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("result", "merged"))
    assert result.keys() == merged.keys() and all(torch.equal(result[name], value) for name, value in merged.items())


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param({"dp_shard=3": 3, "tp=2": 2}, id="few"),
        pytest.param(LAYOUTS, id="all", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("case", ["qwen3-moe", pytest.param("alone", marks=pytest.mark.soak)])
def test_what_peft_has_saved_is_loaded_under_every_layout_and_saved_with_its_bits(ranks, tmp_path, case, layouts):
    theirs = of_peft(case)
    for param in theirs.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, 0.0, 0.2)
    base(case).save_pretrained(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "peft")
    for layout, num_ranks in layouts.items():
        given = str(tmp_path / "base"), str(tmp_path / "peft")
        _, found = zip(*ranks.run(loaded, num_ranks, case, layout, *given), strict=True)
        assert (found[0] - logits(theirs)).abs().max() <= 1e-12, layout


@pytest.mark.soak
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param({"dp_shard=1": 1, "tp=2": 2}, id="few"),
        pytest.param(LAYOUTS, id="all", marks=pytest.mark.soak),
    ],
)
def test_files_do_not_depend_on_the_layout_to_the_last_bit(ranks, tmp_path, layouts):
    for layout, num_ranks in layouts.items():
        (tmp_path / layout).mkdir()
        assert not ranks.run(saved, num_ranks, "mixtral", layout, str(tmp_path / layout))[0]
        for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
            first, found = load_file(tmp_path / "dp_shard=1" / file), load_file(tmp_path / layout / file)
            assert found.keys() == first.keys() and all(torch.equal(found[n], v) for n, v in first.items()), layout


@pytest.mark.soak
def test_a_checkpoint_resumes_under_another_layout(ranks, tmp_path):
    expected = ranks.run(trained, 2, "mixtral", "dp_shard=2", str(tmp_path), 3, False)[0]
    shutil.rmtree(tmp_path)
    ranks.run(trained, 2, "mixtral", "dp_shard=2", str(tmp_path), 1, False)
    assert ranks.run(trained, 2, "mixtral", "tp=2", str(tmp_path), 3, True)[0] == pytest.approx(expected[1:], rel=1e-12)


def test_adapters_of_other_parameters_are_refused_with_both_named(ranks, tmp_path):
    """Also where keys and shapes are those of the model: a key does not say which parameter it is of."""
    ranks.run(saved, 1, "alone", "dp_shard=1", str(tmp_path))
    good = tmp_path / "adapter"
    config = json.loads((good / "adapter_config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(good, other)
    (other / "adapter_config.json").write_text(
        json.dumps({**config, "target_parameters": ["experts.gate_up_proj", "gate.weight"]})
    )
    texts = ranks.run(
        refusals, 1, "alone", "dp_shard=1", [("load_adapter", str(folder), {}) for folder in (good, other)]
    )[0]
    assert texts[0] == "" and "model.layers.0.mlp.experts.down_proj: " in texts[1] and "they have none of" in texts[1]
    assert sw.LoRA.of(good) == sw.LoRA(rank=3, alpha=8.0, targets=(), experts=("gate.weight", "experts.down_proj"))
    text = ranks.run(refusals, 1, "mixtral", "dp_shard=1", [("load_adapter", str(good), {})])[0][0]
    assert "they have none of model.layers.0.mlp.experts.gate_up_proj" in text and "sw.LoRA.of" in text


def test_what_peft_makes_of_all_linear_is_loaded_and_written_again(ranks, tmp_path):
    """Its adapter of gate_up_proj has twice the rank and alpha, for the two layers that the parameter was."""
    theirs = of_peft("mixtral", target_modules="all-linear", target_parameters=None)
    for param in theirs.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, 0.0, 0.2)
    base("mixtral").save_pretrained(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "peft")
    lora = sw.LoRA.of(tmp_path / "peft")
    assert (lora.rank, lora.ranks, lora.alphas) == (3, {"gate_up_proj": 6}, {"gate_up_proj": 16})
    given = str(tmp_path / "base"), str(tmp_path / "peft"), str(tmp_path / "again")
    _, found = ranks.run(loaded, 2, "mixtral", "dp_shard=2", *given)[0]
    assert (found - logits(theirs)).abs().max() <= 1e-12
    again = of_peft("mixtral", tmp_path / "again")
    assert (logits(again) - found).abs().max() <= 1e-12


def test_the_weight_of_a_layer_that_peft_adapts_as_a_parameter_is_read_as_the_layers(ranks, tmp_path):
    """LoRA.of was refused: "it is the weight of a layer"."""
    theirs = of_peft("mixtral", target_modules=["v_proj"], target_parameters=["q_proj.weight", "experts.down_proj"])
    for param in theirs.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, 0.0, 0.2)
    base("mixtral").save_pretrained(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "peft")
    given = str(tmp_path / "base"), str(tmp_path / "peft"), str(tmp_path / "again")
    _, found = ranks.run(loaded, 2, "mixtral", "dp_shard=2", *given)[0]
    assert (found - logits(theirs)).abs().max() <= 1e-12
    assert (logits(of_peft("mixtral", tmp_path / "again")) - found).abs().max() <= 1e-12
    assert main(["convert", given[0], str(tmp_path / "merged"), "--adapter", given[1]]) == 0
    merged, expected = base("mixtral").from_pretrained(tmp_path / "merged"), theirs.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert (value - expected[name]).abs().max() <= 1e-15, name


def test_the_model_says_which_parameters_of_stored_weights_have_the_adapters(ranks, tmp_path):
    ranks.run(saved, 1, "alone", "dp_shard=1", str(tmp_path))
    save_file(load_file(tmp_path / "base/model.safetensors"), tmp_path / "base.safetensors")
    with pytest.raises(sw.UnsupportedError, match="its module says"):
        with_adapter(open_source(tmp_path / "base.safetensors"), tmp_path / "adapter")
    model = base("alone")
    of_model = {name: InMemoryTensor.of(param) for name, param in model.named_parameters()}
    source = with_adapter(
        Source(place="the model", kind="a model", tensors=of_model), tmp_path / "adapter", lambda: model
    )
    name, merged = "model.layers.0.mlp.experts.down_proj", load_file(tmp_path / "merged/model.safetensors")
    with OpenFiles() as files:
        value = source.tensors[name].load(files)
    assert torch.equal(value[3], merged["model.layers.0.block_sparse_moe.experts.3.w2.weight"])
