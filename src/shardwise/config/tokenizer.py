"""Tokenizers: the files of a model directory that belong to one, and the file that is read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

BYTES_MEANT = "bytes"
"""The value of ``data.tokenizer`` for which the tokens are the bytes of a text."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "chat_template.json", "chat_template.jinja", "normalizer.json",
)  # fmt: skip


def is_tokens(path: str | None) -> bool:
    """Whether a data file holds tokens rather than text, by its ending."""
    return path is not None and path.endswith((".npy", ".bin"))


def tokenizer_files(folder: str | Path) -> list[Path]:
    return [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]


def tokenizer_path(given: str | None) -> Path | None:
    """The tokenizer file that ``data.tokenizer`` names (itself or its directory); None where tokens are bytes."""
    if given is None or given == BYTES_MEANT:
        return None
    path = Path(given)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        return file
    others = ", ".join(other.name for other in tokenizer_files(path)) if path.is_dir() else ""
    raise ConfigError(
        f"data.tokenizer={given!r}",
        why=f"there is no tokenizer.json in it (it has {others})"
        if others
        else f"there is no tokenizer.json (relative to {Path.cwd()})",
        fix="write one by transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        if others
        else "give bytes, or a directory with a tokenizer.json, or that file",
    )


def template_in(folder: Path) -> Any:
    """The chat template of a tokenizer's directory, where transformers finds it: a text, or several by name; None: it has
    none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    named = (read_json(folder / name).get("chat_template") for name in ("tokenizer_config.json", "chat_template.json"))
    return next(filter(None, named), None)


def is_in_4_bits(folder: str) -> bool:
    """Whether bitsandbytes has put the weights of a directory into 4 bits, by its ``config.json``."""
    settings = read_json(Path(folder) / "config.json").get("quantization_config")
    return (
        isinstance(settings, dict)
        and settings.get("quant_method") == "bitsandbytes"
        and bool(settings.get("load_in_4bit"))
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # who needs it will say so
        return {}
    return found if isinstance(found, dict) else {}


def json_object(file: Path, given: str, fix: str) -> dict[str, Any]:
    """The object in a JSON file that is needed. ``given``, ``fix``: of the error where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            given, why=f"it cannot be read: {getattr(error, 'strerror', None) or error}", fix=fix
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(given, why="it is no JSON object", fix=fix)
    return found


def add_special(tokenizer: Any, tokens: Iterable[str]) -> None:
    """Adds special tokens to a tokenizer of the library tokenizers, as transformers does; those that are there stay as they are."""
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens([token for token in tokens if token not in there])
