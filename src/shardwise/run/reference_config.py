"""The sizes of the reference model, and a check of those in a configuration. Torch-free: launchers use it too."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from shardwise.config.check import checked
from shardwise.config.suggest import did_you_mean, missing_blank
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The sizes of a :class:`ReferenceModel`; the defaults make 0.8 M parameters.

    Args:
        vocab: number of tokens (256: bytes).
        dim: width of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads; divides ``dim``.
        num_kv_heads: key and value heads; divides ``num_heads``.
        ffn: inner width of the feed-forward.
        max_seq: longest sequence, in positions.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: the output layer shares the weight of the embedding.
    """

    vocab: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn: int = 352
    max_seq: int = 256
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self):
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"dim={self.dim} with num_heads={self.num_heads}",
                why="each head gets dim / num_heads channels, an even number because positions rotate pairs",
                fix=f"use dim={2 * self.num_heads * max(1, self.dim // (2 * self.num_heads))}",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}",
                why="each key and value head serves the same number of query heads",
                fix=f"use num_kv_heads={math.gcd(self.num_heads, self.num_kv_heads)}",
            )


def check_reference_args(
    args: Mapping[str, Any], *, seq_len: int, origins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Refuses arguments that the reference model does not have, or cannot be built with.

    Args:
        args: the keyword arguments, ``model.args`` of a config.
        seq_len: the longest sequence that the model will run on.
        origins: where each dotted key was given, for the message.

    Returns:
        the arguments, converted to their types.
    """
    kinds = {int: Annotated[int, msgspec.Meta(ge=1)], float: Annotated[float, msgspec.Meta(gt=0)], bool: bool}
    hints = {field.name: kinds[field.type] for field in dataclasses.fields(ReferenceConfig)}  # type: ignore[index]
    taken: dict[str, Any] = {}
    for name, value in args.items():
        where = f"model.args.{name}={value!r}{_origin(name, origins)}"
        if name not in hints:
            raise ConfigError(
                where,
                why=f"the reference model takes no '{name}'",
                fix=missing_blank(name, value) or did_you_mean(name, list(hints), what="it takes"),
            )
        taken[name] = checked(value, hints[name], where=where, key=name)
    try:
        sizes = ReferenceConfig(**taken)
    except ConfigError as error:
        # The conflict may be with a default, so the error also names sizes that were not given.
        given = ", ".join(name for name in ("dim", "num_heads", "num_kv_heads") if name in args)
        error.given = f"{error.given} (model.args: {given or 'none'} given, the others by default)"
        raise
    if "max_seq" in args and sizes.max_seq < seq_len:
        raise ConfigError(
            f"model.args.max_seq={sizes.max_seq}{_origin('max_seq', origins)} with data.seq_len={seq_len}",
            why="the model has no positions for the end of such a sequence",
            fix=f"use max_seq={seq_len} or more (left out, it fits by itself), or a smaller data.seq_len",
        )
    return taken


def _origin(name: str, origins: Mapping[str, str] | None) -> str:
    found = (origins or {}).get(f"model.args.{name}")
    return f" ({found})" if found else ""
