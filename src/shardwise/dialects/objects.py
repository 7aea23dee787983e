"""Objects of other libraries, and variables of an environment, as configurations. Nothing of theirs is imported: an object is known by
the name of its class, or of one that it inherits from."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.dialects.facts import Facts, Note
from shardwise.dialects.table import head_of, load, names, systems
from shardwise.dialects.values import RefusedError
from shardwise.errors import ConfigError

_BY_NAME = ("ShardingStrategy", "BackwardPrefetch", "StateDictType")  # enums whose names are the words
_NO_SIZES = ("handler", "device_mesh")  # fields of a record of sizes
_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DEEPSPEED_")


@cache
def classes() -> dict[str, tuple[str, str]]:
    """Class -> the system, and the section that the record is of; the head's ``objects``."""
    return {kind: (name, section) for name in systems() for kind, section in head_of(name).pairs("objects").items()}


def of_object(source: Any) -> tuple[str, dict[str, Any]]:
    kind = next((one.__name__ for one in type(source).__mro__ if one.__name__ in classes()), None)
    if kind is None:
        raise ConfigError(
            f"an object of {type(source).__name__}",
            why="it is no record of a system that is known",
            fix=f"give a file, a mapping, or one of {', '.join(classes())}",
        )
    system, section = classes()[kind]
    values = _READERS.get(kind, _fields)(source)
    if section.startswith("model_transforms."):
        values = {"_name": section.rpartition(".")[2], **values}
    elif kind == "FSDPParams":
        values.setdefault("enable_fsdp", True)
    values = {key: value for key, value in values.items() if value is not None}
    beside = _beside(kind, values) if "distributed_type" in load(system).rows else {}
    for name in reversed(section.split(".")) if section else ():
        values = {name: values}
    return system, {**values, **beside}


def _beside(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """What a plugin says of keys beside its section."""
    beside = {"distributed_type": "DEEPSPEED" if kind == "DeepSpeedPlugin" else "FSDP"}
    policy = values.get("mixed_precision_policy") or {}
    dtypes = {policy.get("param_dtype"), policy.get("reduce_dtype")}
    for dtype, word in (("bfloat16", "bf16"), ("float16", "fp16")):
        if dtypes == {dtype}:  # as the word makes it; any other is refused as a key
            del values["mixed_precision_policy"]
            beside["mixed_precision"] = word
    return beside


def plain(value: Any) -> Any:
    """A value of another library as plain values: enums, dtypes and policies by the name of their class."""
    kind = type(value).__name__
    if isinstance(value, Enum):
        return value.name if kind in _BY_NAME else plain(value.value)
    if kind == "dtype":
        return str(value).removeprefix("torch.")
    if kind == "CPUOffloadPolicy":
        return {"_target_": kind, "pin_memory": value.pin_memory}
    if kind == "OffloadPolicy":
        return False
    if kind == "CPUOffload":
        return value.offload_params
    if kind == "timedelta":
        return value.total_seconds()
    if isinstance(value, type):
        return value.__name__
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if callable(value):
        return getattr(value, "__name__", kind)
    return str(value) if isinstance(value, Path) else value


def _fields(source: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(source):
        names_ = [field.name for field in dataclasses.fields(source) if not field.name.startswith("_")]
        return {name: plain(getattr(source, name, None)) for name in names_}
    return {name: plain(value) for name, value in vars(source).items() if not name.startswith("_")}


def _settled_plugin(source: Any) -> dict[str, Any]:
    """A plugin that has settled its fields: policies and functions stand in the place of words."""
    values = _fields(source)
    words = {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "size_based_auto_wrap_policy": "SIZE_BASED_WRAP"}
    values["offload_params"] = bool(values.pop("cpu_offload", False))
    policy = values.get("auto_wrap_policy")
    values["auto_wrap_policy"] = words.get(str(policy), policy)
    values["transformer_layer_cls_to_wrap"] = values.pop("transformer_cls_names_to_wrap", None)
    derived = ("state_dict_config", "optim_state_dict_config", "param_init_fn", "limit_all_gathers")
    return {key: value for key, value in values.items() if key not in derived}


def _strategy(source: Any) -> dict[str, Any]:
    held = {**getattr(source, "_fsdp_kwargs", {}), **getattr(source, "_ddp_kwargs", {})}
    for name in ("sharding_strategy", "cpu_offload", "mixed_precision"):
        held[name] = getattr(source, name, held.get(name))
    names = "device_mesh data_parallel_size tensor_parallel_size process_group_backend state_dict_type"
    for name in names.split():
        held.setdefault(name, getattr(source, f"_{name}", None))
    again = getattr(source, "_activation_checkpointing_kwargs", None) or {}
    held["activation_checkpointing_policy"] = again.get("auto_wrap_policy")
    kind = next(one.__name__ for one in type(source).__mro__ if one.__name__ in classes())
    named = {name: _classes(name, value) if name.endswith("_policy") else plain(value) for name, value in held.items()}
    return {"class_path": kind, "init_args": {name: value for name, value in named.items() if value is not None}}


def _classes(name: str, policy: Any) -> list[str] | None:
    classes = policy if policy is None else getattr(policy, "_module_classes", policy)
    if classes is None or isinstance(classes, list | tuple | set | frozenset):
        return None if classes is None else sorted(getattr(one, "__name__", str(one)) for one in classes)
    raise ConfigError(
        f"{name}={getattr(policy, '__name__', type(policy).__name__)}",
        why="it is a function, which decides by code of its own",
        fix="give the classes that are units: {Block}",
    )


def _of_zero(source: Any) -> dict[str, Any]:
    """A plugin whose file is an object that holds it, beside fields that were filled from it."""
    values = _fields(source)
    held = getattr(values.pop("hf_ds_config", None), "config", None)
    if isinstance(held, dict):
        filled = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model")
        values = {key: value for key, value in values.items() if key not in filled and not key.startswith("offload_")}
        values["deepspeed_config_file"] = plain(held)
    values["deepspeed_moe_layer_cls_names"] = values.pop("transformer_moe_cls_names", None)
    if values.pop("enable_msamp", None):
        values["enable_msamp"] = True
    del values["is_train_batch_min"], values["msamp_opt_level"]
    return values


_READERS = {
    "DeepSpeedPlugin": _of_zero,
    "FullyShardedDataParallelPlugin": _settled_plugin,
    "ParallelismConfig": lambda source: {
        key: value for key, value in _fields(source).items() if not key.endswith(_NO_SIZES)
    },
    "FSDPStrategy": _strategy,
    "ModelParallelStrategy": _strategy,
    "DDPStrategy": _strategy,
}


def of_environment(environ: Mapping[str, str], facts: Facts) -> tuple[str, dict[str, Any]]:
    """The system and the configuration that variables of an environment stand for. What a variable says that no key has is noted in
    ``facts``."""
    for name in (one for one in names() if "dialect" in load(one).head):
        table = load(name)
        found: dict[str, Any] = {}
        for variable in sorted({*table.rows} & {*environ}) + sorted(_unknown(environ, table.rows)):
            row = table.find(variable)
            if row is None:
                facts.refuse(variable, table.unknown(variable))
                continue
            switch = next((one for start, one in table.pairs("under").items() if variable.startswith(start)), None)
            if switch is not None and environ.get(switch, "").strip().lower() not in ("true", "1"):
                text = f"it has no effect there without {switch}=true"
                facts.notes.append(Note(variable, environ[variable], True, "dropped", text, is_used=True))
                continue
            _read_variable(row, variable, environ[variable].strip(), found, facts)
        return table.head["dialect"], found
    raise AssertionError("there is no table of variables")


def _unknown(environ: Mapping[str, str], known: Mapping[str, Any]) -> list[str]:
    return [name for name in environ if name.startswith(_VARIABLES) and name not in known]


def _read_variable(row: Any, variable: str, text: str, found: dict[str, Any], facts: Facts) -> None:
    if row.alias:
        if text:
            found[row.alias] = text
        return
    try:
        value = row.coerced(text, variable)
    except RefusedError as error:
        facts.refuse_error(error)
        return
    word = text.lower()
    verdict, say = row.answer_of(word)
    note = Note(variable, value, True, verdict, say, is_used=True)
    facts.notes.append(note)
    if verdict == "refused":
        facts.refuse(variable, say, note)
        return
    for action in row.action_of(word):
        key, _, constant = action.partition("=")
        found.setdefault(key, constant)
        note.ours[key] = constant
