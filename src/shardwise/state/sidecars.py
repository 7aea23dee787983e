"""The configuration and tokenizer files that are saved with a model's weights, so that other libraries can open
them."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config.tokenizer import TOKENIZER_FILES, tokenizer_files
from shardwise.model import is_pretrained, user_class
from shardwise.parallel import Runtime
from shardwise.state.formats.folder import sidecars_of
from shardwise.state.naming import naming_of, shapes_of
from shardwise.state.origin import Origin
from shardwise.techniques.fold import acts

_MOST = 256 << 20  # bytes of one file: a larger one is not a configuration


def sidecar_files(
    runtime: Runtime, dtype: str | None = None, *, packed: bool = False
) -> tuple[dict[str, bytes], list[str]]:
    """File name -> content of the configuration and tokenizer files from the directory that the model was loaded from,
    and of a Hugging Face model's current configuration; and notes for the user.

    Args:
        runtime: of the model. The tokenizer is the one that it was trained with, if that is known.
        dtype: of its parameters in the files, if it is not the model's own.
        packed: packed weights are written as another library reads them, and config.json says so.
    """
    found: dict[str, bytes] = {}
    notes: list[str] = []
    folder = runtime.memory(Origin).files
    if folder is not None:
        try:
            folder.stat()  # it may have been removed
            paths = sidecars_of(folder)
            if runtime.tokenizer is not None:
                paths = [path for path in paths if path.name not in TOKENIZER_FILES]
            if isinstance(runtime.tokenizer, Path):
                paths += tokenizer_files(runtime.tokenizer.parent)
            found = {path.name: path.read_bytes() for path in paths if path.stat().st_size <= _MOST}
        except OSError as error:
            notes.append(f"weights without the configuration and tokenizer of {folder}: {error.strerror or error}")
    if isinstance(runtime.tokenizer, Mapping):
        found |= runtime.tokenizer
    found |= _of_hugging_face(runtime, dtype)
    settings: dict[str, Any] = {}
    for act in acts() if packed else ():
        settings |= act.packed_settings(runtime, naming_of(runtime.module, shapes_of(runtime)).prefix)
    if settings or "config.json" in found:
        found["config.json"] = _with_settings(found.get("config.json", b"{}"), settings)
    return found, notes


def _with_settings(config: bytes, settings: Mapping[str, Any]) -> bytes:
    """A config.json with these settings of its packed weights, in place of those of the directory that the model was loaded from."""
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(content, dict) or content.get("quantization_config") == (settings or None):
        return config
    content.pop("quantization_config", None)
    content |= {"quantization_config": dict(settings)} if settings else {}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _of_hugging_face(runtime: Runtime, dtype: str | None) -> dict[str, bytes]:
    model = naming_of(runtime.module, shapes_of(runtime)).module
    if not is_pretrained(model):
        return {}
    config: Any = copy.deepcopy(model.config)
    root = model is runtime.module  # replicas give the root another class
    config.architectures = [runtime.recipe.module_class if root else user_class(model).__name__]
    stored = [param.storage for param in runtime.recipe.params.values() if param.codec is None]
    if stored:
        config.dtype = dtype or stored[0]
    found = {"config.json": config.to_json_string().encode()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        found["generation_config.json"] = generation.to_json_string().encode()
    return found
