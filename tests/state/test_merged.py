"""Adapters merged into stored weights without ranks: the bits of ``save_weights`` of a model that has them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from state.adapting import CASES, base, saved
from techniques.lora import experts

import shardwise as sw
from shardwise.cli.main import main
from shardwise.state.files import OpenFiles
from shardwise.state.merged import with_adapter
from shardwise.state.source import open_source


@pytest.mark.quick("dora", "tied")
@pytest.mark.parametrize("case", [case for case in CASES if case != "table"])
def test_convert_merges_to_the_bits_of_save_weights(ranks, tmp_path, case, capsys):
    base(case).save_pretrained(tmp_path / "from")
    ranks.run(saved, 2, case, "dp_shard=2", str(tmp_path), str(tmp_path / "from"))
    if case == "trained":  # the base that they are beside has other values of what is trained
        assert not torch.equal(
            load_file(tmp_path / "from/model.safetensors")["model.norm.weight"],
            load_file(tmp_path / "base/model.safetensors")["model.norm.weight"],
        )
    words = [
        "convert",
        str(tmp_path / "base"),
        str(tmp_path / "result"),
        "--adapter",
        str(tmp_path / "adapter"),
        "--verify",
    ]
    assert main(words) == 0, capsys.readouterr()
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("result", "merged"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert (tmp_path / "result/config.json").exists()


def test_what_cannot_be_merged_into_stored_weights(ranks, tmp_path):
    base("table").save_pretrained(tmp_path / "from")
    ranks.run(saved, 1, "table", "dp_shard=1", str(tmp_path), str(tmp_path / "from"))
    with pytest.raises(sw.UnsupportedError, match="it is an embedding"):
        with_adapter(open_source(tmp_path / "from"), tmp_path / "adapter")


def test_a_base_whose_names_begin_otherwise(ranks, tmp_path):
    """As of the model without its head: ``layers.0...`` for ``model.layers.0...``."""
    base("lora").model.save_pretrained(tmp_path / "from")
    ranks.run(saved, 1, "lora", "dp_shard=1", str(tmp_path))
    source = with_adapter(open_source(tmp_path / "from"), tmp_path / "adapter")
    wanted = load_file(tmp_path / "merged/model.safetensors")
    with OpenFiles() as files:
        for name, stored in source.tensors.items():
            assert torch.equal(stored.load(files), wanted[f"model.{name}"]), name


@pytest.mark.parametrize("first", ["", "model."])
def test_adapters_of_attention_of_torch(ranks, tmp_path, first):
    ranks.run(experts.of_attention, 1, "dp_shard=1", str(tmp_path))
    state = experts.whole(experts.Encoder, sw.LoRA(rank=2, targets=("self_attn", "linear1"))).state_dict()
    save_file({first + n: v for n, v in state.items() if "lora_" not in n}, tmp_path / "from.safetensors")
    source = with_adapter(open_source(tmp_path / "from.safetensors"), tmp_path / "adapter")
    wanted = load_file(tmp_path / "merged/model.safetensors")
    assert source.tensors.keys() == {first + name for name in wanted}
    with OpenFiles() as files:
        for name, stored in source.tensors.items():
            assert torch.equal(stored.load(files), wanted[name.removeprefix(first)]), name


def test_a_tied_tensor_that_was_trained_as_two_is_refused(ranks, tmp_path):
    base("tied").save_pretrained(tmp_path / "from")
    ranks.run(saved, 1, "tied", "dp_shard=1", str(tmp_path), str(tmp_path / "from"))
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: v + 1 if n.endswith("lm_head.weight") else v for n, v in tensors.items()}, file)
    with pytest.raises(sw.CheckpointError, match=r"(?s)lm_head\.weight: .*has no such tensor") as caught:
        with_adapter(open_source(tmp_path / "from"), tmp_path / "adapter")
    assert "tie" in caught.value.why


@pytest.mark.parametrize("said", [True, None, False, "no head"])
def test_a_table_that_was_trained_apart_from_its_head_is_refused(tmp_path, said):
    """As PEFT trains a copy of a module in ``modules_to_save``: the head keeps the base's values."""
    base("tied").save_pretrained(tmp_path / "from")
    config = json.loads((tmp_path / "from/config.json").read_text())
    config.pop("tie_word_embeddings")
    more = {} if said is None else {"tie_word_embeddings": bool(said)}
    more |= {"architectures": ["LlamaForSequenceClassification"]} if said == "no head" else {}
    (tmp_path / "from/config.json").write_text(json.dumps(config | more))
    table = load_file(tmp_path / "from/model.safetensors")["model.embed_tokens.weight"]
    adapter, layer = tmp_path / "adapter", "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight".format
    adapter.mkdir()
    tensors = {
        layer("A"): torch.zeros(2, 24),
        layer("B"): torch.zeros(24, 2),
        "base_model.model.model.embed_tokens.weight": table + 1,
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    for keeps in (False, True):
        option = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": keeps,
        }
        (adapter / "adapter_config.json").write_text(json.dumps(option))
        if keeps or said in (False, "no head"):
            with OpenFiles() as files:
                found = with_adapter(open_source(tmp_path / "from"), adapter).tensors["model.embed_tokens.weight"]
                assert torch.equal(found.load(files), table + 1)
        else:
            with pytest.raises(
                sw.CheckpointError, match=r"model\.embed_tokens\.weight trained apart from the model's head"
            ):
                with_adapter(open_source(tmp_path / "from"), adapter)


def test_a_damaged_checkpoint_is_noticed_beside_adapters_too(tmp_path, capsys):
    save_file({"layer.weight": torch.ones(400, 400)}, tmp_path / "from.safetensors")  # two blocks with a checksum each
    checkpoint, adapter = tmp_path / "step-00000001", tmp_path / "adapter"
    assert main(["convert", str(tmp_path / "from.safetensors"), str(checkpoint), "--to", "shardwise"]) == 0
    key = "base_model.model.layer.lora_{}.weight".format
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    save_file({key("A"): torch.ones(2, 400), key("B"): torch.ones(400, 2)}, adapter / "adapter_model.safetensors")
    words = ["convert", str(checkpoint), str(tmp_path / "result"), "--adapter", str(adapter), "--overwrite"]
    assert main(words) == 0
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2000] ^= 64
    file.write_bytes(content)
    capsys.readouterr()
    assert main(words) != 0 and "model.safetensors" in capsys.readouterr().err


def test_another_base_is_refused(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    key = "base_model.model.layer.lora_{}.weight".format
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    save_file({key("A"): torch.ones(2, 4), key("B"): torch.ones(6, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(sw.CheckpointError, match="names there look like other"):
        with_adapter(open_source({"other": torch.ones(6, 4)}), adapter)
    with pytest.raises(sw.CheckpointError, match=r"has \[5, 4\] there"):
        with_adapter(open_source({"layer.weight": torch.ones(5, 4)}), adapter)
    for turned in (False, True):
        weight = torch.ones(6, 4, dtype=torch.bfloat16)
        source = with_adapter(open_source({"layer.weight": weight.t().contiguous() if turned else weight}), adapter)
        with OpenFiles() as files:
            assert torch.equal(
                source.tensors["layer.weight"].load(files), torch.full((4, 6) if turned else (6, 4), 5.0).bfloat16()
            )
    shared = tmp_path / "shared.pt"
    weight = torch.ones(6, 4)
    torch.save({"layer.weight": weight, "tied.weight": weight}, shared)
    with pytest.raises(sw.UnsupportedError, match=r"also tied\.weight"):
        with_adapter(open_source(shared), adapter)
