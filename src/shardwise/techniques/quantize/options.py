"""Options of 4-bit weights: which are stored so. Torch-free.

>>> quantize_of("nf4")
Quantize(kind='nf4', targets='all-linear', keep=())
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.config.torch_options import Replacement
from shardwise.errors import ConfigError

ALL_LINEAR = "all-linear"


class Quantize(Options, frozen=True, kw_only=True):
    """Frozen weights of linear layers stored in 4 bits (QLoRA, https://arxiv.org/abs/2305.14314): NF4 in blocks of 64, the scales in 8 bits."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets", "keep"})
    foreign: ClassVar[Mapping[str, str | Replacement]] = {
        "load_in_4bit": "leave it out: that is what quantize means",
        "bnb_4bit_quant_type": Replacement("it is called kind here: {}", 'kind="nf4"', "parallel.quantize", "nf4"),
        "bnb_4bit_use_double_quant": "leave it out: scales are always stored in 8 bits",
        "bnb_4bit_compute_dtype": "the compute dtype is that of mixed precision: parallelize(..., precision=)",
        "llm_int8_skip_modules": Replacement(
            "it is called keep here: {}", 'keep=("o_proj",)', "parallel.quantize.keep", "[o_proj]"
        ),
    }

    kind: Annotated[Literal["nf4"], doc("nf4: 16 values, quantiles of a normal distribution, in blocks of 64")] = "nf4"
    targets: Annotated[
        str | tuple[str, ...],
        doc(
            "layers whose weight is stored so: all-linear: all linear layers whose weight is frozen, but the head, and the routers of experts; "
            "else names, last parts of names, or patterns of them, as a list or with commas"
        ),
    ] = ALL_LINEAR
    keep: Annotated[tuple[str, ...], doc("of these targets, those that stay plain: names as in targets")] = ()

    def check(self) -> None:
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            msgspec.structs.force_setattr(self, "targets", tuple(part.strip() for part in self.targets.split(",")))
        for key in ("targets", "keep"):
            value = getattr(self, key)
            if isinstance(value, tuple) and not (all(value) and (value or key == "keep")):
                raise ConfigError(
                    f"Quantize({key}={list(value)})",
                    why="no name, or an empty one, means no layer",
                    fix='name layers, or use targets="all-linear"',
                )


def quantize_of(value: Any) -> Quantize | None:
    """The record that a value of ``quantize=`` means; None and "none": None."""
    if value is None or value == "none":
        return None
    if isinstance(value, Quantize):
        return value
    if value == "nf4":
        return Quantize()
    others = {
        "fp4": "a worse code of the same size",
        "int8": "8 bits are not supported",
        "4bit": "it does not say which",
        "int4": "another code",
        True: "it does not say which code",
    }
    raise ConfigError(
        f"quantize={value!r}",
        why=others.get(value, "there is no such kind")
        if isinstance(value, str | bool)
        else "that is neither a word nor a Quantize record",
        fix=did_you_mean(str(value), ["nf4", "none"], what="words")
        + ', or a record: sw.Quantize(kind="nf4", keep=("o_proj",))',
    )
