"""Configurations of other systems are imported as their sources mean them: files, mappings, environments; every key is answered."""

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from dialect_files import outcome, unanswered

from shardwise.config.loader import UNWRITTEN
from shardwise.config.sources import read_file
from shardwise.dialects.collect import detect, interpolated
from shardwise.dialects.table import systems
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, load_config
from shardwise.run.imported import checked, from_config

FIXTURES = Path(__file__).parent / "fixtures"
FILES = [
    path
    for path in sorted(FIXTURES.glob("*/*"))
    if not path.name.endswith(".expected.yaml") and path.name != "ds-auto.json"
]
NOT_CLEAR = ("sft-default",)  # a file without a key that only its system has: --from says whose it is


def variables(path: Path) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")
    )


def made_of(path: Path, ranks: int | None) -> Any:
    how: dict[str, Any] = {"ranks": ranks, "ranks_per_node": 4 if ranks else None}
    if path.suffix == ".vars":
        return from_config(environ=variables(path), **how)
    return from_config(path, dialect=path.parent.name if path.stem in NOT_CLEAR else None, **how)


def expected_of(path: Path) -> dict[str, Any]:
    return read_file(path.with_name(f"{path.stem}.expected.yaml")).values


def default_of(key: str) -> Any:
    """Ours, which stands in the configuration that is checked until the key is written."""
    section, last = key.split(".")
    return getattr(getattr(RunConfig(), section), last)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_means_what_its_source_says(path, tmp_path):
    wanted = expected_of(path)
    made = made_of(path, wanted["ranks"])
    assert made.dialect == wanted["dialect"]
    assert json.loads(json.dumps(made.run, default=str)) == wanted["run"]
    for verdict in ("changed", "dropped"):
        keys = sorted(
            one.key for one in made.findings if one.verdict == verdict and (one.given or one.key.startswith("("))
        )
        assert keys == sorted(wanted[verdict])
    run = tmp_path / "run.yaml"
    run.write_text(made.yaml())
    is_open = [f"{at}.{last}" for at, keys in made.run.items() for last, value in keys.items() if value == UNWRITTEN]
    left_open = [f"{key}={json.dumps(default_of(key))}" for key in is_open]
    assert load_config(run, left_open).config == made.config  # what is printed is what was checked
    if left_open:
        with pytest.raises(ConfigError, match=rf"{is_open[0]} = TO_BE_WRITTEN"):
            load_config(run)
    if path.suffix != ".vars":
        assert unanswered(made.dialect, read_file(path).values, made) == []


def shuffled(values: Any, draw: random.Random) -> Any:
    if isinstance(values, dict):
        keys = list(values)
        draw.shuffle(keys)
        return {key: shuffled(values[key], draw) for key in keys}
    return [shuffled(one, draw) for one in values] if isinstance(values, list) else values


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix != ".vars"], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_the_order_of_keys_never_changes_the_run(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    values, draw = read_file(path).values, random.Random(0)
    name, ranks = expected_of(path)["dialect"], expected_of(path)["ranks"]
    how = {
        "dialect": path.parent.name if path.stem in NOT_CLEAR else name,
        "ranks": ranks,
        "ranks_per_node": 4 if ranks else None,
    }
    wanted = from_config(values, **how)
    for _ in range(3):
        made = from_config(shuffled(values, draw), **how)
        assert made.run == wanted.run
        assert {(one.key, one.verdict) for one in made.findings} == {(one.key, one.verdict) for one in wanted.findings}


def test_there_are_files_of_each_system():
    assert {path.parent.name for path in FILES} == {*systems(), "environment"} and len(FILES) >= 62


def refusals() -> list[dict[str, Any]]:
    text = (FIXTURES / "refusals.yaml").read_text()
    lines = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    from shardwise.config.sources import parse_yaml_value

    return [parse_yaml_value(line, "refusals.yaml") for line in lines]


@pytest.mark.parametrize("case", refusals(), ids=lambda case: f"{case['base']} {case['set']}")
def test_what_would_train_something_else_is_refused_by_its_key(case):
    path = FIXTURES / case["base"]
    values = copy.deepcopy(read_file(path).values)
    for key, value in case["set"].items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    ranks = case.get("ranks")
    with pytest.raises(ConfigError) as refused:
        from_config(values, dialect=path.parent.name, ranks=ranks, ranks_per_node=4 if ranks else None)
    assert case["key"] in refused.value.given
    assert case.get("says", "") in str(refused.value)
    assert refused.value.why and refused.value.fix


# ---- whose it is, and what a file may have -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix != ".vars" and path.stem not in NOT_CLEAR], ids=str
)
def test_whose_a_file_is_is_seen_by_its_keys(path):
    values = interpolated(read_file(path).values)
    if path.parent.name in ("fsdp1", "optimus", "ml") and len(values) < 2:
        return  # a single record
    assert detect(values) == expected_of(path)["dialect"]


def test_a_file_whose_keys_are_in_a_section_of_its_system():
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4}}
    for values in ({"seed_everything": 1}, {"optimizer": optimizer}, {"model": {"class_path": "a.B"}}):
        assert detect({"trainer": {"devices": 2, "precision": "bf16-mixed"}, **values}) == "fabric"


def test_a_record_with_keys_of_two_systems_asks_whose_it_is():
    with pytest.raises(ConfigError, match="--from trl") as refused:
        from_config({"output_dir": "o", "dataset_name": "d", "max_steps": 5}, ranks=1)
    assert "transformers or trl" in refused.value.why
    with pytest.raises(ConfigError, match="known are accelerate"):
        from_config({"nothing": 1})


def test_keys_of_the_same_file_are_put_in_and_resolvers_are_refused():
    values = {
        "output_dir": "${name}-run",
        "name": "small",
        "max_steps": "${steps}",
        "steps": 7,
        "per_device_train_batch_size": 2,
    }
    made = from_config(values, dialect="transformers", ranks=2)
    assert made.run["train"]["steps"] == 7 and made.run["log"]["dir"] == "small-run"
    assert {one.key: one.say for one in made.findings}["name"] == "a variable of the file"
    for value in ("${oc.env:STEPS}", "${nothing}", "${max_steps}"):
        with pytest.raises(
            ConfigError, match=r"print the resolved configuration first|it takes a whole number"
        ) as refused:
            from_config({"output_dir": "o", "max_steps": value}, dialect="transformers", ranks=1)
        assert "max_steps" in refused.value.given
    with pytest.raises(ConfigError, match="print the resolved configuration first"):
        from_config({"output_dir": "${oc.env:OUT}", "max_steps": 5}, dialect="transformers", ranks=1)


def test_a_key_that_is_given_twice_is_refused_with_both():
    with pytest.raises(ConfigError, match="given twice"):
        from_config(
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "version": 2}}, dialect="accelerate"
        )
    given = {"output_dir": "o", "per_device_train_batch_size": 2, "per_gpu_train_batch_size": 4, "max_steps": 5}
    with pytest.raises(ConfigError, match="contradicts per_device_train_batch_size=2"):
        from_config(given, dialect="transformers", ranks=1)


def test_a_key_is_left_out_by_name_and_that_is_said():
    values = {"output_dir": "o", "max_steps": 5, "label_smoothing_factor": 0.1, "per_device_train_batch_size": 1}
    made = from_config(values, dialect="transformers", ranks=1, allow=["label_smoothing_factor"])
    found = {one.key: one for one in made.findings}["label_smoothing_factor"]
    assert found.verdict == "dropped" and found.say.startswith("left out, as --allow says: ")
    made = from_config(
        values | {"nonsense": 1}, dialect="transformers", ranks=1, allow=["label_smoothing_factor", "nonsense"]
    )
    assert {one.key: one.verdict for one in made.findings}["nonsense"] == "dropped"
    with pytest.raises(ConfigError, match="no effect"):
        from_config({"output_dir": "o", "max_steps": 5}, dialect="transformers", ranks=1, allow=["max_steps"])


# ---- what keys mean together -------------------------------------------------------------------------------------------

TRAINER = {"output_dir": "o", "max_steps": 100, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("ranks", "more", "batch"),
    [
        (1, {}, (6, 2)),
        (4, {}, (24, 2)),
        (8, {"parallelism_config": {"tp_size": 2}}, (24, 2)),
        (8, {"gradient_accumulation_steps": 1}, (16, 2)),
    ],
)
def test_samples_of_a_step_are_those_of_all_ranks_that_read_different_data(ranks, more, batch):
    made = from_config(TRAINER | more, dialect="transformers", ranks=ranks)
    assert (made.run["data"]["global_batch"], made.run["data"]["micro_batch"]) == batch
    assert made.samples.endswith(f"= {batch[0]} samples of a step")


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (64, 4)),
        ({"train_batch_size": 64}, (64, 8)),
    ],
)
def test_two_of_three_give_the_third(given, batch):
    made = from_config({"zero_optimization": {"stage": 3}, **given}, dialect="deepspeed", ranks=8)
    assert (made.run["data"]["global_batch"], made.run["data"]["micro_batch"]) == batch


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4}, "train_batch_size"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "train_batch_size",
        ),
        ({"train_batch_size": 4}, "train_batch_size"),
        ({"train_batch_size": 0}, "train_batch_size"),
    ],
)
def test_numbers_that_do_not_multiply_are_refused_with_both(given, key):
    with pytest.raises(ConfigError) as refused:
        from_config({"zero_optimization": {"stage": 3}, **given}, dialect="deepspeed", ranks=8)
    assert key in refused.value.given


def sizes(**given: int) -> dict[str, Any]:
    return {
        "distributed_type": "FSDP",
        "parallelism_config": {f"{axis}_size": n for axis, n in given.items()},
        "fsdp_config": {"fsdp_version": 2},
    }


@pytest.mark.parametrize(
    ("ranks", "given", "layout"),
    [
        (16, {"dp_shard": 4, "cp": 2, "tp": 2}, "dp_shard=4,cp=2,tp=2"),
        (8, {"dp_replicate": 2, "dp_shard": 4}, "dp_replicate=2,dp_shard=4"),
        (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "dp_replicate=2,dp_shard=2,tp=2"),
        (None, {"dp_shard": 4, "tp": 2}, "dp_shard=4,tp=2"),
    ],
)
def test_degrees_become_a_layout(ranks, given, layout):
    assert from_config(sizes(**given), dialect="accelerate", ranks=ranks).layout == layout


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (8, {"dp_shard": 3}),
        (8, {"dp_shard": 4, "tp": 4}),
        (6, {"tp": 4}),
        (8, {"dp_replicate": 3}),
        (8, {"dp_shard": 1, "tp": 2}),
    ],
)
def test_degrees_that_are_not_the_ranks_are_refused(ranks, given):
    with pytest.raises(ConfigError, match=f"{ranks}") as refused:
        from_config(sizes(**given), dialect="accelerate", ranks=ranks)
    assert "parallelism_config_" in refused.value.given


def test_keys_of_another_version_have_no_effect():
    """Version 2 reads its own switch, version 1 the strategy that the launcher always sets."""
    both = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": True}
    for version, is_kept, unread in ((2, None, "sharding_strategy"), (1, False, "reshard_after_forward")):
        made = from_config(
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version, **both}}, dialect="accelerate"
        )
        assert made.run["parallel"].get("sharding", {}).get("reshard_after_forward") is is_kept
        found = {one.key: one for one in made.findings}[f"fsdp_config.fsdp_{unread}"]
        assert (found.verdict, found.say) == ("dropped", "it has no effect in this configuration")


INNER = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def test_auto_of_a_file_within_is_the_outer_value_and_a_contradiction_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(INNER))
    (tmp_path / "args.json").write_text(json.dumps({**TRAINER, "deepspeed": "ds.json"}))
    made = from_config(tmp_path / "args.json", ranks=4)
    assert made.run["data"]["global_batch"] == 24
    assert made.run["parallel"]["sharding"] == {"reshard_after_forward": False}
    (tmp_path / "ds.json").write_text(json.dumps(INNER | {"train_micro_batch_size_per_gpu": 4}))
    with pytest.raises(ConfigError, match="contradicts per_device_train_batch_size=2"):
        from_config(tmp_path / "args.json", ranks=4)
    with pytest.raises(ConfigError, match="another configuration fills it in"):
        from_config(INNER, dialect="deepspeed", ranks=4)


def test_a_section_of_the_file_within_counts_as_a_whole():
    """Its optimizer has its own defaults; of the outer file only what it leaves to it counts."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_type": "linear"}}
    inner = {"zero_optimization": {"stage": 3}, "optimizer": optimizer, "scheduler": scheduler}
    outer = TRAINER | {
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "adam_beta2": 0.9,
        "max_grad_norm": 2.0,
        "warmup_ratio": 0.5,
    }
    made = from_config(outer | {"deepspeed": inner, "max_steps": 5000}, dialect="transformers", ranks=1)
    assert made.run["optim"] == {"betas": [0.9, 0.999], "lr": 3e-4, "weight_decay": 0.0}
    assert made.run["train"]["max_grad_norm"] is None  # no clipping there unless it is said
    assert made.run["schedule"]["warmup_steps"] == 999
    said = {one.key: one.say for one in made.findings if one.verdict == "dropped"}
    for key, by in (("weight_decay", "optimizer"), ("adam_beta2", "optimizer"), ("warmup_ratio", "scheduler")):
        assert said[key] == f"deepspeed.{by}.type counts there"


def test_two_files_are_one_configuration():
    launcher = {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2},
    }
    counted = launcher | {"gradient_accumulation_steps": 16}  # of a loop of one's own: the Trainer counts by itself
    for sources in ((launcher, TRAINER), (TRAINER, launcher), (counted, TRAINER)):
        made = from_config(*sources)
        assert made.dialect == "transformers" and made.layout == "dp_shard=-1"
        assert made.run["parallel"]["precision"] == "bf16" and made.run["data"]["global_batch"] == 24
        assert made.run["launch"]["nproc"] == 4
    with pytest.raises(ConfigError, match="contradicts"):
        from_config(TRAINER | {"fp16": True}, launcher)


def test_defaults_there_that_are_not_ours_are_written():
    made = from_config(TRAINER, dialect="transformers", ranks=1)
    assert made.run["optim"]["betas"] == [0.9, 0.999] and made.run["optim"]["weight_decay"] == 0.0
    assert made.run["train"]["max_grad_norm"] == 1.0 and made.run["data"]["val_fraction"] == 0
    shown = [str(one) for one in made.findings if one.key == "max_grad_norm"]
    assert (
        shown == ["kept     max_grad_norm=1.0 (the default there) -> train.max_grad_norm=1.0"]
        or "max_grad_norm=1 " in shown[0]
    )


def test_their_curve_is_kept_where_it_is_asked_for():
    near = from_config(TRAINER, dialect="transformers", ranks=1)
    assert near.run["schedule"]["name"] == "linear"
    exact = from_config(TRAINER, dialect="transformers", ranks=1, exact=True)
    assert exact.run["schedule"]["build"] == "shardwise.dialects.curves:hf"


# ---- an environment ------------------------------------------------------------------------------------------------------


def test_a_variable_that_is_not_known_is_refused_and_each_is_answered():
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    made = from_config(environ={**fsdp, "ACCELERATE_CPU_AFFINITY": "1", "HOME": "/root"})
    assert made.layout == "dp_shard=-1"
    assert {one.key: one.verdict for one in made.findings}["ACCELERATE_CPU_AFFINITY"] == "dropped"
    with pytest.raises(ConfigError, match="did you mean 'FSDP_OFFLOAD_PARAMS'"):
        from_config(environ={**fsdp, "FSDP_OFFLOAD_PARAM": "true"})
    with pytest.raises(ConfigError, match="Megatron"):
        from_config(environ={**fsdp, "ACCELERATE_USE_MEGATRON_LM": "true"})


def test_each_value_of_each_variable_is_taken_or_refused_by_name():
    from dialect_files import values_of

    from shardwise.dialects.table import load

    tried = 0
    for name, row in load("env").rows.items():
        target = load("accelerate").find(row.alias) if row.alias else row
        for value in values_of(target):
            if isinstance(value, list | dict) or value is None:
                continue
            tried += 1
            base = (
                {"ACCELERATE_USE_DEEPSPEED": "true"}
                if "DEEPSPEED" in name or "ACCUM" in name or "CLIP" in name
                else {"ACCELERATE_USE_FSDP": "true"}
            )
            try:
                from_config(environ={**base, name: str(value)}, ranks=8, ranks_per_node=4)
            except ConfigError as error:
                key = row.alias or name
                assert key in error.given or name in error.given, (name, value, str(error))
    assert tried > 80


# ---- wrong files, and that what their error says works -------------------------------------------------------------------

WRONG: list[tuple[str, Any, dict[str, Any], str, Any, dict[str, Any]]] = [
    ("unresolved", {"common": {"output_path": "${oc.env:OUT}"}, "optimization": {"iterations": 5, "optimizer": {"_name": "adamw"}}, "defaults": ["base"]},
     {"ranks": 1}, "resolved configuration", {"common": {"output_path": "o"}, "optimization": {"iterations": 5, "optimizer": {"_name": "adamw"}}}, {"ranks": 1}),
    ("without ranks", TRAINER, {}, "--ranks N", TRAINER, {"ranks": 2}),
    ("of two systems", {**TRAINER, "dataset_name": "d"}, {"ranks": 1}, "--from trl", {**TRAINER, "dataset_name": "d"}, {"ranks": 1, "dialect": "trl"}),
    ("a slip", {**TRAINER, "learning_rte": 1e-4}, {"ranks": 1}, "did you mean 'learning_rate'", {**TRAINER, "learning_rate": 1e-4}, {"ranks": 1}),
    ("NVMe", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "train_batch_size": 8}, {"ranks": 8}, "device",
     {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "train_batch_size": 8}, {"ranks": 8}),
    ("fp8", {"distributed_type": "FSDP", "mixed_precision": "fp8", "num_processes": 8}, {}, "write mixed_precision bf16",
     {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}, {}),
    ("preferences", {"model": {"model_name": "m"}, "training": {"trainer_type": "TRL_DPO", "max_steps": 5}}, {"ranks": 1}, "preference",
     {"model": {"model_name": "m"}, "training": {"trainer_type": "TRL_SFT", "max_steps": 5}}, {"ranks": 1}),
    ("4 bits alone", {**TRAINER, "use_peft": False, "load_in_4bit": True}, {"ranks": 1, "dialect": "trl"}, "adapters",
     {**TRAINER, "use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"ranks": 1, "dialect": "trl"}),
    ("two that contradict", {**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "learning_rate": 1e-4},
     {"ranks": 1}, "contradicts", {**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}}, {"ranks": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "values", "how", "says", "mended", "then"), WRONG, ids=[case[0] for case in WRONG])
def test_a_wrong_file_is_refused_and_what_the_error_says_works(what, values, how, says, mended, then):
    with pytest.raises(ConfigError, match=says) as refused:
        from_config(copy.deepcopy(values), **how)
    assert refused.value.given and refused.value.why and refused.value.fix
    made = from_config(copy.deepcopy(mended), **then)
    assert checked(made).config == made.config


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"use one of \.yaml"):
        from_config(tmp_path)
    with pytest.raises(ConfigError, match="check the path"):
        from_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="name a file"):
        from_config()


def test_outcome_of_an_empty_mapping_is_an_error_that_says_whose_it_could_be():
    assert outcome("accelerate", {})[0] == "imported"  # a system is named: defaults there
    with pytest.raises(ConfigError, match="--from NAME"):
        from_config({})


HF: dict[str, Any] = {"output_dir": "o", "max_steps": 100, "learning_rate": 1e-4, "lr_scheduler_type": "cosine"}
NO_NUMBERS = [
    *[(key, float("nan")) for key in ("learning_rate", "warmup_steps", "logging_steps", "save_steps", "adam_epsilon")],
    ("warmup_steps", float("inf")),
    ("learning_rate", "1e999"),
    ("max_steps", 10**400),
    ("lr_scheduler_kwargs", {"num_cycles": float("nan")}),
    ("lr_scheduler_kwargs", '{"num_cycles": NaN}'),
]


@pytest.mark.parametrize(("key", "value"), NO_NUMBERS)
def test_a_number_that_is_none_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=f"^{key}="):
        from_config({**HF, key: value}, dialect="transformers", ranks=1)


def test_infinity_is_kept_where_a_row_has_it():
    made = from_config({"trainer": {"clip_grad_norm_type": float("inf")}}, dialect="ml", ranks=1)
    assert made.run["train"]["norm_type"] == "inf"
    zero = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": 8,
        "steps_per_print": math.inf,
    }  # as accelerate writes it
    made = from_config(zero, dialect="deepspeed", ranks=2)
    assert {one.key: one.verdict for one in made.findings}["steps_per_print"] == "dropped"


LAUGHS = {"a0": "x" * 10} | {f"a{n}": f"${{a{n - 1}}}" * 10 for n in range(1, 9)}
ITSELF: dict[str, Any] = {**HF}
ITSELF["fsdp_config"] = ITSELF
BOMB: list[Any] = ["x"] * 10
for _ in range(8):
    BOMB = [BOMB] * 10


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({**LAUGHS, "run_name": "${a8}"}, "larger than a configuration is"),
        ({"fsdp_config": ITSELF}, "levels of values"),
        ({"lora_target_modules": BOMB}, "more than 10000 values"),
        ({"run_name": "x" * 2_000_000}, "more than 1000000 letters"),
    ],
)
def test_what_is_larger_than_a_configuration_is_refused(more, why):
    with pytest.raises(ConfigError, match=why):
        from_config({**HF, **more}, dialect="transformers", ranks=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": "2"}, "ranks='2'"),
        ({"ranks": 2.0}, "ranks=2.0"),
        ({"ranks": True}, "ranks=True"),
        ({"ranks_per_node": "1"}, "ranks_per_node='1'"),
        ({"allow": "bogus"}, "allow='bogus'"),
    ],
)
def test_an_argument_of_another_type_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        from_config(HF, dialect="transformers", **given)
    assert caught.value.given == said


# ---- what decides a run, and the source does not say -------------------------------------------------------------------

TITAN: dict[str, Any] = {
    "job": {},
    "training": {"steps": 5, "seq_len": 64, "local_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "lr_scheduler": {"warmup_steps": 1},
}


@pytest.mark.parametrize(
    ("section", "key", "ours", "value"),
    [
        ("training", "steps", "train.steps", 4),
        ("training", "local_batch_size", "data.global_batch", 16),
        ("training", "seq_len", "data.seq_len", 32),
        ("optimizer", "lr", "optim.lr", 0.5),
    ],
)
def test_what_decides_a_run_and_is_not_said_has_to_be_written(section, key, ours, value, tmp_path):
    """No default of ours stands in its place: the file that is written is refused by the key until it is there."""
    values = copy.deepcopy(TITAN)
    values[section][key] = None
    made = from_config(values, dialect="torchtitan", ranks=2)
    at, last = ours.split(".")
    assert made.run[at][last] == UNWRITTEN
    assert sum(text.startswith(f"{ours}: ") for text in made.missing) == 1
    run = tmp_path / "run.yaml"
    run.write_text(made.yaml())
    with pytest.raises(ConfigError) as refused:
        load_config(run)
    assert refused.value.given == f"{ours} = {UNWRITTEN} ({run}:{origin_of(run, last)})"
    assert f"--{ours}=" in refused.value.fix
    assert getattr(getattr(load_config(run, [f"{ours}={value}"]).config, at), last) == value


def origin_of(run: Path, key: str) -> int:
    return next(place for place, line in enumerate(run.read_text().splitlines(), 1) if f"{key}: {UNWRITTEN}" in line)


def test_the_nearest_name_is_not_looked_for_without_end(monkeypatch):
    """A file of 5,000 keys that nobody has took 11 s."""
    import difflib

    counted, close = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *given: counted.append(1) or close(*given))
    section = {f"thing{place}": 1 for place in range(1500)}
    for values in ({f"key_{place}": 1 for place in range(1500)}, {"fsdp_config": section}, {"logging": section}):
        counted.clear()
        with pytest.raises(ConfigError) as refused:
            from_config({**HF, **values}, dialect="transformers", ranks=1)
        assert refused.value.given.count("=") + refused.value.given.count(",") + 1 >= 1500
        assert len(counted) <= 600
