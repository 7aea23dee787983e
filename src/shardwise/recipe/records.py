"""The records that an anatomy and a recipe consist of: frozen, torch-free, JSON round-trip.

:class:`Anatomy` describes a module (read by :mod:`shardwise.model`); :class:`~shardwise.recipe.recipe.Recipe`, made
of the other records, says which rank holds which bytes.
Shapes are in elements, sizes in elements along one tensor dim, dtypes are torch's names without the ``torch.`` prefix.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of batch norm and instance norm
ROOT = ""  # name of the root module, and of the unit that holds the parameters of no other unit

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: compared by value, unknown JSON fields refused."""


class TensorFact(Record, frozen=True):
    """One parameter or buffer of the unsharded module, under its canonical name."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    persistent: bool = True  # buffers only: in the state dict or not
    aliases: tuple[str, ...] = ()  # the other names of the same tensor

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


class BlockList(Record, frozen=True):
    """A list of modules (blocks) in a model, such as a ModuleList."""

    name: str
    blocks: tuple[str, ...]


class Anatomy(Record, frozen=True):
    """The structure of a module: tensors, tied tensors, outermost block lists, class names."""

    module_class: str
    params: dict[str, TensorFact]
    buffers: dict[str, TensorFact]
    lists: tuple[BlockList, ...]
    classes: dict[str, str]  # module name -> class name
    # Module name -> class name with its package, as in "torch.nn.modules.linear.Linear".
    class_paths: dict[str, str] = {}
    module_aliases: dict[str, str] = {}  # other name of a module that has several names -> its first name
    containers: tuple[str, ...] = ()  # modules without a forward, such as a ModuleList
    # Layers with an adapter beside their weight; what is not trained is the base of these.
    adapted: tuple[str, ...] = ()
    codecs: dict[str, Codec] = {}  # parameter that holds bytes -> what they stand for

    @property
    def numbers(self) -> int:
        """How many numbers its parameters stand for."""
        own = {name: codec.numbers for name, codec in self.codecs.items()}
        return sum(own.get(name, fact.numel) for name, fact in self.params.items())


class Part(Record, frozen=True):
    """A slice of a dim, ``size`` long, cut evenly over an axis. With ``replicas`` = r it is cut into ``degree / r``
    pieces, each held whole by r neighbouring ranks (fewer key/value heads than ranks)."""

    size: int
    replicas: int = 1


class Cut(Record, frozen=True):
    """A dim divided over an axis. No ``parts``: the whole (local) dim is one part.

    Even means as ``torch.chunk`` does it: pieces of ``ceil(size / degree)``, the last ones shorter or empty.
    """

    axis: str
    dim: int
    parts: tuple[Part, ...] = ()
    holder: int | None = None  # the index along the axis that holds all of it; the others hold an empty piece (a stage)


class Codec(Record, frozen=True):
    """What the bytes of a parameter stand for, where a weight is stored quantised: it may be stored in several such parts.

    Attributes:
        kind: of the codec, by a name that its technique knows.
        of: name of the weight, as the user's module has it.
        shape, dtype: of the weight.
        part: which of what is stored of the weight this is.
    """

    kind: str
    of: str
    shape: tuple[int, ...]
    dtype: str
    part: str

    @property
    def numbers(self) -> int:
        """How many numbers of the model the part stands for: the scales of a weight for none."""
        return 0 if self.part == "scales" else math.prod(self.shape)


class Param(Record, frozen=True):
    """One parameter: shape, unit that gathers it, cuts, and the dtypes it is stored, computed and reduced in; and what its bytes stand
    for, where they are not its numbers."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]
    unit: str
    cuts: tuple[Cut, ...]
    storage: str
    compute: str
    reduce: str
    codec: Codec | None = None

    @property
    def numbers(self) -> int:
        """How many numbers of the model it stands for."""
        return math.prod(self.shape) if self.codec is None else self.codec.numbers


SUMMED_OVER = "loss"  # ranks that differ on it have other data, and have added other values to a buffer
SUM_AXES = (SUMMED_OVER, "dp")  # dp: of ranks that differ on cp each has seen all positions of their samples
POLICIES = ("sum", "mean", "min", "max", "rank0", "own", "equal")


class Buffer(Record, frozen=True):
    """One buffer: replicated on every rank, kept in its own dtype.

    Attributes:
        policy: what becomes of it at a window's end, where ranks have written it: a word of ``Sharding(buffers=...)``, or
            "equal": it must be equal on all ranks.
        axis: the axis whose ranks each add to a "sum", of :data:`SUM_AXES`.
    """

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    aliases: tuple[str, ...] = ()
    policy: str = "equal"
    axis: str = SUMMED_OVER


class Unit(Record, frozen=True):
    """A sharding unit: modules whose parameters are gathered together. ``reshard`` is FSDP2's
    ``reshard_after_forward``. The units named in ``prefetch_forward`` are gathered when this one's forward begins,
    those in ``prefetch_backward`` when its backward begins; None: the unit that ran before this one, as FSDP2 does by
    itself."""

    name: str
    modules: tuple[str, ...]
    reshard: bool | int
    why: str
    prefetch_forward: tuple[str, ...] = ()
    prefetch_backward: tuple[str, ...] | None = None


class Edit(Record, frozen=True):
    """A change to one module that a technique makes, with final argument values that JSON can hold."""

    module: str
    technique: str
    action: str
    args: dict[str, Any]
    why: str


class Note(Record, frozen=True):
    """A choice made for the user, and its reason.

    Attributes:
        name: name of the module, parameter or unit; or of the option.
        why: the reason.
        option: key of the option that it is about, as in a file below ``parallel`` ("precision.reduce"); None: ``name``
            is that of a module, parameter or unit, even if an option has the same name.
        warns: ``parallelize`` also raises it as a UserWarning.
    """

    name: str
    why: str
    option: str | None = None
    warns: bool = False


def human_bytes(size: float) -> str:
    """``size`` bytes in the largest binary unit that keeps it above 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
