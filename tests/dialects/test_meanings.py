"""What an import says of a key is true of the run that it makes: keys that depend on others, classes of other packages, formats, and
errors whose fix works."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialect_files import BASE, put, values_of

from shardwise.config.loader import UNWRITTEN
from shardwise.dialects.settle_run import OF_OPTIMIZER
from shardwise.dialects.table import load
from shardwise.errors import ConfigError
from shardwise.run.imported import from_config

TRAINER = {"output_dir": "o", "max_steps": 100, "per_device_train_batch_size": 2}
ZERO = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}


def made_of(name, given=(), *, ranks=2, **more):
    values = deepcopy(BASE[name])
    for key, value in {**dict(given), **more}.items():
        put(values, key, value)
    return from_config(values, dialect=name, ranks=ranks, ranks_per_node=ranks)


def answers(made):
    return {one.key: one for one in made.findings}


# ---- how long a run is -------------------------------------------------------------------------------------------------

SHORTER = [
    ("torchtune", {"max_steps_per_epoch": 50, "epochs": 3}, 150, "max_steps_per_epoch"),
    ("nemo", {"step_scheduler.max_steps": 300}, 300, "step_scheduler.num_epochs"),
    ("fabric", {"max_steps": 40, "max_epochs": 3}, 40, "max_epochs"),
    ("ml", {"task.finished.max_epochs": 3}, 100, "task.finished.max_epochs"),
]


@pytest.mark.parametrize(("name", "given", "steps", "key"), SHORTER)
def test_a_run_that_ends_at_the_earlier_of_steps_and_epochs_there_says_so(name, given, steps, key):
    made = made_of(name, given)
    found = answers(made)[key]
    epochs = made_of(name, given).run["train"].get("epochs")
    assert made.run["train"]["steps"] == steps and epochs is None
    assert found.verdict == "changed" and f"{steps} steps, there the shorter of them" in found.say


@pytest.mark.parametrize(("name", "key"), [("transformers", "num_train_epochs"), ("torchtune", "epochs"), ("oumi", "training.num_train_epochs")])  # fmt: skip
def test_a_run_of_no_epoch_is_refused(name, key):
    values = deepcopy(BASE[name])
    values.pop("max_steps", None)
    values.get("training", {}).pop("max_steps", None)
    put(values, key, 0)
    with pytest.raises(ConfigError, match="nothing would be trained") as refused:
        from_config(values, dialect=name, ranks=2)
    assert f"{key}=0" in refused.value.given


# ---- data and weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    ("name", "section", "item"),
    [
        ("torchtune", "dataset", {"source": "json", "data_files": "d.jsonl"}),
        ("oumi", "data.train", {"dataset_name": "text", "dataset_path": "d.jsonl"}),
    ],
)
def test_the_file_itself_counts_in_every_order_of_keys(name, section, item, turn):
    item = dict([*item.items()][::turn])
    made = made_of(name, {section: {"datasets": [item]} if name == "oumi" else item})
    assert made.run["data"]["path"] == "d.jsonl"


def test_weights_in_a_format_that_is_not_read_are_no_model():
    for kind, directory in (("FullModelMetaCheckpointer", "MODEL_DIRECTORY"), ("FullModelHFCheckpointer", "m")):
        made = made_of("torchtune", {"checkpointer._component_": f"torchtune.training.{kind}"})
        found = answers(made)["checkpointer.checkpoint_dir"]
        assert made.run["model"]["hf"] == directory
        assert ("the directory of the same model" in found.say) == (directory != "m")
        assert any("model.hf" in one for one in made.missing) == (directory != "m")


def test_layers_that_are_one_here_have_one_adapter():
    given = {"model.lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "model.apply_lora_to_mlp": True}
    made = made_of("torchtune", given | {"model._component_": "torchtune.models.phi3.lora_phi3_mini"})
    assert made.run["parallel"]["lora"]["targets"] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert "are one layer each here" in answers(made)["model.lora_attn_modules"].say
    made = made_of("torchtune", given | {"model._component_": "torchtune.models.llama3.lora_llama3_8b"})
    assert made.run["parallel"]["lora"]["targets"][:2] == ["q_proj", "v_proj"]


# ---- optimizer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "build"), [(None, None), (False, "torch.optim:Adam")])
def test_a_fused_class_with_arguments_that_torch_does_not_have(mode, build):
    fused = {
        "_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "lr": 1e-4,
        "exp_avg_dtype": "bfloat16",
    }
    fused |= {"master_weights": True, "store_param_remainders": True}
    made = made_of("nemo", optimizer=fused if mode is None else fused | {"adam_w_mode": mode, "weight_decay": 0.1})
    optim = made.run["optim"]
    assert optim.get("build") == build and not {"master_weights", "exp_avg_dtype"} & {*optim.get("args", {})}
    assert optim["weight_decay"] == (0.0 if mode is None else 0.1)  # its own default
    assert answers(made)["optimizer.exp_avg_dtype"].verdict == "changed"


def test_only_arguments_that_an_optimizer_gets_are_shown_with_it():
    made = made_of("nemo", optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True})
    shown = {key for key, one in answers(made).items() if any("optim.args" in ours for ours in one.ours)}
    assert shown == {"optimizer.nesterov", "optimizer.momentum"}


def test_a_rate_that_the_scheduler_overwrites_does_not_count():
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    for params, lr in (({}, 1e-3), ({"warmup_max_lr": 5e-4}, 5e-4)):
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10, **params}}
        made = from_config(ZERO | {"optimizer": optimizer, "scheduler": scheduler}, dialect="deepspeed", ranks=2)
        found = answers(made)["optimizer.params.lr"]
        assert (made.run["optim"]["lr"], found.verdict, found.ours) == (lr, "dropped", ())
        assert found.say.startswith("scheduler.") and found.say.endswith("counts there")


FILLED_IN = [
    ("transformers", {"max_steps": 500, "warmup_steps": 0.1}, {"warmup": 50}),
    ("transformers", {"max_steps": 500, "warmup_steps": 30.0}, {"warmup": 30}),
    ("trl", {"max_steps": 505, "warmup_ratio": 0.1}, {"warmup": 51}),
    ("trl", {"num_train_epochs": 2, "warmup_ratio": 0.1}, {"warmup": 0, "warmup_ratio": 0.1}),
    ("transformers", {"num_train_epochs": 2, "warmup_steps": 0.1}, {"warmup": 0, "warmup_ratio": 0.1}),
    ("transformers", {"max_steps": 500}, {"warmup": 0}),
]


@pytest.mark.parametrize(("name", "given", "rise"), FILLED_IN)
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_rise_that_the_run_fills_in_is_as_long_as_there(name, given, rise, kind, is_file):
    inner = ZERO_2 | {"scheduler": {"type": kind, "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
    outer = {"output_dir": "o", "per_device_train_batch_size": 2, **given}
    sources = [outer, inner] if is_file else [outer | {"deepspeed": inner}]
    args = from_config(*sources, dialect=name, ranks=2, exact=True).run["schedule"]["args"]
    assert {key: args.get(key) for key in ("warmup", "warmup_ratio")} == {"warmup_ratio": None, **rise}


@pytest.mark.parametrize(
    ("given", "rise"),
    [
        ({"step_scheduler": {"num_epochs": 2}}, {"warmup": 0, "warmup_ratio": 0.1}),
        ({"step_scheduler": {"max_steps": 305}}, {"warmup": 30}),
        ({"step_scheduler": {"max_steps": 305}, "lr_scheduler.lr_decay_steps": 200}, {"warmup": 30}),
        ({"step_scheduler": {"num_epochs": 2}, "lr_scheduler.lr_warmup_steps": 7}, {"warmup": 7}),
    ],
)
def test_a_rise_by_default_is_a_part_of_the_run_whose_length_is_known_when_it_starts(given, rise):
    args = made_of("nemo", given).run["schedule"]["args"]
    assert {key: args.get(key) for key in ("warmup", "warmup_ratio")} == {"warmup_ratio": None, **rise}


def test_a_rise_in_steps_counts_and_not_the_one_as_a_part():
    made = made_of("transformers", TRAINER, warmup_steps=10, warmup_ratio=0.2)
    found = answers(made)["warmup_ratio"]
    assert (found.verdict, found.ours) == ("dropped", ())
    assert answers(made_of("transformers", TRAINER, warmup_ratio=0.2))["warmup_ratio"].verdict == "kept"


@pytest.mark.parametrize(("name", "key"), [("torchtune", "clip_grad_norm"), ("oumi", "training.max_grad_norm")])
def test_a_clip_at_infinity_is_none(name, key):
    assert made_of(name, {key: "inf"}).run["train"]["max_grad_norm"] is None


# ---- precision --------------------------------------------------------------------------------------------------------------

MISMATCHES = [
    ({"bf16": False}, {"bf16": {"enabled": True}}),
    ({"bf16": True}, {"bf16": {"enabled": False}}),
    ({"bf16": True}, {"fp16": {"enabled": True}}),
    ({"fp16": False}, {"fp16": {"enabled": True}}),
]


@pytest.mark.parametrize("name", ["transformers", "trl"])
@pytest.mark.parametrize(("outer", "inner"), MISMATCHES)
def test_a_file_within_that_says_another_precision_is_refused(name, outer, inner):
    given = {key: value for key, value in TRAINER.items() if key != "per_device_train_batch_size"}
    with pytest.raises(ConfigError, match="contradicts"):
        from_config(given | outer | {"deepspeed": ZERO | inner}, dialect=name, ranks=1)


def test_what_is_said_of_precision_is_of_the_engine_that_there_is():
    """Under ZeRO nothing is autocast, and where the dtype of sums is given it is not another."""
    for name, given in (("transformers", TRAINER | {"bf16": True}), ("trl", TRAINER | {"bf16": True})):
        say = answers(made_of(name, given))["bf16"].say
        assert "autocast" in say
        made = made_of(
            name, given | {"fsdp": None, "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}}
        )
        assert "autocast" not in answers(made)["bf16"].say and "there in bf16" in answers(made)["bf16"].say
    launcher = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 2}}
    say = answers(from_config(launcher, dialect="accelerate", ranks=2))["mixed_precision"].say
    assert "autocast" not in say and "there in bf16" in say
    low = ZERO | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    made = from_config(low, dialect="deepspeed", ranks=2)
    assert made.run["parallel"]["precision"]["reduce"] == "bf16"
    assert "fp32" not in answers(made)["bf16.enabled"].say


LOW = {"output_dir": "o", "max_steps": 9, "dtype": "bfloat16"}
ZERO_2 = {"zero_optimization": {"stage": 2}}
FSDP = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
OUMI = {"model": {"model_name": "m", "torch_dtype_str": "bfloat16"}, "fsdp": {"enable_fsdp": True}}
RAISED = [
    ([LOW | {"bf16": True}], False),
    ([LOW | {"fsdp": "full_shard"}], False),
    ([LOW | {"fsdp": "full_shard", "bf16": True}], True),
    ([LOW | {"fsdp": "no_shard", "fp16": True}], True),
    ([LOW, FSDP], True),
    ([LOW, FSDP | {"mixed_precision": "no"}], False),
    ([LOW, FSDP | {"distributed_type": "MULTI_GPU"}], False),
    ([LOW | {"deepspeed": ZERO_2}], True),  # a copy in float32 whatever computes
    ([LOW | {"bf16": True, "deepspeed": ZERO_2 | {"bf16": {"enabled": "auto"}}}], True),
    ([LOW | {"deepspeed": {"zero_optimization": {"stage": 0}}}], False),
    ([LOW | {"deepspeed": ZERO_2 | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}}], False),
    ([OUMI | {"training": {"max_steps": 9, "mixed_precision_dtype": "BF16"}}], True),
    ([OUMI | {"training": {"max_steps": 9, "mixed_precision_dtype": "BF16", "trainer_type": "OUMI"}}], False),
    ([{"strategy": "deepspeed_stage_2", "precision": "bf16-true", "devices": 2}], True),
    ([{"strategy": "fsdp", "precision": "bf16-true", "devices": 2}], False),
]


@pytest.mark.parametrize(("sources", "is_raised"), RAISED)
def test_what_is_loaded_in_less_is_updated_in_float32_where_the_engine_raises_it(sources, is_raised):
    made = from_config(*sources, dialect="fabric" if "strategy" in sources[0] else None, ranks=2)
    precision = made.run["parallel"]["precision"]
    assert precision == ("fp16" if "fp16" in sources[0] else "bf16") if is_raised else precision["storage"] == "bf16"
    said = [one for one in made.findings if any(word in one.key for word in ("dtype", "precision", "bf16"))]
    assert any("without an fp32 copy" in one.say for one in said) != is_raised
    assert is_raised or not any("summed in fp32" in one.say for one in said)


def test_weights_in_fp16_that_no_loss_is_scaled_for_are_refused():
    with pytest.raises(ConfigError, match="no loss is scaled there"):
        from_config(LOW | {"dtype": "float16", "deepspeed": ZERO_2}, ranks=2)


TP_ALONE = [
    ({"data_parallel_shard_degree": 1}, "fp32"),
    ({}, "fp32"),  # one rank is left for shards
    ({"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 4}, "fp32"),
    ({"tensor_parallel_degree": 4}, "bf16"),
    ({"tensor_parallel_degree": 4, "context_parallel_degree": 2, "data_parallel_shard_degree": 1}, "bf16"),
    ({"tensor_parallel_degree": 1}, "bf16"),
]


@pytest.mark.parametrize(("given", "precision"), TP_ALONE)
def test_mixed_precision_that_tensor_parallelism_switches_off_is_off(given, precision):
    values = {"training": {"steps": 9}, "parallelism": {"tensor_parallel_degree": 8} | given}
    made = from_config(values, dialect="torchtitan", ranks=8)
    assert made.run["parallel"]["precision"] == precision
    said = answers(made)["training.mixed_precision_param"]
    assert ("mixed precision is off there" in said.say) == (precision == "fp32")


def test_a_default_that_another_switch_replaces_is_not_shown():
    made = made_of("trl", TRAINER, fp16=True)
    assert "bf16" not in answers(made) and made.run["parallel"]["precision"] == "fp16"
    with pytest.raises(ConfigError, match="contradicts"):
        made_of("trl", TRAINER, fp16=True, bf16=True)


@pytest.mark.parametrize(("given", "word"), [({}, "bf16"), ({"bf16": False}, "fp16"), ({"fp16": True}, "fp16")])
def test_mixed_precision_of_the_run_counts_by_default_too_and_not_that_of_its_launcher(given, word):
    launcher = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16"}
    made = from_config(TRAINER | {"max_length": 64} | given, launcher, dialect="trl")
    assert made.run["parallel"]["precision"] == word
    assert (answers(made)["mixed_precision"].verdict == "dropped") == (word == "bf16")


def test_overflows_until_the_scale_shrinks_are_said_by_default_too():
    inner = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    for made in (
        from_config(ZERO | inner, dialect="deepspeed", ranks=2),
        made_of("transformers", TRAINER, fsdp=None, fp16=True, deepspeed=inner),
    ):
        (found,) = (one for one in made.findings if one.key.endswith("fp16.hysteresis"))
        assert (found.verdict, found.given) == ("changed", False)
    off = from_config(ZERO | {"fp16": {"enabled": False}}, dialect="deepspeed", ranks=2)
    assert not any(one.key == "fp16.hysteresis" for one in off.findings)


ENGINES = [
    ("nemo", {"distributed": {"_target_": "nemo_automodel.components.distributed.ddp.DDPManager"}}, "dp_replicate=-1"),
    ("nemo", {"distributed": {"strategy": "ddp"}}, "dp_replicate=-1"),
    ("nemo", {"distributed": {}}, "dp_shard=-1"),
    ("ml", {"trainer": {"parallel": {"use_fsdp": False}}}, "dp_replicate=-1"),
    ("oumi", {"fsdp": {}, "deepspeed": {"enable_deepspeed": True, "zero_stage": "ZERO_3"}}, "dp_shard=-1"),
    ("fabric", {"strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}}, "dp_replicate=-1"),
    ("optimus", {"model_transforms": [{"_name": "ddp"}]}, "dp_replicate=-1"),
]


@pytest.mark.parametrize(("name", "given", "layout"), ENGINES)
def test_an_engine_that_is_named_counts_and_not_the_default_of_another_key(name, given, layout):
    made = from_config(BASE[name] | given, dialect=name, ranks=8, ranks_per_node=8)
    assert made.layout == layout
    assert not any("no effect in this configuration" in one.say for one in made.findings if one.given)
    assert name != "nemo" or ("precision" in made.run["parallel"]) == (layout == "dp_shard=-1")


def test_two_engines_that_are_named_are_refused():
    both = {"_target_": "nemo_automodel.components.distributed.ddp.DDPManager", "strategy": "fsdp2"}
    with pytest.raises(ConfigError, match="contradicts"):
        from_config(BASE["nemo"] | {"distributed": both}, dialect="nemo", ranks=2)


# ---- ranks, variables, objects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "count"), [("0,1", 2), ("0,", 1), ([2, 3, 4], 3), ("4", 4)])
def test_devices_that_are_named_are_counted(devices, count):
    made = from_config({"strategy": "fsdp", "devices": devices, "max_steps": 10}, dialect="fabric")
    assert made.run["launch"]["nproc"] == count


def test_a_batch_that_nothing_says_needs_no_ranks():
    """Micro-batches of a step are one by default, which is no key to name in an error."""
    made = from_config({"strategy": "fsdp", "max_steps": 10}, dialect="fabric")
    assert made.run["data"] == {"seq_len": UNWRITTEN, "global_batch": UNWRITTEN}
    with pytest.raises(ConfigError, match="--ranks N") as refused:
        from_config({"strategy": "fsdp", "accumulate_grad_batches": 2}, dialect="fabric")
    assert refused.value.given == "accumulate_grad_batches=2"


def test_one_process_is_started_without_an_engine_whatever_number_is_written():
    made = from_config({"distributed_type": "NO", "num_processes": 8, "mixed_precision": "bf16"}, dialect="accelerate")
    assert made.run["launch"]["nproc"] == 1
    assert answers(made)["num_processes"].say.startswith("distributed_type starts one process there")


def test_variables_of_a_mesh_count_under_their_switch_alone():
    mesh = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    switch = "ACCELERATE_USE_PARALLELISM_CONFIG"
    assert from_config(environ={**mesh, switch: "true"}).layout == "dp_shard=-1,tp=2"
    for environ in (mesh, {**mesh, switch: "false"}):
        made = from_config(environ=environ)
        assert made.layout == "dp_shard=-1"
        assert answers(made)["PARALLELISM_CONFIG_TP_SIZE"].say == f"it has no effect there without {switch}=true"


def plugin(config=None, **fields):
    """As accelerate makes it: the file is an object that holds it, beside fields that were filled from it."""
    kind = type("DeepSpeedPlugin", (SimpleNamespace,), {})
    held = config or {
        "zero_optimization": {"stage": fields["zero_stage"]},
        "gradient_clipping": fields["gradient_clipping"],
    }
    filled = {"offload_optimizer_device": "none", "offload_param_nvme_path": "none", "zero3_save_16bit_model": False}
    none = {
        "transformer_moe_cls_names": None,
        "is_train_batch_min": True,
        "enable_msamp": False,
        "msamp_opt_level": "O1",
    }
    return kind(hf_ds_config=SimpleNamespace(config=held), gradient_accumulation_steps=1, **filled, **none, **fields)


def test_a_plugin_of_zero_is_read_by_what_it_holds():
    made = from_config(plugin(zero_stage=3, gradient_clipping=0.5), ranks=2)
    assert made.layout == "dp_shard=-1" and made.run["train"]["max_grad_norm"] == 0.5
    made = from_config(
        plugin({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}, zero_stage=2), ranks=2
    )
    assert made.run["parallel"]["sharding"] == {"reshard_after_forward": False}
    assert made.run["data"]["micro_batch"] == 4
    fp8 = plugin(zero_stage=3, gradient_clipping=0.5)
    fp8.enable_msamp = True
    with pytest.raises(ConfigError, match="there is no fp8"):
        from_config(fp8)


@pytest.mark.soak  # its import takes ten seconds
@pytest.mark.filterwarnings("ignore")
def test_the_plugin_of_the_library_itself():
    from accelerate import DeepSpeedPlugin

    made = from_config(DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5, gradient_accumulation_steps=2), ranks=2)
    assert made.layout == "dp_shard=-1" and made.run["train"]["max_grad_norm"] == 0.5


def test_a_batch_that_a_script_fills_in_is_no_other_configurations():
    """accelerate takes it from the data loader; of an optimizer nothing is guessed."""
    within = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    outer = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    made = from_config(outer | {"deepspeed_config": {"deepspeed_config_file": within}}, dialect="accelerate")
    assert made.layout == "dp_shard=-1" and {*made.run["data"].values()} == {UNWRITTEN}
    said = answers(made)["deepspeed_config.deepspeed_config_file.train_batch_size"]
    assert said.verdict == "dropped" and "data loader of a script" in said.say
    within["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(ConfigError, match="another configuration fills it in") as refused:
        from_config(outer | {"deepspeed_config": {"deepspeed_config_file": within}}, dialect="accelerate")
    assert refused.value.given == "deepspeed_config.deepspeed_config_file.optimizer.params.lr=auto"


def test_a_limit_of_none_is_its_default():
    """Written out, as records of arguments write it, or not at all."""
    given = TRAINER | {"save_steps": 10}
    runs = [made_of("transformers", given | more) for more in ({}, {"save_total_limit": None})]
    assert runs[0].run == runs[1].run
    assert [answers(made)["save_total_limit"].verdict for made in runs] == ["changed", "changed"]


NULLS = [
    ("trl", "bf16"), ("trl", "save_total_limit"), ("nemo", "lr_scheduler.max_lr"), ("torchtitan", "training.dataset_path"),
    ("torchtune", "keep_last_n_checkpoints"), ("optimus", "model_transforms.activation_checkpoint.layer_classes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), NULLS)
def test_a_default_of_none_that_is_written_out_says_the_same(name, key):
    beside = {"model_transforms.activation_checkpoint.use_reentrant": False} if name == "optimus" else {}
    assert made_of(name, {**beside, key: None}).run == made_of(name, beside).run


# ---- what is said is of the value that is given ---------------------------------------------------------------------------------

SAID = [
    ("fabric", {"strategy": {"class_path": "a.FSDPStrategy"}}, "strategy.class_path", "kept", ""),
    ("fabric", {"precision": "bf16-true"}, "precision", "kept", "without an fp32 copy"),
    ("transformers", {"num_train_epochs": 2}, "num_train_epochs", "dropped", "max_steps counts there"),
    ("transformers", {"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1", "dropped", "sgd has no such argument"),
    ("nemo", {"optimizer.momentum": 0.8}, "optimizer.momentum", "dropped", "has no such argument"),
    ("nemo", {"lr_scheduler": {"wsd_decay_steps": 5}}, "lr_scheduler.wsd_decay_steps", "dropped", "it has no effect"),
    ("transformers", {"eval_strategy": "no", "eval_steps": 5}, "eval_steps", "dropped", "eval_strategy=no"),
    ("transformers", {"save_strategy": "no", "save_steps": 5}, "save_steps", "dropped", "save_strategy=no"),
    ("transformers", {"eval_strategy": "steps"}, "eval_strategy", "changed", "nothing to validate on"),
    ("accelerate", {"dynamo_config": {"dynamo_mode": "max-autotune"}}, "dynamo_config.dynamo_mode", "dropped", "nothing is compiled"),
    ("torchtune", {"save_every_n_steps": None}, "save_every_n_steps", "changed", "counts optimizer steps"),
    ("oumi", {"data.validation.datasets": [{"dataset_name": "a"}]}, "data.validation.datasets.0.dataset_name", "changed", "data.val_path"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "key", "verdict", "says"), SAID)
def test_a_key_without_effect_is_not_called_kept(name, given, key, verdict, says):
    said = answers(made_of(name, given, ranks=8))[key]
    assert said.verdict == verdict and says in said.say and "not known" not in said.say
    assert verdict != "dropped" or not said.ours


# ---- errors whose fix works ----------------------------------------------------------------------------------------------------

WHOLE = "print the resolved configuration first"
FIXES = [
    ("oumi", {"defaults": ["base"]}, "defaults", WHOLE),
    ("torchtune", {"hydra": {"run": 1}}, "hydra.run", WHOLE),
    ("oumi", {"training.learning_rate": "${oc.env:LR}"}, "training.learning_rate", WHOLE),
    ("torchtune", {"batch_size": "${oc.env:SIZE}"}, "batch_size", WHOLE),
    ("oumi", {"data.train": {"datasets": [{"dataset_name": "a"}, {"dataset_name": "b"}]}}, "data.train.datasets.1.dataset_name", "write the mixture"),
    ("torchtune", {"dataset": [{"source": "a"}, {"source": "b"}]}, "dataset.0.source", "write the mixture"),
    ("torchtune", {"loss._component_": "torchtune.rlhf.loss.DPOLoss", "loss.beta": 0.1}, "loss._component_", "not trained here"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "key", "says"), FIXES)
def test_an_error_says_what_helps(name, given, key, says):
    with pytest.raises(ConfigError) as refused:
        made_of(name, given)
    assert key in refused.value.given and says in str(refused.value)
    assert "did you mean" not in str(refused.value) and "fix: remove it" not in str(refused.value)


def test_a_directory_is_called_one(tmp_path):
    with pytest.raises(ConfigError, match="it is a directory"):
        from_config(Path(tmp_path))


def test_an_optimizer_in_backward_says_what_gradients_are_there():
    say = load("torchtune").rows["optimizer_in_bwd"].says["true"]
    assert "sums over tokens" in say and "SGD" in say


# ---- what numbers mean together ------------------------------------------------------------------------------------------

TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
CONTEXT = {"training.max_context_length": 1024}


def strategy(kind: str, **given):
    return {"strategy": {"class_path": kind, "init_args": given}}


MEANT = [
    ("torchtitan", {TOKENS: 4096, **CONTEXT, "training.num_tokens_per_train_step": 16384}, 2, {"data.micro_batch": 4, "data.global_batch": 16, "data.seq_len": 1024}),
    ("torchtitan", {TOKENS: 4096, **CONTEXT}, 4, {"data.micro_batch": 4, "data.global_batch": 16}),
    ("transformers", {"per_device_train_batch_size": 8, "split_batches": True}, 4, {"data.micro_batch": 2, "data.global_batch": 8}),
    ("nemo", {"distributed.dp_size": 4, "distributed.dp_replicate_size": 2}, 4, {"parallel.layout": "dp_replicate=2,dp_shard=2"}),
    ("fabric", strategy("FSDPStrategy", device_mesh=[2, 4], sharding_strategy="HYBRID_SHARD"), 8, {"parallel.layout": "dp_replicate=2,dp_shard=4"}),
    ("fabric", strategy("ModelParallelStrategy", data_parallel_size=4), 8, {"parallel.layout": "dp_shard=-1,tp=2"}),
    ("optimus", {"common.distributed.sharding_world_size": 4}, 8, {"parallel.layout": "dp_replicate=-1,dp_shard=4"}),
    ("optimus", {"common.distributed.sharding_world_size": 1}, 8, {"parallel.layout": "dp_replicate=-1"}),
    ("torchtitan", {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}, 2, {"parallel.layout": "dp_replicate=2", "parallel.precision": "bf16"}),
    ("torchtitan", {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.4, "compile.enable": True}, 2,
     {"parallel.compile": {"activation_memory_budget": 0.4}, "parallel.remat": None}),
    ("torchtitan", {"checkpoint.enable": True, "checkpoint.interval": 5, "checkpoint.keep_latest_k": 0}, 2, {"checkpoint.every": 5, "checkpoint.keep": None, "checkpoint.keep_every": 1}),
    ("transformers", {"eval_strategy": "steps", "logging_steps": 7, "validation_file": "v.jsonl"}, 2, {"train.eval_every": 7}),
    ("transformers", {"eval_strategy": "steps", "eval_steps": 0.25, "validation_file": "v.jsonl", "save_steps": 0.1}, 2, {"train.eval_every": 25, "checkpoint.every": 10}),
    ("transformers", {"fsdp": False, "ddp_bucket_cap_mb": 50}, 2, {"parallel.layout": "dp_replicate=-1", "parallel.ddp.bucket_cap_mb": 50.0}),
    ("transformers", {"fsdp": "shard_grad_op auto_wrap offload"}, 2, {"parallel.sharding": {"offload": True, "reshard_after_forward": False}}),
    ("transformers", {"max_steps": 105, "eval_strategy": "steps", "logging_steps": 0.05, "validation_file": "v.jsonl", "save_steps": 0.1}, 2,
     {"train.eval_every": 6, "log.every": 6, "checkpoint.every": 11}),
    ("trl", {"max_steps": -1, "eval_strategy": "steps", "eval_steps": 0.1, "validation_file": "v.jsonl", "save_steps": 0.2, "logging_steps": 0.3}, 2,
     {"train.eval_every": UNWRITTEN, "checkpoint.every": UNWRITTEN, "log.every": UNWRITTEN}),
    ("oumi", {"training.save_final_model": False}, 2, {"checkpoint": {"export": None, "every": 500}}),
    ("accelerate", {"distributed_type": "DEEPSPEED"}, 8, {"train.max_grad_norm": 1.0}),
    ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": "none"}}, 8, {"train.max_grad_norm": None}),
    ("transformers", {"deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}}, 2, {"train.on_nonfinite": None}),
    ("transformers", {"bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}}, 2, {"train.on_nonfinite": "skip"}),
    ("nemo", {"distributed": {"_target_": "a.DDPManager"}}, 2, {"parallel.layout": "dp_replicate=-1", "parallel.precision": None}),
    ("nemo", {"distributed.strategy": "ddp", "distributed.mp_policy.param_dtype": "bfloat16"}, 2, {"parallel.layout": "dp_replicate=-1", "parallel.precision": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "ranks", "ours"), MEANT)
def test_numbers_mean_what_they_mean_together(name, given, ranks, ours):
    run = made_of(name, given, ranks=ranks).run
    for key, value in ours.items():
        place = run
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        assert place == value, key


TOGETHER = [
    ("accelerate", {"num_machines": 3}, 8, "num_machines", "not split evenly over 3 machines"),
    ("nemo", {"distributed.dp_size": 3}, 4, "distributed.dp_size", "is not 4 ranks"),
    ("nemo", {"distributed.dp_size": 4, "distributed.dp_replicate_size": 3}, 4, "distributed.dp_size", "not a multiple of 3 copies"),
    ("fabric", strategy("FSDPStrategy", device_mesh=[2]), 8, "device_mesh", "two numbers"),
    ("accelerate", {"distributed_type": "MULTI_GPU", "parallelism_config": {"dp_replicate_size": 2}}, 8, "dp_replicate_size", "2 copies are not 8"),
    ("accelerate", {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "NO_SHARD"}}, 8, "fsdp_reshard_after_forward", "when shards are freed"),
    ("fabric", {"devices": "all"}, 8, "devices", "a number of devices"),
    ("transformers", {"per_device_train_batch_size": 6, "split_batches": True}, 4, "split_batches", "not split over 4 ranks"),
    ("torchtitan", {TOKENS: 1000, **CONTEXT}, 2, TOKENS, "not a number of samples of 1024"),
    ("torchtitan", {TOKENS: 1024, "training.max_context_length": 0}, 2, TOKENS, "how long a sample is"),
    ("deepspeed", {"optimizer.params.betas": [0.9]}, 8, "optimizer.params.betas", "two numbers"),
    ("torchtitan", {"optimizer.param_groups": [{"pattern": "bias$", "optimizer_kwargs": {"lr": 1e-3}}]}, 2, "param_groups", "is an expression"),
    ("optimus", {"optimization.amp.enabled": True, "optimization.amp.dtype": "float32"}, 2, "optimization.amp.dtype", "no autocast in it"),
    ("nemo", {"distributed._target_": "a.FSDP2Manager", "distributed.strategy": "ddp"}, 2, "distributed.strategy", "contradicts distributed._target_"),
    ("transformers", {"learning_rate": 1e-5, "deepspeed": ZERO | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}}}}, 8, "deepspeed.scheduler.params.warmup_max_lr", "contradicts learning_rate"),
    ("transformers", {"max_grad_norm": 2, "deepspeed": ZERO | {"gradient_clipping": 0.5}}, 8, "deepspeed.gradient_clipping", "contradicts max_grad_norm"),
    ("transformers", {"adam_beta2": 0.9, "deepspeed": ZERO | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}}, 8, "deepspeed.optimizer.params.betas", "contradicts adam_beta2"),
    ("nemo", {"optimizer": {"_target_": "torch.optim.Adafactor", "lr": 1e-3, "beta2_decay": -0.9}}, 2, "optimizer.beta2_decay", "has torch's own"),
    ("nemo", {"optimizer.lr": 0}, 2, "optimizer.lr", "nothing would be trained"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "ranks", "key", "text"), TOGETHER)
def test_numbers_that_mean_nothing_together_are_refused_by_a_key(name, given, ranks, key, text):
    with pytest.raises(ConfigError, match=text) as refused:
        made_of(name, given, ranks=ranks)
    assert key in refused.value.given


# ---- splits -----------------------------------------------------------------------------------------------------------

EVAL = {"eval_strategy": "steps", "eval_steps": 2}
NAMED = {"dataset_train_split": "train_sft", "dataset_test_split": "test_sft"}
SPLITS = [
    # splits of the dataset (none: it is not here), what is given -> data.path, data.val_path, data.val_fraction
    ([], {**NAMED, **EVAL}, "/train_sft", "/test_sft", None),
    (["train", "train_sft", "test_sft"], {**NAMED, **EVAL}, "/train_sft", "/test_sft", None),
    (["train", "validation"], NAMED, "/train_sft", None, 0),
    (["train", "test"], EVAL, "/train", "/test", None),
    (["train", "test"], {}, "", None, 0),
    (["train", "validation"], EVAL, "", None, None),  # a run takes that split by itself
    (["train", "validation", "test"], EVAL, "/train", "/test", None),
    (
        ["train", "validation"],
        {"dataset_train_split": "train", "dataset_test_split": "x", **EVAL},
        "/train",
        "/x",
        None,
    ),
    ([], {}, "", None, 0),
]


@pytest.mark.parametrize(("splits", "given", "train", "test", "fraction"), SPLITS)
def test_the_splits_that_are_named_are_those_of_the_run(tmp_path, splits, given, train, test, fraction):
    folder = tmp_path / "data"
    for name in splits:
        saved_split(folder, name)
    made = made_of("trl", {"dataset_name": str(folder), **given})
    data = made.run["data"]
    assert data["path"] == f"{folder}{train}" and data.get("val_fraction") == fraction
    assert data.get("val_path") == (test and f"{folder}{test}")
    if train == "/train_sft":
        assert answers(made)["dataset_train_split"].ours[0].startswith("data.path=")


@pytest.mark.parametrize(
    ("given", "key", "text"),
    [
        ({"dataset_train_split": "train[:80%]"}, "dataset_train_split", "a part of a split"),
        ({"dataset_test_split": "test+validation", **EVAL}, "dataset_test_split", "a part of a split"),
        (
            {"dataset_train_split": "train_sft", "dataset_name": "d.jsonl"},
            "dataset_train_split",
            "a file has no splits",
        ),
    ],
)
def test_splits_that_are_no_directory_are_refused(given, key, text):
    with pytest.raises(ConfigError, match=text) as refused:
        made_of("trl", {"dataset_name": "folder", **given})
    assert key in refused.value.given


def test_a_part_for_validation_counts_where_the_dataset_has_none(tmp_path):
    for name in ("train", "validation"):
        saved_split(tmp_path / "data", name)
    given = {"dataset_name": str(tmp_path / "data"), "validation_split_percentage": 10}
    made = made_of("transformers", given)
    assert "val_fraction" not in made.run["data"] and made.config.data.val_path.endswith("validation")
    assert answers(made)["validation_split_percentage"].verdict == "dropped"
    assert made_of("transformers", {**given, "dataset_name": "other"}).run["data"]["val_fraction"] == 0.1


def saved_split(folder, name):
    """What ``save_to_disk`` writes, without rows: an import reads none."""
    (folder / name).mkdir(parents=True)
    (folder / name / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / name / "data.arrow").write_bytes(b"")
    splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


# ---- what the model predicts, and how many tokens of a record ---------------------------------------------------------------

NEMO = "nemo_automodel.NeMoAutoModel"
OTHER_HEADS = ("SequenceClassification", "ImageTextToText", "MultimodalLM")
OTHER_BUILDERS = (
    "llama3.llama3_reward_8b", "mistral.lora_mistral_classifier_7b", "llama3_2_vision.llama3_2_vision_11b", "clip.clip_vision_encoder",
)  # fmt: skip
IN_TOKENS = {"trl": "max_length", "oumi": "model.model_max_length", "torchtune": "tokenizer.max_seq_len"}
PACKED = {"trl": "packing", "oumi": "data.train.pack", "torchtune": "dataset.packed"}


@pytest.mark.parametrize(
    ("name", "key", "value", "verdict"),
    [
        ("nemo", "model._target_", f"{NEMO}ForCausalLM.from_pretrained", "kept"),
        ("nemo", "model._target_", f"{NEMO}ForCausalLM.from_config", "changed"),
        ("torchtune", "model._component_", "torchtune.models.llama3_2.lora_llama3_2_1b", "kept"),
        ("torchtitan", "model.name", "llama3", "kept"),
    ],
)
def test_a_model_of_the_next_token_is_taken_over(name, key, value, verdict):
    assert answers(made_of(name, {key: value}))[key].verdict == verdict


@pytest.mark.parametrize("name", IN_TOKENS)
def test_tokens_of_a_record_are_one_more_than_those_that_are_predicted(name):
    key = IN_TOKENS[name]
    for more, is_packed in (({}, False), ({PACKED[name]: True}, True)):
        made = made_of(name, {key: 300, **more})
        assert (made.run["data"]["seq_len"], made.run["data"].get("pack", False)) == (299, is_packed)
        said = answers(made)[key]
        assert "all but the first are predicted" in said.say and said.ours == ("data.seq_len=299",)
        assert ("may fit into one than there" in said.say) == is_packed
        assert said.verdict == ("changed" if is_packed or name == "torchtune" else "kept")
    assert made_of("nemo", {"dataset.seq_len": 300}).run["data"]["seq_len"] == 300  # positions there
    assert made_of("torchtitan", {"training.seq_len": 300}).run["data"]["seq_len"] == 300


# ---- an optimizer that is said in part -------------------------------------------------------------------------------------

CLASSES = {
    "deepspeed": "optimizer", "fabric": "optimizer", "torchtune": "optimizer", "nemo": "optimizer",
    "optimus": "optimization.optimizer", "ml": "optimizer",
}  # fmt: skip


def without_optimizer(name):
    values = deepcopy(BASE[name])
    *path, last = CLASSES[name].split(".")
    place = values
    for part in path:
        place = place.get(part, {})
    place.pop(last, None)
    return values


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_said_of_an_optimizer_that_is_not_named_is_refused(name):
    table, tried = load(name), 0
    for key, row in table.rows.items():
        if not key.startswith(f"{CLASSES[name]}.") or row.is_pattern or row.alias:
            continue
        facts = {action.partition("=")[0] for action in row.action_of("")}
        if not facts & {f"@{fact}" for fact in OF_OPTIMIZER}:
            continue
        values = without_optimizer(name)
        value = next(iter(values_of(row)))
        put(values, key, value)
        if row.coerced(value, key) == "auto":
            continue
        with pytest.raises(ConfigError, match="which optimizer it is of is not said") as refused:
            from_config(values, dialect=name, ranks=8)
        assert key in refused.value.given
        tried += 1
    assert tried >= 3


CURVES = {
    "deepspeed": 6,
    "torchtune": 2,
    "optimus": 9,
    "ml": 4,
}  # system -> keys of a curve that has another key for its name


@pytest.mark.parametrize("name", CURVES)
def test_what_is_said_of_a_curve_that_is_not_named_is_refused(name):
    section, said = "scheduler" if name == "deepspeed" else "lr_scheduler", []
    for key, row in load(name).rows.items():
        is_word = "@curve" in row.action_of("") or row.is_pattern or row.alias
        if not key.startswith(f"{section}.") or is_word or row.verdicts[""] == "refused":
            continue
        values = deepcopy(BASE[name])
        values.pop(section)
        put(values, key, next(iter(values_of(row))))
        try:
            run = from_config(values, dialect=name, ranks=8).run
        except ConfigError as error:
            said += [key] if "which curve it is of is not said" in str(error) else []
        else:
            assert row.verdicts[""] == "dropped" or "train.steps" in str(run) or key.endswith("total_num_steps"), key
    assert len(said) >= CURVES[name]


@pytest.mark.parametrize("name", BASE)
def test_an_optimizer_that_is_not_said_has_to_be_written(name):
    made = from_config(without_optimizer(name) if name in CLASSES else BASE[name], dialect=name, ranks=8)
    has_default = name in ("transformers", "trl", "oumi", "torchtitan")  # there
    open_keys = [key for key, value in made.run["optim"].items() if value == UNWRITTEN]
    assert open_keys == ([] if has_default else ["name"] if name == "deepspeed" else ["lr"])
    assert sum("optimizer" in text for text in made.missing) == (not has_default)
    assert [text.partition(":")[0] for text in made.missing if text.startswith("optim.")] == [
        f"optim.{key}" for key in open_keys
    ]


# ---- answers that were false for a value of their key ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("transformers", "config_name", "other", "the config.json of the model's directory is read"),
        ("deepspeed", "tensor_parallel.tp.tp_size", 2, "training has autotp_size"),
        *(("nemo", "model._target_", f"{NEMO}For{kind}.from_pretrained", "the next token") for kind in OTHER_HEADS),
        ("nemo", "model._target_", f"{NEMO}ForSequenceClassification.from_config", "the next token"),
        *(("torchtune", "model._component_", f"torchtune.models.{of}", "the next token") for of in OTHER_BUILDERS),
        ("torchtitan", "model.name", "flux", "images are not made from noise"),
        ("oumi", "data.train.collator_name", "vision_language_sft", "images are not read"),
        *((name, key, 1, "nothing of a record of so many tokens is predicted") for name, key in IN_TOKENS.items()),
    ],
)
def test_what_would_train_something_else_is_refused(name, key, value, text):
    with pytest.raises(ConfigError, match=text) as refused:
        made_of(name, {key: value})
    assert key in refused.value.given
