"""Refuses ``data.seq_len`` beyond the table of positions of a model, before a process group starts.

Of a model directory, its files show the table (torch-free, in the launcher). Any other model is built on meta by rank 0, and run on
tokens there: shapes and indices of positions show what no values are needed for.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.run.config import RunConfig

if TYPE_CHECKING:
    from torch import nn

_NUMBERS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_MOST_OFFSET = 8  # rows that a table has in front of the first position
_LONGEST = 100 << 20  # bytes of a header, as the format allows


def check_positions(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses ``data.seq_len`` beyond the positions of a model directory that has a table of them. Torch-free.

    Raises:
        ConfigError: with the number of positions.
    """
    if config.model.hf is None or config.data.build is not None:
        return
    folder = Path(config.model.hf)
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # what reads it says so
    told = {**content, **config.model.args}
    number = next((told[key] for key in _NUMBERS if isinstance(told.get(key), int)), None)
    if number is not None and number < config.data.seq_len and _has_table(folder, number):
        raise _too_long(config, f"model.hf={config.model.hf!r}", number, origins.get("data.seq_len", "default"))


def check_positions_of_model(config: RunConfig) -> None:
    """The same of any model that is fed tokens, tried on meta; the random numbers of the process do not change."""
    if config.data.build is not None or config.train.forward is not None or config.model.build is None:
        return
    import torch

    from shardwise.run.build import build_plain

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = build_plain(config)
    except ShardwiseError:
        return  # said again, by every rank, where the model is built
    except Exception:
        return  # a constructor that looks at values cannot be built on meta
    most = most_positions(module.eval(), config.data.seq_len)
    if most is not None:
        raise _too_long(config, f"model.build={config.model.build!r}", most, "")


def most_positions(module: "nn.Module", seq_len: int) -> int | None:
    """How many tokens a model on meta takes, where it takes some and not ``seq_len``; None: it takes as many, or that does not show."""
    from shardwise.run.positions_trial import takes

    if takes(module, seq_len) is not False or not takes(module, 1):
        return None
    most, too_many = 1, seq_len
    while too_many - most > 1:
        middle = (most + too_many) // 2
        fits = takes(module, middle)
        if fits is None:
            return None
        most, too_many = (middle, too_many) if fits else (most, middle)
    return most


def _has_table(folder: Path, number: int) -> bool:
    """Whether a file of the directory has a learned table of so many positions, which rotary models have not."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(size)) if size <= _LONGEST else {}
        except (OSError, ValueError):
            continue
        for name, entry in header.items():
            words, shape = name.lower(), entry.get("shape", ()) if isinstance(entry, dict) else ()
            is_named = any(word in words for word in ("position", "wpe", "pos_emb"))
            if is_named and len(shape) == 2 and 0 <= shape[0] - number <= _MOST_OFFSET:
                return True
    return False


def _too_long(config: RunConfig, model: str, number: int, origin: str) -> ConfigError:
    return ConfigError(
        f"data.seq_len={config.data.seq_len}{f' ({origin})' if origin else ''} with {model}, which has {number} positions",
        why="a sample has up to so many tokens, and the model has no position for those beyond its own",
        fix=f"use --data.seq_len={number} or less, or a model with more positions",
    )
