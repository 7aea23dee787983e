"""Small configurations of other systems, and files made from the rows of their tables."""

import copy
import random
from collections.abc import Iterator
from typing import Any

from shardwise.dialects.table import Row, Table, load, names, systems
from shardwise.errors import ConfigError
from shardwise.run.imported import from_config

BASE: dict[str, dict[str, Any]] = {
    "accelerate": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "num_machines": 1,
        "fsdp_config": {"fsdp_version": 1},
    },
    "fsdp1": {"sharding_strategy": "FULL_SHARD"},
    "deepspeed": {
        "zero_optimization": {"stage": 3},
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100},
        },
    },
    "fabric": {"strategy": "fsdp", "devices": 8},
    "transformers": {"output_dir": "o", "max_steps": 100, "fsdp": True},
    "trl": {"output_dir": "o", "max_steps": 100, "max_length": 128},
    "torchtune": {
        "model": {"_component_": "torchtune.models.a"},
        "checkpointer": {"checkpoint_dir": "m"},
        "batch_size": 2,
        "epochs": 1,
        "dtype": "fp32",
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    },
    "torchtitan": {"job": {}, "training": {"steps": 1000}, "lr_scheduler": {"decay_ratio": 0.2}},
    "oumi": {"model": {"model_name": "m"}, "training": {"max_steps": 100}, "fsdp": {"enable_fsdp": True}},
    "nemo": {
        "step_scheduler": {"max_steps": 300},
        "model": {"pretrained_model_name_or_path": "m"},
        "distributed": {"strategy": "fsdp2"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
        "lr_scheduler": {"lr_decay_style": "cosine"},
    },
    "optimus": {
        "common": {"output_path": "o"},
        "optimization": {"optimizer": {"_name": "adamw"}},
        "lr_scheduler": {"_name": "wsd"},
        "model": {"_name": "m"},
        "model_transforms": [{"_name": "fully_shard"}],
        "data": {"train_datasets": {"transform": {"batch_size": 4}}},
    },
    "ml": {
        "trainer": {"parallel": {"use_fsdp": True}},
        "optimizer": {"name": "adam"},
        "lr_scheduler": {"name": "linear"},
        "task": {"dataloader": {"train": {"batch_size": 4}}, "finished": {"max_steps": 100}},
        "model": {"name": "m"},
    },
}
PLAIN = {
    "int": [2], "float": [0.5], "bool": [True, False], "str": ["word"], "dtype": ["bfloat16", "float32"], "none": [None],
    "list": [["a.B"]], "auto": ["auto"], "any": ["word"], "path": [], "map": [{"a": 1}], "table": [],
}  # fmt: skip
ODD = {
    "int": [0, 1, 3, 8, -1], "float": [0.0, 0.1, 1.0, 2], "str": ["x", "a.b"], "bool": [True, False, "yes", "False"],
    "list": [["A", "b.C"], []], "any": ["w", 1],
}  # fmt: skip
OF_KEY = {  # keys that take a value of some shape only
    "total_num_steps": [400], "iterations": [500], "total_steps": [500], "betas": [[0.9, 0.95]], "device_mesh": [[2, 4]],
    "data_files": [["d.jsonl"]], "param_groups": [[{"pattern": ".*", "optimizer_kwargs": {"lr": 1e-3}}]],
}  # fmt: skip
BESIDE = {"nemo": ("peft.", "peft.target_modules", ["q_proj"])}  # keys that others of their section need


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; items of ``model_transforms`` are found by their name."""
    *path, last = key.split(".")
    place: Any = values
    for part in path:
        if isinstance(place, list):
            item = next((one for one in place if str(one.get("_name")) == part), None)
            place = item or place.append({"_name": part}) or place[-1]
            continue
        if not isinstance(place.get(part), dict | list):
            place[part] = [] if part == "model_transforms" else {}
        place = place[part]
    if not isinstance(place, list):
        place[last] = value
    elif not any(one["_name"] == last for one in place):
        place.append({"_name": last})


def keys_of(table: Table) -> list[str]:
    """The keys of a table that have a value of their own."""
    return [key for key, row in table.rows.items() if not row.is_of_all and not row.within]


def values_of(row: Row, samples: dict[str, list[Any]] = PLAIN) -> Iterator[Any]:
    """Values that a row takes: each word, and one or two of each kind."""
    own = OF_KEY.get(row.key.rpartition(".")[2])
    for kind in row.takes:
        yield from own if own is not None else samples.get(kind, PLAIN.get(kind, [kind]))


def with_key(name: str, key: str, value: Any) -> dict[str, Any]:
    """The small configuration of a system with one key more."""
    values = copy.deepcopy(BASE[name])
    section, other, constant = BESIDE.get(name, ("-", "", None))
    if key.startswith(section) and key != other:
        put(values, other, constant)
    put(values, key.replace("*", "thing"), value)
    return values


def made_from_rows(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A configuration of two to twelve keys, drawn from the rows of a system; of some, with another system's within."""
    name = draw.choice([*BASE])
    values, table = copy.deepcopy(BASE[name]), load(name)
    for key in draw.sample(keys_of(table), draw.randint(2, 12)):
        chosen = [*values_of(table.rows[key], {**PLAIN, **ODD})]
        if chosen:
            try:
                put(values, key.replace("*", "thing"), draw.choice(chosen))
            except (TypeError, AttributeError):  # inside of a value that has no keys
                continue
    if "deepspeed" in table.rows and table.rows["deepspeed"].within and draw.random() < 0.4:
        values["deepspeed"] = copy.deepcopy(BASE["deepspeed"])
        inner = load("deepspeed")
        for key in draw.sample(inner.plain_keys, 3):
            try:
                put(values["deepspeed"], key, draw.choice([*values_of(inner.rows[key], {**PLAIN, **ODD})] or ["auto"]))
            except (TypeError, AttributeError):
                continue
    return name, values


def unanswered(name: str, values: dict[str, Any], made: Any) -> list[str]:
    """The keys of a configuration that have no answer, or one without a sentence that has to have one."""
    table = load(name)
    said = {one.key: one for one in made.findings if one.given}
    lost = [one.key for one in said.values() if one.verdict != "kept" and not one.say]
    for key, value in table.flatten(values):
        row = table.find(key)
        if row is not None and row.within and isinstance(value, dict):
            inner = load(row.within) if row.within in names() else table
            lost += [
                f"{key}.{below}" for below, _ in inner.flatten(value) if f"{key}.{_alias(inner, below)}" not in said
            ]
        elif _alias(table, key) not in said:
            lost.append(key)
    return lost


def _alias(table: Table, key: str) -> str:
    row = table.find(key)
    return row.alias if row is not None and row.alias else key


def outcome(name: str, values: dict[str, Any], **how: Any) -> tuple[str, Any]:
    """``imported`` with the result, or ``refused`` with the error. Any other error is a fault."""
    try:
        return "imported", from_config(copy.deepcopy(values), dialect=name, **how)
    except ConfigError as error:
        return "refused", error


def names_a_key(values: dict[str, Any], error: ConfigError, name: str) -> bool:
    """Whether an error names a key that the configuration has, or a default of its system."""
    table = load(name)
    leaves = [*table.flatten(values)]
    inner = [
        f"{key}.{below}"
        for key, value in leaves
        if isinstance(value, dict)
        for below, _ in load("deepspeed").flatten(value)
    ]
    named = any(_alias(table, key) in str(error) for key in [*(key for key, _ in leaves), *inner])
    return named or any(f"{key}=" in error.given and "default there" in error.given for key in table.plain_keys)


assert {*BASE} == {*systems()}
