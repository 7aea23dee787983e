"""The two files of a directory of PEFT's adapters, as they are: the configuration, and the tensors by layer. Torch-free."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import CheckpointError, UnsupportedError

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<layer>.+)\.(?P<part>lora_A|lora_B)\.weight")
_OF_TABLE = re.compile(r"(?P<layer>.+)\.(?P<part>lora_embedding_[AB])")
# Which PEFT writes beside the adapter of an embedding, or of a head.
_BASE = re.compile(r"(?P<layer>.+)\.base_layer\.weight")
_VECTOR = re.compile(r"(?P<layer>.+)\.lora_magnitude_vector(\.weight)?")
INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # those that leave the weights of the base as they are
# Keys of a configuration that are read here, or change nothing of what an adapter computes once it has its values.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip


def weights_in(folder: Path) -> Path:
    """The file with an adapter's tensors.

    Raises:
        CheckpointError: there is none.
        UnsupportedError: it is a pickle.
    """
    path = folder / WEIGHTS
    if path.is_file():
        return path
    if (folder / PICKLED).exists():
        raise UnsupportedError(
            f"{folder / PICKLED}",
            why="it is a pickle, and reading one runs the code in it",
            fix="where you trust it, let PEFT write it again as safetensors: PeftModel.from_pretrained(model, folder).save_pretrained(other)",
        )
    raise CheckpointError(
        f"adapters from {folder}",
        why=f"there is no {WEIGHTS} in it",
        fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
    )


def current_key(key: str) -> str:
    """A key as PEFT writes it today."""
    return key.removesuffix(".weight") if _VECTOR.fullmatch(key) else key


def refuse(folder: Path, what: str, why: str) -> NoReturn:
    raise UnsupportedError(
        f"{folder}: {what}",
        why=why,
        fix="merge it into its base with PEFT (merge_and_unload, then save_pretrained), and load that with sw.load_weights",
    )


def refuse_unknown(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        refuse(folder, f"peft_type={config.get('peft_type')}", "adapters are LORA here, with use_rslora and use_dora")
    if config.get("bias", "none") != "none":
        refuse(folder, f"bias={config['bias']!r}", "PEFT stores these biases in a form of their own")
    if (init := config.get("init_lora_weights")) not in INITS:
        refuse(
            folder,
            f"init_lora_weights={init!r}",
            "it has changed the weights of the base, which are not in this directory",
        )
    for key, value in config.items():
        if key not in _KNOWN and value:
            refuse(folder, f"{key}={value!r:.60}", "that is not supported here")


def layers_in(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, tuple[int, ...]]], list[str]]:
    """Layer -> part of its adapter -> shape; and the names of tensors that are trained in full."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    beside = []
    for key, shape in shapes.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {key}",
                why=f"PEFT's names begin with {PREFIX}",
                fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
            )
        if factor := _FACTOR.fullmatch(name):
            layers.setdefault(factor["layer"], {})[factor["part"]] = shape
        elif factor := _OF_TABLE.fullmatch(name):
            layers.setdefault(factor["layer"], {})[factor["part"].replace("embedding_", "")] = shape
        elif (base := _BASE.fullmatch(name)) and any(
            f"{PREFIX}{base['layer']}.{part}" in shapes for part in ("lora_embedding_A", "lora_A.weight")
        ):
            continue
        elif vector := _VECTOR.fullmatch(name):
            layers.setdefault(vector["layer"], {})["lora_magnitude_vector"] = shape
        elif "lora_" in name or ".base_layer." in name:
            refuse(folder, name, "adapters are factors lora_A and lora_B here, beside linear layers and embeddings")
        else:
            beside.append(name)
    half = next((name for name, parts in layers.items() if not {"lora_A", "lora_B"} <= parts.keys()), None)
    if half is not None or not layers:
        raise CheckpointError(
            f"adapters from {folder}",
            why=f"{half} has {' and '.join(layers[half])} alone"
            if half is not None
            else "there is no lora_A and lora_B in it",
            fix="let it be saved again: a layer has lora_A and lora_B",
            name=half,
        )
    return layers, beside


def config_in(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"adapters from {folder}",
            why=f"{CONFIG} cannot be read: {error.strerror or error}",
            fix="name a directory that sw.save_adapter, or save_pretrained of a PEFT model, has written",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}", why=f"it is not JSON: {error}", fix="let it be written again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}", why="it is no JSON object", fix="let it be written again")
    return config


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a safetensors file, by its header alone."""
    path = weights_in(folder)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        return dict(_shapes(header))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}", why=f"it is not a complete safetensors file: {error}", fix="copy it again, or save it again"
        ) from error


def _shapes(header: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, fact in header.items():
        if name != "__metadata__":
            shape = tuple(int(n) for n in fact["shape"])
            if math.prod(shape) < 1:
                raise ValueError(f"{name} of shape {list(shape)} has no values")
            yield name, shape
