"""Small frozen records of what a user may choose for a technique. Torch-free.

Each field carries its description and its limits, from which help and messages are made. A record checks itself when
it is built, from Python code as well as from a file: a value of the wrong type, an unknown word, or an option that
would have no effect raises :class:`~shardwise.errors.ConfigError`.

>>> precision_of("bf16")
Precision(storage='float32', compute='bfloat16', reduce='float32', output=None, cast_inputs='root')
"""

import typing
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from shardwise.config.check import checked
from shardwise.config.suggest import listing
from shardwise.errors import ConfigError, UnsupportedError

__all__ = [
    "DTYPE_WORDS",
    "Options",
    "Parallel",
    "Precision",
    "Sharding",
    "default_of",
    "doc",
    "hints_of",
    "precision_of",
]

DTYPE_WORDS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float64",
    "double": "float64",
    "half": "float16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
}
"""The words accepted for a dtype, and torch's name for each."""


def doc(text: str) -> msgspec.Meta:
    """The description of a field, shown by ``--help`` and in the docs."""
    return msgspec.Meta(description=text)


@cache
def hints_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name -> type of a record, in declaration order, with descriptions and limits."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all option records: every field is checked, and lists become tuples, when one is built."""

    def __post_init__(self) -> None:
        for key, hint in hints_of(type(self)).items():
            value = getattr(self, key)
            where = f"{type(self).__name__}({key}={value!r})"
            msgspec.structs.force_setattr(self, key, checked(value, hint, where=where, key=key))
        self.check()

    def check(self) -> None:
        """Cross checks of a record's own fields. Raises :class:`ConfigError`."""

    def computed(self) -> dict[tuple[str, str], Any]:
        """Defaults that depend on other fields: (section, key) -> value. A record settles them in :meth:`check`."""
        return {}


class Precision(Options, frozen=True, kw_only=True):
    """Which dtype each thing has. ``None`` leaves it as the model has it.

    Words: float32, float16, bfloat16, float64, double, half, fp32, fp16, bf16, fp64; stored as torch's names.
    """

    storage: Annotated[str | None, doc("dtype in which parameters and optimizer state are kept")] = None
    compute: Annotated[str | None, doc("dtype of parameters and activations in forward and backward")] = None
    reduce: Annotated[str | None, doc("dtype in which gradients are summed over the ranks")] = None
    output: Annotated[str | None, doc("dtype to which the model's floating outputs are cast")] = None
    cast_inputs: Annotated[
        Literal["root", "none"], doc("root: cast the floating inputs of the whole model to compute; none: cast nothing")
    ] = "root"

    def check(self) -> None:
        for key in ("storage", "compute", "reduce", "output"):
            msgspec.structs.force_setattr(self, key, _dtype_name(key, getattr(self, key)))


def _dtype_name(key: str, word: str | None) -> str | None:
    if not word:  # an empty string, as shells and templates leave it, means "not set"
        return None
    if word not in DTYPE_WORDS:
        raise ConfigError(
            f"Precision({key}={word!r})",
            why="that is not a dtype Shardwise knows",
            fix=f"use one of {listing(DTYPE_WORDS)}",
        )
    return DTYPE_WORDS[word]


def precision_of(value: str | Precision | None) -> Precision:
    """The precision record a short word stands for.

    Args:
        value: None or "" (the model as it is), "fp32", "bf16" (float32 storage and reduction, bfloat16 compute), "fp64",
            or a record, returned as it is.

    Raises:
        UnsupportedError: for "fp16" (and "half", "float16"), which needs a gradient scaler.
        ConfigError: for any other word.
    """
    if isinstance(value, Precision):
        return value
    if value is None or value == "":
        return Precision()
    name = DTYPE_WORDS.get(value) if isinstance(value, str) else None
    if name == "float16":
        raise UnsupportedError(
            f"precision={value!r}",
            why="float16 gradients underflow to zero without a gradient scaler, and there is none yet",
            fix='use precision="bf16", or "fp32"',
        )
    if name == "bfloat16":
        return Precision(storage="float32", compute="bfloat16", reduce="float32")
    if name is None:
        raise ConfigError(
            f"precision={value!r}",
            why="that is neither a precision nor a record of dtypes",
            fix='use "bf16", "fp32" or "fp64", or name each dtype: Precision(storage="float32", compute="bfloat16"), '
            f"with dtypes out of {listing(DTYPE_WORDS)}",
        )
    return Precision(storage=name, compute=name, reduce=name)


class Sharding(Options, frozen=True, kw_only=True):
    """How parameters, gradients and optimizer state are spread over the data-parallel ranks."""

    engine: Annotated[
        Literal["auto", "ddp", "fsdp2"],
        doc("ddp: whole copies; fsdp2: shards; auto: ddp where dp_shard=1 and storage is compute, else fsdp2"),
    ] = "auto"
    units: Annotated[
        Literal["auto", "none"] | tuple[str, ...],
        doc("auto: repeated blocks; none: the model is one unit; a list of patterns of module names or class names"),
    ] = "auto"
    min_unit_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("bytes of compute-dtype parameters; neighbouring blocks are merged until a unit holds as many"),
    ] = 16 << 20
    reshard_after_forward: Annotated[
        bool | int,
        doc(
            "true: free the gathered parameters after forward; false: keep them for backward; a number >= 2: keep "
            "them sharded over that many ranks"
        ),
    ] = True
    buffers: Annotated[
        Literal["rank0", "mean"], doc("which value a floating buffer (as of BatchNorm) takes when ranks differ")
    ] = "rank0"

    def check(self) -> None:
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and reshard < 2:
            raise ConfigError(
                f"Sharding(reshard_after_forward={reshard})",
                why="a number is how many ranks share the parameters between forward and backward, so it is 2 or more",
                fix="use true (free them), false (keep them whole), or a number from 2 to the size of dp_shard",
            )
        if isinstance(self.units, tuple) and not all(self.units):
            raise ConfigError(
                f"Sharding(units={list(self.units)})",
                why="an empty pattern matches no module",
                fix='remove it, or use units="none" for one single unit',
            )
        if self.units == "none":
            self._refuse_without_effect("units", ("min_unit_bytes",), "the model is one unit whatever its size")
        if isinstance(self.units, tuple):
            self._refuse_without_effect("units", ("min_unit_bytes",), "each module named is a unit, whatever its size")
        if self.engine == "ddp":
            keys = ("units", "min_unit_bytes", "reshard_after_forward")
            self._refuse_without_effect("engine", keys, "ddp keeps whole copies")

    def _refuse_without_effect(self, chosen: str, keys: tuple[str, ...], because: str) -> None:
        for key in keys:
            if getattr(self, key) != default_of(Sharding, key):
                raise ConfigError(
                    f"Sharding({chosen}={getattr(self, chosen)!r}, {key}={getattr(self, key)!r})",
                    why=f"{because}, so {key} would have no effect",
                    fix=f"remove {key}, or use another {chosen}",
                )


def default_of(cls: type[msgspec.Struct], key: str) -> Any:
    """The default value of one field (a fresh one, where it is a container)."""
    field = next(field for field in msgspec.structs.fields(cls) if field.name == key)
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


class Parallel(Options, frozen=True, kw_only=True):
    """The layout, and every technique laid over it: the arguments of ``parallelize``, as data."""

    layout: Annotated[str, doc("degree of each mesh axis, as in dp_replicate=2,dp_shard=-1; -1 is inferred")] = (
        "dp_shard=-1"
    )
    init: Annotated[
        Literal["seeded", "rank0"] | None,
        doc(
            "seeded: from the seed and each name; rank0: built once, scattered; null: seeded for a builder, else rank0"
        ),
    ] = None
    precision: Annotated[str | Precision | None, doc("bf16, fp32, fp64, or a dtype each; null: as the model is")] = None
    sharding: Annotated[Sharding, doc("how data-parallel ranks share the model")] = Sharding()

    def check(self) -> None:
        precision_of(self.precision)
        if not self.layout.strip():
            raise ConfigError(
                "Parallel(layout='')",
                why="a layout names at least one axis",
                fix='use layout="dp_shard=-1" for all ranks on one axis',
            )
