"""A model from a Hugging Face directory: the class that its ``config.json`` names, built without values. Torch-free until then."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_pretrained", "vocab_in"]


def build_pretrained(folder: str, changes: Mapping[str, Any]) -> "nn.Module":
    """The model that a directory describes, with values as its constructor draws them.

    Args:
        folder: with a ``config.json``.
        changes: fields of the configuration that are to be others.

    Raises:
        ConfigError: no configuration, a class that transformers does not have, or a field that the configuration has not.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model.hf={folder!r}", why=f"it needs transformers: {error}", fix="pip install 'shardwise[hf]'"
        ) from error
    content = _content(folder)
    if "auto_map" in content:
        raise ConfigError(
            f"model.hf={folder!r}",
            why="its class is code in that directory, which is not run",
            fix="name a function that builds the model: model.build=pkg.mod:fn, and model.weights=" + folder,
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    for key in changes:
        if not hasattr(config, key):
            raise ConfigError(
                f"model.args: {key!r}",
                why=f"{type(config).__name__} has no such field",
                fix=did_you_mean(key, list(config.to_dict()), what="fields"),
            )
    config.update(dict(changes))
    name = next(iter(content.get("architectures") or ()), None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else transformers.AutoModelForCausalLM
    if kind is None:
        raise ConfigError(
            f"model.hf={folder!r}: the class {name}",
            why=f"transformers {transformers.__version__} has none of that name",
            fix="install the version that the model was made with, or name a function that builds it: model.build",
        )
    return kind.from_config(config) if kind is transformers.AutoModelForCausalLM else kind(config)


def vocab_in(folder: str) -> int | None:
    """Size of the vocabulary that a directory's configuration names."""
    content = _content(folder)
    size = content.get("vocab_size", (content.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _content(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"it is no JSON: {error}"
        raise ConfigError(
            f"model.hf={folder!r}: {path}", why=why, fix="name a directory that save_pretrained has written"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"model.hf={folder!r}: {path}",
            why="it holds no configuration",
            fix="name a directory that save_pretrained has written",
        )
    return content
