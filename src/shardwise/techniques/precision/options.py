"""Mixed precision options: the dtypes a model is stored, computed and reduced in, as a word or as a record. Torch-free:
torch's dtypes and its ``MixedPrecisionPolicy`` are recognised by the name of their class, and turned into words.

>>> precision_of("bf16")
Precision(storage='float32', compute='bfloat16', reduce='float32', output=None, cast_inputs='root', parts={})
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.config.record import Options, doc
from shardwise.config.suggest import listing
from shardwise.errors import ConfigError


class _FromPolicy(type(Options)):  # type: ignore[misc]
    """Metaclass for ``Precision(policy, parts=...)``: the options of a policy of torch, and those given next to it."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if len(args) == 1 and _is_policy(args[0]):
            return super().__call__(**{**_of_policy(args[0]), **given})
        return super().__call__(*args, **given)


class Precision(Options, metaclass=_FromPolicy, frozen=True, kw_only=True):
    """Mixed precision: the dtype of storage, compute, gradient sums and outputs. ``None`` leaves it as the model has
    it.

    Words: float32, float16, bfloat16, float64, double, half, fp32, fp16, bf16, fp64; kept as torch's names. Dtypes of
    torch are accepted too, and so is its ``MixedPrecisionPolicy`` in place of all of them: ``Precision(policy)``,
    ``Precision(policy, parts={...})``.
    """

    patterns: ClassVar[frozenset[str]] = frozenset({"parts"})

    storage: Annotated[str | None, doc("dtype in which parameters and optimizer state are kept")] = None
    compute: Annotated[str | None, doc("dtype of parameters and activations in forward and backward")] = None
    reduce: Annotated[str | None, doc("dtype in which gradients are summed over the ranks")] = None
    output: Annotated[str | None, doc("dtype to which the model's floating outputs are cast")] = None
    cast_inputs: Annotated[
        Literal["root", "units", "none"],
        doc(
            "root: cast the floating inputs of the whole model to compute; units: those of every unit too, positions and masks among "
            "them, as torch's cast_forward_inputs does; none: cast nothing"
        ),
    ] = "root"
    parts: Annotated[
        dict[str, str],
        doc("a precision (bf16, fp16, fp32, fp64) per pattern of module names or classes, such as LayerNorm: fp32"),
    ] = msgspec.field(default_factory=dict)

    @property
    def has_float16(self) -> bool:
        """Whether something is computed in float16, so that gradients need a scaler."""
        words = {precision_of(word).compute for word in self.parts.values()}
        return "float16" in {self.compute, *words}

    def __post_init__(self) -> None:
        for key in _DTYPES:
            msgspec.structs.force_setattr(self, key, _word(getattr(self, key)))
        if isinstance(self.parts, dict):
            msgspec.structs.force_setattr(self, "parts", {key: _word(value) for key, value in self.parts.items()})
        super().__post_init__()

    def check(self) -> None:
        for word in self.parts.values():
            precision_of(word)
        for key in _DTYPES:
            msgspec.structs.force_setattr(self, key, _dtype_name(key, getattr(self, key)))
        if self.cast_inputs == "units" and self.compute is None:
            raise ConfigError(
                "Precision(cast_inputs='units') without compute",
                why="inputs are cast to compute, so it would have no effect",
                fix='name it: Precision(compute="bf16", cast_inputs="units")',
            )


_DTYPES = ("storage", "compute", "reduce", "output")


def _word(value: Any) -> Any:
    """The name of a dtype of torch; any other value unchanged."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else value


def _is_policy(value: Any) -> bool:
    return type(value).__name__ == "MixedPrecisionPolicy" and type(value).__module__.startswith("torch.")


def _of_policy(policy: Any) -> dict[str, Any]:
    """The options that mean what torch's ``fully_shard`` does with a policy, given to every unit and to the root."""
    casts = {True: "units", False: "none"}[bool(policy.cast_forward_inputs)]
    return {
        "compute": policy.param_dtype,
        "reduce": policy.reduce_dtype,
        "output": policy.output_dtype,
        "cast_inputs": casts if policy.param_dtype is not None else "root",
    }


def _dtype_name(key: str, word: str | None) -> str | None:
    if not word:  # an empty string, which shells and templates may produce, means "not set"
        return None
    if word not in DTYPE_WORDS:
        raise ConfigError(
            f"Precision({key}={word!r})",
            why="that is not a dtype Shardwise knows",
            fix=f"use one of {listing(DTYPE_WORDS)}",
        )
    return DTYPE_WORDS[word]


def precision_of(value: Any) -> Precision:
    """The :class:`Precision` for a short word.

    Args:
        value: None or "" (the model as it is), "fp32", "fp64", "bf16" and "fp16" (float32 storage and reduction,
            bfloat16 or float16 compute), or a dtype of torch, which means the same; torch's ``MixedPrecisionPolicy``,
            as ``fully_shard`` takes it; or a record, returned as it is.

    Raises:
        ConfigError: for any other word.
    """
    if isinstance(value, Precision):
        return value
    if value is None or value == "":
        return Precision()
    if _is_policy(value):
        return Precision(value)
    value = _word(value)
    name = DTYPE_WORDS.get(value) if isinstance(value, str) else None
    if name in ("bfloat16", "float16"):
        return Precision(storage="float32", compute=name, reduce="float32")
    if name is None:
        raise ConfigError(
            f"precision={value!r}",
            why="that is neither a precision nor a record of dtypes",
            fix='use "bf16", "fp16", "fp32" or "fp64", or name each dtype: Precision(storage="float32", compute="bfloat16", reduce="float32"), '
            f"with dtypes out of {listing(DTYPE_WORDS)}",
        )
    return Precision(storage=name, compute=name, reduce=name)


def from_torch(value: Any) -> Any:
    """Converts a dtype or a policy of torch to a record, since a word cannot express it all. Other values unchanged."""
    return value if isinstance(value, str | dict | None) else precision_of(value)
