"""Weights in 4 bits, loaded, gathered and saved: the bytes are those of the whole tensor under every layout."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state import packing
from state.adapting import logits
from state.packing import base, packed, refusals, unpacked, weights

import shardwise as sw
from shardwise.config.conversion import Conversion
from shardwise.state.convert import convert

LAYOUTS = {"dp_shard=1": 1, "dp_replicate=2": 2, "dp_shard=2": 2, "dp_shard=3": 3, "tp=2": 2, "dp_shard=2,tp=2": 4}
FEW = {("dp_shard=3", 64), ("tp=2", 40)}
over_layouts = pytest.mark.parametrize(
    ("layout", "wide"),
    [pytest.param(n, w, marks=[] if (n, w) in FEW else pytest.mark.soak) for n in LAYOUTS for w in (64, 40)],
)
WIDTHS = (2, 3, 5, 8, 16, 31, 33, 63, 64, 65, 70)


def same(found, expected, place=""):
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), (place, name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directory of a base, by its width and dtype, as transformers writes it."""
    made = {}

    def folder(wide=64, dtype=torch.float32):
        if (wide, dtype) not in made:
            made[wide, dtype] = tmp_path_factory.mktemp("base")
            base(wide, dtype=dtype).save_pretrained(made[wide, dtype])
        return str(made[wide, dtype])

    return folder


@pytest.mark.parametrize(
    "widths", [pytest.param(WIDTHS, id="few"), pytest.param((*range(2, 71),), id="all", marks=pytest.mark.soak)]
)
def test_each_width_has_the_bytes_of_the_whole_weight(ranks, widths):
    state = packing.Widths(widths).state_dict()
    of_layers = {name: value for name, value in state.items() if name.endswith("weight")}
    for num in (1, 2, 3):
        parts, plain, again, _ = ranks.run(packing.of_widths, num, f"dp_shard={num}", widths)[0]
        for found in (parts, again):
            same(found, packed(of_layers), num)
            assert not set(found) & set(of_layers)
        assert [*plain] == [*state]
        same(plain, {**state, **unpacked(of_layers)}, num)


@pytest.mark.quick("tp=2-40")
@over_layouts
def test_a_directory_is_packed_under_every_layout_as_the_whole_tensors_are(ranks, folders, layout, wide):
    expected = base(wide).state_dict()
    found = ranks.run(packing.loaded, LAYOUTS[layout], layout, folders(wide), wide)[0]
    for shared in (True, False):
        same(found[f"parts {shared}"], packed(weights(expected)), shared)
        assert set(found[f"report {shared}"].packed) == set(weights(expected))
        assert "packed (14): model.layers.0" in str(found[f"report {shared}"])
    same(found["plain"], {**expected, **unpacked(weights(expected))})
    assert ("tp" in layout) == any("_nf4" in name for name in found["cut"])
    truth = base(wide)
    truth.load_state_dict({**expected, **unpacked(weights(expected))})
    assert (found["logits"] - logits(truth.eval())).abs().max() < 1e-5


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.soak) for each in (torch.float16, torch.float64))]
)
def test_weights_of_every_floating_dtype_are_packed_without_a_cast(ranks, folders, dtype):
    found = ranks.run(packing.loaded, 2, "dp_shard=2", folders(64, dtype), 64, 1)[0]
    same(found["parts True"], packed(weights(base(dtype=dtype).state_dict())))
    assert not set(found["report True"].cast) & set(weights(found["plain"]))


@pytest.mark.parametrize(
    "layout", ["tp=2", *(pytest.param(each, marks=pytest.mark.soak) for each in ("dp_shard=1", "dp_shard=3"))]
)
def test_magnitudes_of_dora_follow_the_unpacked_values(ranks, folders, layout):
    found = ranks.run(packing.magnitudes, LAYOUTS[layout], layout, folders(40), 40)[0]
    for name, value in unpacked(weights(base(40).state_dict())).items():
        magnitude = found[name.removesuffix("weight") + "lora_magnitude_vector.default.weight"]
        assert torch.equal(magnitude, torch.linalg.norm(value, dim=1)), name


@pytest.mark.quick("dp_shard=3-64")
@over_layouts
def test_what_is_saved_computes_the_same_without_shardwise(ranks, tmp_path, folders, layout, wide):
    import peft
    from transformers import AutoModelForCausalLM

    full, answer = ranks.run(packing.saved, LAYOUTS[layout], layout, folders(wide), str(tmp_path), wide)[0]
    expected = base(wide).state_dict()
    same(load_file(tmp_path / "base/model.safetensors"), {**expected, **unpacked(weights(expected))})
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(alone, tmp_path / "adapter").eval()
        assert (logits(theirs) - answer).abs().max() < 1e-5
        expected_merged = theirs.merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged/model.safetensors")
    same(merged, {name: expected_merged[name] for name in merged})
    assert merged.keys() == expected.keys() and not any(torch.equal(merged[n], full[n]) for n in weights(expected))
    same(load_file(tmp_path / "packed/model.safetensors"), packing.of_bitsandbytes(expected))
    settings = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert settings["load_in_4bit"] and settings["llm_int8_skip_modules"] == ["lm_head"]
    assert "quantization_config" not in json.loads((tmp_path / "base/config.json").read_text())


@pytest.fixture
def bnb(tmp_path, folders):
    """Writes a directory as transformers does with bitsandbytes; ``edit`` changes its tensors."""

    def write(edit=lambda tensors: None, settings=None, **changes):
        folder = tmp_path / f"bnb{len([*tmp_path.iterdir()])}"
        shutil.copytree(folders(), folder)
        tensors = packing.of_bitsandbytes(base().state_dict(), **changes)
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings or {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.mark.parametrize(
    "layout",
    ["tp=2", *(pytest.param(n, marks=pytest.mark.soak) for n in ("dp_shard=1", "dp_shard=3", "dp_shard=2,tp=2"))],
)
def test_a_directory_of_bitsandbytes_keeps_its_bits(ranks, bnb, layout):
    state = base().state_dict()

    def other_bits(tensors):  # as no packing of the values would give them
        for name in weights(state):
            tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"].flip(0)
            tensors[name] = tensors[name].flip(0).flatten().view(torch.bfloat16).view(-1, 1)

    folder = bnb(other_bits)
    tensors = load_file(f"{folder}/model.safetensors")
    found = ranks.run(packing.loaded, LAYOUTS[layout], layout, folder, 64)[0]
    for parts in (found["parts True"], found["parts False"]):
        for name in weights(state):
            assert torch.equal(parts[f"{name}_nf4"].flatten(), tensors[name].flatten().view(torch.uint8))
            assert torch.equal(parts[f"{name}_nf4_scales"].flatten(), tensors[f"{name}.absmax"])
            assert torch.equal(parts[f"{name}_nf4_outer"], tensors[f"{name}.nested_absmax"])
    report, plain = ranks.run(packing.plain_loaded, LAYOUTS[layout], layout, folder)[0]
    same(plain, {name: found["plain"][name] for name in state})
    assert len(report.unpacked) == 14 and "packed there, and plain in the model (14)" in str(report)


def test_a_directory_that_transformers_has_packed(ranks, tmp_path, folders):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(folders(), quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "theirs")
    full, _ = ranks.run(packing.saved, 2, "dp_shard=2", str(tmp_path / "theirs"), str(tmp_path), 64)[0]
    first, second = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("theirs", "packed"))
    assert first.keys() == second.keys() and all(
        torch.equal(second[name], value) for name, value in first.items() if "quant_state" not in name
    )
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map="cpu")
    assert {type(back.get_submodule(n.removesuffix(".weight"))).__name__ for n in weights(full)} == {"Linear4bit"}
    for name, layer in back.named_modules():
        if f"{name}.weight" in weights(full):
            import bitsandbytes.functional as F

            assert torch.equal(F.dequantize_4bit(layer.weight.data, layer.weight.quant_state), full[f"{name}.weight"])


def test_checkpoints_have_the_bytes_under_other_layouts(ranks, tmp_path):
    expected = ranks.run(packing.trained, 2, "dp_shard=2", str(tmp_path), 4, 9)[0]
    first = ranks.run(packing.trained, 2, "dp_shard=2", str(tmp_path), 1, 1)[0]
    second = ranks.run(packing.trained, 2, "tp=2", str(tmp_path), 2, 2)[0]
    third = ranks.run(packing.trained, 1, "dp_shard=1", str(tmp_path), 4, 9)[0]
    assert first[0] + second[0] + third[0] == pytest.approx(expected[0], rel=1e-12)
    for _, parts in (first, second, third):
        same(parts, packed(weights(base(dtype=torch.float64).state_dict())))
    ranks.run(packing.trained, 1, "dp_shard=1", str(tmp_path / "plain"), 1, 1, quantize=None)
    with pytest.raises(sw.RankError, match=r"q_proj.weight: .*: a checkpoint of a model with plain weights"):
        ranks.run(packing.trained, 1, "dp_shard=1", str(tmp_path / "plain"), 2, 9)


FIRST = "model.layers.0.self_attn.q_proj.weight"


def test_a_packed_directory_is_converted_to_plain_values(ranks, tmp_path, bnb):
    state = base().state_dict()
    convert(Conversion(source=Path(bnb()), dest=tmp_path / "plain", to="hf", dtype="fp64", verify=True))
    found = load_file(tmp_path / "plain/model.safetensors")
    same(found, {name: value.double() for name, value in {**state, **unpacked(weights(state))}.items()})
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float64"
    save_file(packed(weights(state)), tmp_path / "parts.safetensors")
    with pytest.raises(sw.CheckpointError, match=r"_nf4: weights from .* parts of packed weights"):
        convert(Conversion(source=tmp_path / "parts.safetensors", dest=tmp_path / "out", to="hf"))


def test_adapters_of_every_packed_weight_leave_no_packed_word_in_the_result(tmp_path, bnb):
    """The usual case of QLoRA: no packed weight is without an adapter."""
    adapter, factors = tmp_path / "adapter", {}
    for name, value in weights(base().state_dict()).items():
        for part, shape in (("A", (2, value.shape[1])), ("B", (value.shape[0], 2))):
            factors[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] = torch.zeros(shape)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    save_file(factors, adapter / "adapter_model.safetensors")
    done = convert(Conversion(source=Path(bnb()), dest=tmp_path / "plain", to="hf", adapter=adapter, verify=True))
    assert f"{len(factors) // 2} weights are packed in the source" in done.notes[0]
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    same(load_file(tmp_path / "plain/model.safetensors"), unpacked(weights(base().state_dict())))


def edited(suffix, change):
    def edit(tensors):
        value = change(tensors.pop(FIRST + suffix))
        if value is not None:
            tensors[FIRST + suffix] = value

    return edit


def int8(tensors):
    for name in weights(base().state_dict()):
        tensors[name], tensors[f"{name[:-7]}.SCB"] = torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)


def test_directories_that_are_packed_otherwise_are_refused_by_name(ranks, tmp_path, bnb, folders):
    state, text = ".quant_state.bitsandbytes__nf4", lambda value: torch.tensor([*value], dtype=torch.uint8)

    def says(**changes):
        return edited(state, lambda value: text(json.dumps({**json.loads(bytes(value.tolist())), **changes}).encode()))

    cases = {
        bnb(quant_type="fp4"): ("bitsandbytes in fp4", "take the directory that it was made from"),
        bnb(blocksize=128): ("nf4 in blocks of 128, whose scales are in groups of 256",),
        bnb(nested_blocksize=64): ("scales are in groups of 64",),
        bnb(edited(".nested_absmax", lambda value: None)): ("no double quantisation",),
        bnb(int8): ("8 bits (LLM.int8)",),
        bnb(settings={"quant_method": "bitsandbytes", "load_in_8bit": True}): ("8 bits (LLM.int8)",),
        bnb(edited("", lambda value: value[:-1])): ("has 2047 bytes", "shape [64, 64] has 2048"),
        bnb(edited(".absmax", lambda value: value[:-1])): (".absmax has 63 bytes",),
        bnb(edited(".nested_absmax", lambda value: value.repeat(2))): (".nested_absmax has 8 bytes",),
        bnb(edited(".nested_absmax", lambda value: value.view(torch.int32))): ("is int32, and not float32",),
        bnb(edited(".quant_map", lambda value: value.flip(0))): (".quant_map is not the table of NF4",),
        bnb(edited(".nested_quant_map", lambda value: value * 2)): ("is not the table of the scales in 8 bits",),
        bnb(edited(".absmax", lambda value: None)): (".absmax is missing beside",),
        bnb(edited(state, lambda value: text(b"{"))): ("is not the JSON that bitsandbytes writes",),
        bnb(edited(state, lambda value: text(b"\xff"))): ("is not the JSON that bitsandbytes writes",),
        bnb(edited(state, lambda value: value.float())): ("is no text",),
        bnb(says(shape=[64, 64, 1])): ("says shape [64, 64, 1]",),
        bnb(says(shape=[64, -64])): ("says shape [64, -64]",),
        bnb(says(shape=[1 << 40, 1 << 40])): (" bytes, and a weight of shape [1099511627776, 1099511627776]",),
        bnb(says(shape="ab")): ("says shape ['a', 'b']",),
        bnb(says(nested_offset=float("nan"))): ("nested_offset nan",),
        bnb(says(dtype="int8")): ("says dtype 'int8'",),
        bnb(says(shape=[32, 128])): ("shape [32, 128]", "the model has [64, 64] there"),
        bnb(says(shape=[64 * 64, 1])): ("has numbers of two rows",),
    }  # fmt: skip
    for method, dtype in (("gptq", torch.int32), ("awq", torch.int32), ("fp8", torch.float8_e4m3fn)):
        folder = shutil.copytree(folders(), tmp_path / method)
        save_file({FIRST: torch.zeros(64, 8, dtype=dtype)}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
        cases[str(folder)] = (f"names {method}", "parallelize(..., quantize=) packs")
    calls = [("load_weights", folder, {}) for folder in cases]
    for options in ({}, {"quantize": None}):
        told = ranks.run(refusals, 1, "dp_shard=1", calls, **options)[0]
        for (folder, words), answer in zip(cases.items(), told, strict=True):
            assert answer.startswith("CheckpointError") and folder in answer, answer
            assert all(word in answer for word in words), answer


def test_values_that_cannot_be_packed_withhold_the_model_until_others_are_loaded(ranks, tmp_path, folders):
    for i, bad in enumerate((float("nan"), 1e39)):  # infinite where it is packed
        folder = shutil.copytree(folders(), tmp_path / str(i))
        state, name = base().state_dict(), "model.layers.1.mlp.up_proj.weight"
        state[name] = state[name].double()
        state[name][-1, -1] = bad  # on the last rank
        save_file(state, folder / "model.safetensors")
        for answers in ranks.run(packing.left_half, 2, "dp_shard=2", str(folder), folders()):
            refused, withheld, used = answers
            assert f"{name}: {folder}: 1 numbers in rows" in refused and "NaN or infinite" in refused
            assert "weights were not loaded whole" in withheld and used == ""


def test_what_has_no_form_or_two_is_refused(ranks, tmp_path, folders):
    state = base().state_dict()
    parts = packed(weights(state))
    rest = {name: value for name, value in state.items() if name not in weights(state)}
    few = {name: value for name, value in {**rest, **parts}.items() if name != f"{FIRST}_nf4_outer"}
    cases = [
        ("load_full_state_dict", {**state, f"{FIRST}_nf4": parts[f"{FIRST}_nf4"]}, ("in two forms",)),
        ("load_full_state_dict", few, ("1 of 91 ", f"are missing: {FIRST}_nf4_outer\n")),
        ("load_full_state_dict", {**rest, **weights(state, FIRST)}, ("1 of 49 ", f"are missing: {FIRST}\n")),
        ("load_full_state_dict", {**state, FIRST: torch.zeros(64, 63)}, ("shape [64, 63]",)),
        ("load_full_state_dict", {**state, FIRST: torch.zeros(64, 64, dtype=torch.int64)}, ("dtype int64",)),
        ("save_weights", str(tmp_path / "merged"), ("packing the merged weights again", "merge=False, packed=True")),
        ("load_weights", {**state, FIRST: torch.full((64, 64), torch.nan)}, ("a state dict: ", "NaN or infinite")),
    ]
    calls = [(name, given, {"packed": True} if name == "save_weights" else {}) for name, given, _ in cases]
    for (*_, words), told in zip(cases, ranks.run(refusals, 1, "dp_shard=1", calls)[0], strict=True):
        assert all(word in told for word in words), told
    calls = [("save_weights", str(tmp_path / "plain"), {"packed": True, "merge": False})]
    assert "without packed weights" in ranks.run(refusals, 1, "dp_shard=1", calls, quantize=None)[0][0]
    calls = [("load_full_state_dict", {**rest, **parts}, {})]
    assert "are parts of packed weights" in ranks.run(refusals, 1, "dp_shard=1", calls, quantize=None)[0][0]
    odd, *others = ranks.run(packing.odd, 1, str(tmp_path / "odd"))[0]
    assert "a weight of 5 inputs" in odd
    assert all("UnsupportedError" in told and "a model with packed weights and " in told for told in others)
    assert not [*tmp_path.iterdir()]
