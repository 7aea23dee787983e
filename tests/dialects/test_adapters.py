"""Adapters, weights in 4 bits and positions cut over ranks: what other systems' keys of them become, and what is refused."""

import pytest

from shardwise.dialects.answers import imported
from shardwise.errors import ConfigError

TRL = {"output_dir": "o", "max_steps": 10, "max_length": 64, "use_peft": True, "lora_target_modules": ["q_proj"]}
BITS = {"load_in_4bit": True}
OUMI = {"model": {"model_name": "m"}, "training": {"max_steps": 10, "use_peft": True, "trainer_type": "TRL_SFT"}}
NEMO = {
    "step_scheduler": {"max_steps": 10},
    "model": {"pretrained_model_name_or_path": "m"},
    "distributed": {},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
    "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "target_modules": ["q_proj"]},
}
TUNE = {
    "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ["q_proj"]},
    "checkpointer": {"checkpoint_dir": "m"},
    "tokenizer": {"path": "t"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "batch_size": 2,
    "epochs": 1,
    "dtype": "bf16",
}
MESH = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
BASES = {"trl": TRL, "oumi": OUMI, "nemo": NEMO, "torchtune": TUNE, "accelerate": MESH}


def with_keys(name, given):
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in BASES[name].items()}
    for key, value in given.items():
        section, dot, last = key.partition(".")
        if dot:
            values.setdefault(section, {})[last] = value
        else:
            values[key] = value
    return values


def made_of(name, given):
    return imported(with_keys(name, given), dialect=name, ranks=8)


LORA = [
    ("trl", {}, {"targets": ["q_proj"], "rank": 16, "alpha": 32.0, "dropout": 0.05}),
    ("trl", {"lora_target_modules": None, "lora_r": 4}, {"targets": ["q_proj", "v_proj"], "rank": 4}),
    ("trl", {"lora_target_modules": "all-linear", "use_rslora": True}, {"targets": "all-linear", "rslora": True}),
    ("trl", {"use_dora": True, "lora_modules_to_save": ["lm_head"]}, {"dora": True, "train": ["lm_head"]}),
    ("trl", {"lora_target_modules": None, "lora_target_parameters": ["w"]}, {"targets": [], "experts": ["w"]}),
    ("oumi", {}, {"targets": ["q_proj", "v_proj"], "rank": 8, "alpha": 8.0}),
    ("oumi", {"peft.lora_init_weights": "GAUSSIAN"}, {"init": "gaussian"}),
    ("nemo", {}, {"targets": ["q_proj"], "rank": 8, "alpha": 32.0}),
    ("nemo", {"peft.target_modules": ["*.proj"]}, {"targets": ["*proj"]}),
    ("nemo", {"peft.target_modules": [], "peft.exclude_modules": ["o_proj"]}, {"targets": "all-linear", "exclude": ["o_proj"]}),
    ("torchtune", {}, {"targets": ["q_proj"], "rank": 8, "alpha": 16.0}),
    (
        "torchtune",
        {"model.lora_attn_modules": ["output_proj"], "model.apply_lora_to_mlp": True, "model.apply_lora_to_output": True},
        {"targets": ["o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "expected"), LORA)
def test_adapters_are_those_of_the_source(name, given, expected):
    found = made_of(name, given).run["parallel"]["lora"]
    assert {key: found.get(key) for key in expected} == expected


def test_keys_of_adapters_say_that_they_have_no_effect_without_them():
    made = made_of("trl", {"use_peft": False, "lora_r": 4, "bnb_4bit_quant_type": "fp4"})
    assert "lora" not in made.run["parallel"]
    said = {one.key: (one.verdict, one.say) for one in made.findings}
    assert said["lora_r"] == said["bnb_4bit_quant_type"] == ("dropped", "it has no effect in this configuration")


QUANTIZED = [
    ("trl", BITS, "nf4"),
    ("trl", {**BITS, "use_bnb_nested_quant": True}, "nf4"),
    ("trl", {"model_init_kwargs.quantization_config": {**BITS, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["x"]}}, {"kind": "nf4", "keep": ["x"]}),
    ("oumi", {"peft.q_lora": True, "peft.bnb_4bit_quant_type": "nf4"}, "nf4"),
    ("nemo", {"quantization.load_in_4bit": True}, "nf4"),
    ("torchtune", {"model.quantize_base": True}, "nf4"),
    ("torchtune", {"model._component_": "torchtune.models.llama3.qlora_llama3_8b"}, "nf4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "expected"), QUANTIZED)
def test_frozen_weights_are_stored_in_4_bits(name, given, expected):
    assert made_of(name, given).run["parallel"]["quantize"] == expected


@pytest.mark.parametrize(("nested", "verdict"), [(False, "changed"), (True, "kept")])
def test_scales_that_are_not_nested_there_are_said(nested, verdict):
    made = made_of("trl", {**BITS, "use_bnb_nested_quant": nested})
    (found,) = (one for one in made.findings if one.key == "use_bnb_nested_quant")
    assert (found.verdict, "0.75 %" in found.say) == (verdict, not nested)


@pytest.mark.parametrize("loaded", ["bfloat16", "float16"])
def test_adapters_are_float32_beside_weights_that_are_loaded_in_less(loaded):
    word = {"bfloat16": "bf16", "float16": "fp16"}[loaded]
    assert made_of("trl", {"dtype": loaded, "bf16": False}).run["parallel"]["precision"] == word
    plain = made_of("trl", {"dtype": loaded, "bf16": False, "use_peft": False})
    assert plain.run["parallel"]["precision"] == {"storage": word}
    low = {
        "storage": "bf16",
        "compute": "bf16",
    }  # where adapters have that dtype too, and what is frozen computes in it
    assert made_of("torchtune", {}).run["parallel"]["precision"] == low


FSDP_1 = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 1}}
IN_LESS = [  # of weights in 4 bits: the engine may raise what is trained
    ({}, (), {"storage": "bf16", "compute": "bf16"}, "as there"),
    ({"dtype": "bfloat16"}, (), {"storage": "bf16", "compute": "bf16"}, "as there"),
    ({"fsdp": "full_shard"}, (), {"storage": "bf16", "compute": "bf16"}, "as there"),
    ({}, (FSDP_1,), "bf16", ""),
    ({"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}}, (), "bf16", ""),
    ({"use_dora": True}, (), "bf16", "float32, there bf16"),
    ({"fp16": True}, (), "fp16", "float32, there bf16"),
]


@pytest.mark.parametrize(("given", "beside", "precision", "says"), IN_LESS)
def test_adapters_of_weights_in_4_bits_are_stored_as_there_or_said_to_be_otherwise(given, beside, precision, says):
    made = imported(with_keys("trl", {**BITS, **given}), *beside, ranks=8)
    (found,) = (one for one in made.findings if one.key == "load_in_4bit")
    assert made.run["parallel"]["precision"] == precision
    assert says in found.say and bool(says) == ("adapters" in found.say)


CUT = [
    ({"cp_size": 2, "dp_shard_size": 4}, "dp_shard=4,cp=2", None),
    ({"cp_size": 2, "dp_shard_size": 4, "cp_comm_strategy": "alltoall"}, "dp_shard=4,cp=2", {"method": "gather"}),
    ({"sp_size": 4, "dp_shard_size": 2}, "dp_shard=2,cp=4", {"method": "ulysses"}),
    ({"cp_size": 8, "dp_shard_size": 1}, "dp_shard=1,cp=8", None),  # parameters are cut over the ranks of cp
    ({"cp_size": 4, "dp_replicate_size": 2, "dp_shard_size": 1}, "dp_replicate=2,dp_shard=1,cp=4", None),
]


@pytest.mark.parametrize(("given", "layout", "record"), CUT)
def test_positions_are_cut_over_ranks(given, layout, record):
    parallel = made_of("accelerate", {"parallelism_config": given}).run["parallel"]
    assert (parallel["layout"], parallel.get("context_parallel")) == (layout, record)


REFUSED = {
    "trl: load_in_8bit": (True, "weights in 8 bits"),
    "trl: bnb_4bit_quant_type": ("fp4", "write nf4"),
    "trl: lora_task_type": ("SEQ_CLS", "write CAUSAL_LM"),
    "trl: lora_target_modules": (r".*\.(q|v)_proj", "an expression is not taken"),
    "trl: model_init_kwargs.quantization_config": (BITS, "bnb_4bit_quant_type=fp4"),  # the default there
    "oumi: peft.q_lora": (True, "bnb_4bit_quant_type=fp4"),
    "oumi: peft.q_lora_bits": (8, "weights in 8 bits"),
    "oumi: peft.lora_bias": ("all", "parallel.lora.train"),
    "oumi: peft.lora_init_weights": ("pissa", "by default, or gaussian"),
    "oumi: peft.lora_target_modules": ([], "no layer is named"),
    "nemo: peft.moe_rank_scaling": (True, "one rank"),
    "nemo: peft.dmi": (4, "did you mean"),
    "torchtune: model.lora_rnak": (4, "did you mean"),
    "accelerate: parallelism_config": ({"cp_size": 2, "sp_size": 2, "dp_shard_size": 2}, "cut over one axis"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_something_else_is_refused_by_its_key(case):
    name, key = case.split(": ")
    value, text = REFUSED[case]
    given = {key: value, **({"load_in_4bit": True} if key == "bnb_4bit_quant_type" else {})}
    given |= {"peft.q_lora": True, "peft.bnb_4bit_quant_type": "nf4"} if key == "peft.q_lora_bits" else {}
    with pytest.raises(ConfigError) as caught:
        made_of(name, given)
    assert text in str(caught.value)
    assert key.partition(".")[0] in str(caught.value)


def test_4_bits_without_adapters_are_refused():
    with pytest.raises(ConfigError, match=r"load_in_4bit=true(.|\n)*add adapters"):
        made_of("trl", {**BITS, "use_peft": False})


def test_sequence_parallelism_is_that_of_tensor_parallelism():
    made = made_of("nemo", {"distributed": {"tp_size": 2, "sequence_parallel": True}, "peft.dim": 4})
    assert made.run["parallel"]["tensor_parallel"] == {"sequence_parallel": True}
    alone = made_of("nemo", {"distributed": {"sequence_parallel": True}})
    (found,) = (one for one in alone.findings if one.key == "distributed.sequence_parallel")
    assert (found.verdict, found.say) == ("dropped", "it has no effect in this configuration")
    beside = made_of("nemo", {"distributed": {"tp_size": 2, "cp_size": 2, "sequence_parallel": True}})
    assert beside.run["parallel"]["tensor_parallel"] == {"sequence_parallel": True}
