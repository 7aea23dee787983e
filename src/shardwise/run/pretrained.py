"""Builds a model from a Hugging Face directory: the class that its ``config.json`` names, without loading weights. Does
not import torch before that."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.suggest import did_you_mean
from shardwise.config.tokenizer import json_object
from shardwise.errors import ConfigError, first_line
from shardwise.run.attention import IMPLEMENTATIONS

if TYPE_CHECKING:
    from torch import nn


def build_pretrained(
    folder: str, changes: Mapping[str, Any], *, rows: int | None = None, eos: int | None = None
) -> "nn.Module":
    """Builds the model that a Hugging Face directory describes, initialised by its constructor.

    Args:
        folder: a directory with a ``config.json``.
        changes: fields of the configuration to change, and their values.
        rows: of its embedding, and of its head; None: as in the configuration.
        eos: the token that ends a text; None: as in the configuration.
    """
    kind, config = check_pretrained(folder, changes)
    for key, value in (("vocab_size", rows), ("eos_token_id", eos)):
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            if value is not None and hasattr(part, key):
                setattr(part, key, value)
    model = _built(kind, config, changes)
    if rows is not None:
        _refuse_no_table(model, rows, f"rows added to the vocabulary of model.hf={folder!r}")
    if eos is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = eos
    return model


def _built(kind: Any, config: Any, changes: Mapping[str, Any]) -> Any:
    import torch

    try:
        if not hasattr(kind, "from_config"):
            return kind(config)
        return kind.from_config(config, dtype=torch.get_default_dtype())  # as a class does, not in that of the files
    except (ValueError, ImportError) as error:
        named = {key: changes[key] for key in IMPLEMENTATIONS if key in changes}
        if not named:
            raise
        raise ConfigError(
            f"model.args={named} for {getattr(kind, '__name__', kind)}",
            why=first_line(error),
            fix="use another implementation, such as sdpa or eager, or leave it out",
        ) from error


def _refuse_no_table(model: Any, rows: int, given: str) -> None:
    """Refuses a model whose embedding, or head, is not one table with a row for each token."""
    from torch import nn

    try:
        found: list[tuple[str, Any, Any]] = [
            ("input embedding", model.get_input_embeddings(), nn.Embedding),
            ("output head", model.get_output_embeddings(), nn.Linear),
        ]
    except (AttributeError, NotImplementedError):
        found = [("input embedding", None, nn.Embedding)]
    names = {module: name for name, module in model.named_modules()}
    for what, module, kind in found:
        if what == "output head" and module is None:
            continue  # a model that predicts no tokens
        if isinstance(module, kind) and module.weight.shape[0] == rows:
            continue
        place = f" {names.get(module, '')!r}, a {type(module).__name__}," if module is not None else ""
        raise ConfigError(
            f"{given}: a {type(model).__name__}",
            why=f"its {what}{place} is not a plain {kind.__name__} with a row for each of {rows:,} tokens"
            if module is not None
            else f"it does not say what its {what} is",
            fix="add them by transformers (model.resize_token_embeddings), and save it; or leave out model.add_tokens and model.vocab",
        )


def check_pretrained(folder: str, changes: Mapping[str, Any], *, what: str = "model.hf") -> tuple[Any, Any]:
    """The class of transformers that a directory names (AutoModelForCausalLM if it names none), and its
    configuration.

    Args:
        folder: a directory with a ``config.json``.
        changes: fields of the configuration to change, and their values.
        what: the option that named the directory, for messages.
    """
    given = f"{what}={folder!r}"
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(given, why=f"it needs transformers: {error}", fix="pip install 'shardwise[hf]'") from error
    content = _content(folder, given)
    if "auto_map" in content:
        raise ConfigError(
            given,
            why="its class is code in that directory, which is not run",
            fix="name a function that builds the model: model.build=pkg.mod:fn, and model.weights=" + folder
            if what == "model.hf"
            else "name a function that returns the model with its weights: pkg.mod:fn",
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    fields = {key: value for key, value in changes.items() if key not in IMPLEMENTATIONS}
    for key in fields:
        if not hasattr(config, key):
            raise ConfigError(
                f"model.args: {key!r}",
                why=f"{type(config).__name__} has no such field",
                fix=did_you_mean(key, [*config.to_dict(), *IMPLEMENTATIONS], what="fields"),
            )
    config.update(fields)
    for key in IMPLEMENTATIONS:
        if changes.get(key) is not None:
            setattr(config, f"_{key}", changes[key])
    name = next(iter(content.get("architectures") or ()), None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else transformers.AutoModelForCausalLM
    if kind is None:
        raise ConfigError(
            f"{given}: the class {name}",
            why=f"transformers {transformers.__version__} has none of that name",
            fix="install the version that the model was made with, or name a function that builds it"
            + (": model.build" if what == "model.hf" else ""),
        )
    return kind, config


def vocab_in(folder: str) -> int | None:
    content = _content(folder, f"model.hf={folder!r}")
    size = content.get("vocab_size", (content.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _content(folder: str, given: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    return json_object(path, f"{given}: {path}", "name a directory that save_pretrained has written")
