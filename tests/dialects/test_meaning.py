"""What keys mean together: switches of sections, the order of keys, defaults there that no key says, and lengths that nobody says."""

import json
from typing import Any

import pytest
from dialect_files import BASE, put, values_of, with_key

from shardwise.config.loader import UNWRITTEN
from shardwise.dialects.answers import imported
from shardwise.dialects.table import load
from shardwise.dialects.values import word_of
from shardwise.errors import ShardwiseError
from shardwise.run.imported import from_config

RANKS = {"ranks": 8, "ranks_per_node": 4}


def found(made: Any) -> dict[str, Any]:
    return {one.key: one for one in made.findings}


# ---- switches ------------------------------------------------------------------------------------------------------------

OUMI = {
    "model": {"model_name": "m"},
    "training": {"trainer_type": "HF", "max_steps": 5, "per_device_train_batch_size": 2},
}
DEEPSPEED = {
    "enable_deepspeed": False,
    "zero_stage": "ZERO_3",
    "precision": "BF16",
    "gradient_clipping": 0.3,
    "offload_optimizer": {"device": "CPU"},
}
FSDP = {"enable_fsdp": False, "cpu_offload": True, "mixed_precision": "bf16"}
OFF: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("oumi", OUMI, {"deepspeed": DEEPSPEED, "fsdp": FSDP}),
    ("oumi", OUMI, {"fsdp": {"cpu_offload": True}}),
    ("oumi", OUMI, {"peft": {"lora_r": 64, "q_lora": True}}),
    ("accelerate", {"distributed_type": "MULTI_GPU"}, {"fsdp_config": {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True}}),
    ("accelerate", {"distributed_type": "MULTI_GPU"}, {"deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}}),
    ("accelerate", {"distributed_type": "FSDP"}, {"deepspeed_config": {"gradient_clipping": 0.5}}),
    ("transformers", {"output_dir": "o", "max_steps": 5, "fsdp": ""}, {"fsdp_config": {"offload_params": True, "activation_checkpointing": True}}),
    ("deepspeed", {"zero_optimization": {"stage": 3}, "train_batch_size": 8}, {"bf16": {"enabled": False, "check_grad_overflow": True}}),
    ("torchtitan", {"training": {"steps": 1000}}, {"checkpoint": {"initial_load_path": "w"}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "base", "more"), OFF)
def test_a_section_that_is_switched_off_has_no_effect_and_that_is_said(name, base, more):
    made = from_config(base | more, dialect=name, **RANKS)
    assert made.run == from_config(base, dialect=name, **RANKS).run
    switches = {said.partition(":")[0] for said in load(name).pairs("switches").values()}
    said = [one for key, one in found(made).items() if one.given and key.startswith((*more,)) and key not in switches]
    assert said and all(one.verdict == "dropped" and "it has no effect there with " in one.say for one in said)


def test_a_switch_that_is_on_or_auto_leaves_its_section():
    made = from_config(OUMI | {"deepspeed": DEEPSPEED | {"enable_deepspeed": True}}, dialect="oumi", **RANKS)
    assert made.run["parallel"]["sharding"]["offload"] is True and made.run["train"]["max_grad_norm"] == 0.3
    inner = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto", "initial_scale_power": 10}}
    outer = {"output_dir": "o", "max_steps": 5, "fp16": True, "deepspeed": inner}
    assert from_config(outer, dialect="transformers", **RANKS).run["train"]["scaler"]["init_scale"] == 1024.0


def test_variables_of_a_plugin_that_is_not_used_have_no_effect_but_accumulation_has():
    made = from_config(
        environ={
            "ACCELERATE_USE_FSDP": "false",
            "FSDP_OFFLOAD_PARAMS": "true",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        },
        **RANKS,
    )
    assert "sharding" not in made.run["parallel"] and made.layout == "dp_replicate=-1"
    assert found(made)["gradient_accumulation_steps"].verdict == "changed"


@pytest.mark.parametrize("name", BASE)
def test_no_key_of_a_section_counts_where_its_enabled_is_false(name):
    """Of all switches that are called so, not only those that the head names."""
    table, spoilt = load(name), []
    harmless = ("validation.dataset_path", "checkpoint.checkpoint_dir")  # where files are, of what does not run
    for switch in [
        key for key in table.plain_keys if key.endswith((".enable", ".enabled")) and not table.rows[key].alias
    ]:
        values = with_key(name, switch, False)
        base = from_config(values, dialect=name, **RANKS).run
        section = switch.rpartition(".")[0]
        for key in [
            key for key in table.plain_keys if key.startswith(f"{section}.") and key not in (switch, *harmless)
        ]:
            if table.rows[key].alias:
                continue
            for value in values_of(table.rows[key]):
                beside = with_key(name, switch, False)
                put(beside, key, value)
                try:
                    spoilt += [(key, value)] if from_config(beside, dialect=name, **RANKS).run != base else []
                except ShardwiseError:
                    continue
    assert spoilt == []


# ---- the order of keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("is_file", [True, False])
def test_the_optimizer_of_deepspeed_decays_all_wherever_the_decay_is_written(is_before, is_file):
    inner = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    }
    outer = {"output_dir": "o", "max_steps": 5, "per_device_train_batch_size": 2, "weight_decay": 0.1}
    sources = [outer, inner] if is_file else [outer | {"deepspeed": inner}]
    if is_before:
        sources = sources[::-1] if is_file else [{"deepspeed": inner} | outer]
    optim = from_config(*sources, **RANKS).run["optim"]
    assert optim["weight_decay"] == 0.1 and "decay_on" not in optim


def test_a_file_that_the_launcher_names_is_filled_in_by_the_run_around_it(tmp_path):
    params = {"lr": "auto", "weight_decay": "auto"}
    inner = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": params}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    launcher = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")},
    }
    outer = {"output_dir": "o", "max_steps": 5, "weight_decay": 0.1, "learning_rate": 3e-4}
    for sources in ([launcher, outer], [outer, launcher]):
        optim = from_config(*sources).run["optim"]
        assert (optim["lr"], optim["weight_decay"]) == (3e-4, 0.1) and "decay_on" not in optim
    with pytest.raises(ShardwiseError, match="another configuration fills it in"):
        from_config(launcher)


# ---- defaults there ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BASE if name != "fsdp1"])
def test_a_default_there_that_is_changed_is_said(name):
    """Also where nothing is settled by it, since ours has no key for it."""
    table = load(name)
    for section, row in table.defaults:
        word = word_of(row.usual) if not row.alias else ""
        if row.alias or row.answer_of(word)[0] != "changed" or row.action_of(word) or section:
            continue
        values = dict(BASE[name])
        if row.key in values:
            continue
        made = from_config(values, dialect=name, **RANKS)
        assert row.key in found(made) or row.key in table.pairs("switches"), row.key


def test_what_is_trained_on_by_default_there_is_said():
    trl = {"output_dir": "o", "per_device_train_batch_size": 4, "num_train_epochs": 1, "dataset_name": "x"}
    said = found(from_config(trl, dialect="trl", **RANKS))["assistant_only_loss"]
    assert said.verdict == "changed" and "there all of it" in said.say
    data = {"data": {"train": {"datasets": [{"dataset_name": "text_sft", "dataset_path": "d.jsonl"}]}}}
    said = found(from_config(OUMI | data, dialect="oumi", **RANKS))["data.train.collator_name"]
    assert said.verdict == "changed" and "there all of it" in said.say


@pytest.mark.parametrize(
    ("dataset", "is_said"),
    [
        ({"_component_": "torchtune.datasets.alpaca_dataset"}, True),
        ({"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "train_on_input": True}, True),
        ({"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": False}, False),
        ({"_component_": "torchtune.datasets.chat_dataset"}, False),
    ],
)
def test_prompts_that_are_trained_on_there_are_said_by_default_as_where_it_is_written(dataset, is_said):
    made = from_config(BASE["torchtune"] | {"dataset": dataset}, dialect="torchtune", **RANKS)
    said = [one.verdict for one in made.findings if "prompts are trained on there, here only answers" in one.say]
    assert said == (["changed"] if is_said else [])


def test_prompts_that_are_asked_for_against_the_default_there_are_refused():
    dataset = {"_component_": "torchtune.datasets.chat_dataset", "train_on_input": True}
    with pytest.raises(ShardwiseError, match="write the whole as one text") as refused:
        from_config(BASE["torchtune"] | {"dataset": dataset}, dialect="torchtune", **RANKS)
    assert "dataset.train_on_input" in refused.value.given


def test_nothing_is_clipped_where_nothing_is_there():
    for name, values in (
        ("fabric", {"strategy": "ddp", "devices": 4, "max_epochs": 3, "precision": "bf16-mixed"}),
        ("accelerate", {"distributed_type": "FSDP", "num_processes": 4}),
    ):
        assert from_config(values, dialect=name).run["train"]["max_grad_norm"] is None
    made = from_config({"strategy": "ddp", "devices": 4, "gradient_clip_val": 0.5}, dialect="fabric")
    assert made.run["train"]["max_grad_norm"] == 0.5


@pytest.mark.parametrize("name", ["torchtune", "nemo"])
@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        ("AdamW", 0.01),
        ("Adam", 0.0),
        ("SGD", 0.0),
        ("Muon", 0.1),
        ("Adafactor", 0.0),
        ("RMSprop", None),
        ("NAdam", None),
    ],
)
def test_weight_decay_is_that_of_the_class_where_none_is_written(name, optimizer, decay):
    key = {"torchtune": "_component_", "nemo": "_target_"}[name]
    values = BASE[name] | {"optimizer": {key: f"torch.optim.{optimizer}", "lr": 0.001}}
    assert imported(values, dialect=name, **RANKS).run["optim"].get("weight_decay") == decay


@pytest.mark.parametrize(
    ("params", "decay"), [({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.2}, 0.2)]
)
def test_torch_adam_of_deepspeed_has_the_decay_of_torch(params, decay):
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **params}}}
    values = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
    assert from_config(values | optimizer, dialect="deepspeed", **RANKS).run["optim"]["weight_decay"] == decay


@pytest.mark.parametrize("name", ["torchtune", "nemo"])
def test_arguments_of_a_class_of_another_package_are_all_written(name):
    key = {"torchtune": "_component_", "nemo": "_target_"}[name]
    given = {"betas": [0.8, 0.9], "eps": 1e-5, "momentum": 0.9, "block_wise": True, "percentile_clipping": 5}
    values = BASE[name] | {
        "optimizer": {key: "bitsandbytes.optim.PagedAdamW8bit", "lr": 0.001, "weight_decay": 0.2, **given}
    }
    made = from_config(values, dialect=name, **RANKS)
    assert made.run["optim"] == {
        "build": "bitsandbytes.optim:PagedAdamW8bit", "args": given, "lr": 0.001, "weight_decay": 0.2,
    }  # fmt: skip
    assert all(found(made)[f"optimizer.{name}"].ours[0].startswith("optim.args=") for name in given)


@pytest.mark.parametrize(("trainer", "momentum"), [("HF", 0.0), ("TRL_SFT", 0.0), ("OUMI", 0.9)])
def test_the_momentum_of_oumi_is_read_by_its_own_trainer_alone(trainer, momentum):
    training = OUMI["training"] | {"trainer_type": trainer, "optimizer": "sgd", "sgd_momentum": 0.9}
    made = from_config(OUMI | {"training": training}, dialect="oumi", **RANKS)
    assert made.run["optim"]["momentum"] == momentum
    assert found(made)["training.sgd_momentum"].verdict == ("kept" if momentum else "dropped")


# ---- lengths -------------------------------------------------------------------------------------------------------------

TUNE = {"torchtune": "tokenizer.max_seq_len", "oumi": "model.model_max_length", "trl": "max_length"}


@pytest.mark.parametrize(("name", "key"), TUNE.items())
def test_a_length_that_is_not_said_is_missing_and_null_is_not_kept(name, key):
    made = from_config(with_key(name, key, None), dialect=name, **RANKS)
    assert made.run["data"]["seq_len"] == UNWRITTEN and found(made)[key].verdict == "changed"
    assert [text for text in made.missing if text.startswith("data.seq_len: ")]
    made = from_config(with_key(name, key, 512), dialect=name, **RANKS)
    assert made.run["data"]["seq_len"] == 511 and not any(text.startswith("data.seq_len") for text in made.missing)


@pytest.mark.parametrize("name", ["transformers", "nemo", "oumi", "torchtune", "ml", "optimus"])
def test_a_run_without_a_length_says_so(name):
    made = from_config(BASE[name], dialect=name, **RANKS)
    assert (made.run["data"]["seq_len"] == UNWRITTEN) == any(text.startswith("data.seq_len: ") for text in made.missing)


# ---- what a run file is that somebody else's file becomes ----------------------------------------------------------------

TITAN = {"training": {"steps": 10, "dataset": "d.jsonl", "seq_len": 64}, "model": {"hf_assets_path": "m"}}


@pytest.mark.parametrize(
    ("path", "more", "is_packed"),
    [("d.jsonl", {}, True), ("d.npy", {}, False), ("d.txt", {}, False), ("d.jsonl", {"context_parallel_degree": 2}, False)],
)  # fmt: skip
def test_records_of_one_buffer_share_samples(path, more, is_packed):
    values = TITAN | {"training": TITAN["training"] | {"dataset": path}, "parallelism": more}
    made = from_config(values, dialect="torchtitan", **RANKS)
    assert made.run["data"].get("pack", False) is is_packed
    assert "of conversations only answers are trained on" in found(made)["(data)"].say


def test_a_rise_is_no_longer_than_the_run_where_there_it_is_not():
    made = from_config(TITAN, dialect="torchtitan", **RANKS)
    assert made.run["schedule"]["warmup_steps"] == 9
    assert "rises over all 10 steps" in found(made)["lr_scheduler.warmup_steps"].say
    with pytest.raises(ShardwiseError, match="write fewer") as refused:
        from_config({"output_dir": "o", "max_steps": 5, "warmup_steps": 9}, dialect="transformers", **RANKS)
    assert "warmup_steps=9" in refused.value.given


@pytest.mark.parametrize(
    ("given", "is_exact"),
    [
        ({"max_steps": 1000}, False),
        ({"max_steps": 1000, "warmup_steps": 4}, True),  # a quarter of the rate in one step
        ({"num_train_epochs": 2, "warmup_steps": 100}, False),
        ({"num_train_epochs": 2, "warmup_ratio": 0.1}, True),
    ],
)
def test_a_curve_that_is_far_off_or_of_unknown_length_is_theirs(given, is_exact):
    made = from_config({"output_dir": "o", **given}, dialect="transformers", **RANKS)
    assert ("build" in made.run["schedule"]) is is_exact
    said = getattr(found(made).get("lr_scheduler_type"), "say", "")
    assert ("of the highest rate off" in said) is ("max_steps" in given and not is_exact)


@pytest.mark.parametrize(
    ("key", "value"),
    [("logging_steps", -3), ("logging_steps", 1.5), ("save_steps", -1), ("warmup_steps", 1.5), ("warmup_steps", -0.5), ("warmup_ratio", -0.1)],
)  # fmt: skip
def test_a_number_that_the_key_does_not_take_is_refused(key, value):
    with pytest.raises(ShardwiseError, match="write ") as refused:
        from_config({"output_dir": "o", "max_steps": 50, key: value}, dialect="transformers", **RANKS)
    assert key in refused.value.given


def test_a_part_of_a_configuration_says_that_a_run_would_train_the_demo():
    made = from_config({"distributed_type": "FSDP", "num_processes": 4}, dialect="accelerate")
    assert any(text.startswith("model.hf or model.build, and data.path: ") for text in made.missing)
    assert not any("demo" in text for text in from_config(TITAN, dialect="torchtitan", **RANKS).missing)


def test_a_run_file_of_ours_and_a_file_of_another_system_are_told():
    with pytest.raises(ShardwiseError, match="it is a run file of Shardwise already"):
        from_config({"model": {"hf": "m"}, "data": {"seq_len": 8}, "parallel": {"layout": "dp_shard=-1"}})
    values = {"output_dir": "o", "max_length": 64, "packing": True, "max_steps": 3, "use_peft": True}
    with pytest.raises(ShardwiseError, match="this looks like trl"):
        from_config(values, dialect="accelerate", **RANKS)
