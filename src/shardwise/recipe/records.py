"""The records an anatomy and a recipe are made of: frozen, torch-free, JSON round-trip.

:class:`Anatomy` says what a module *is* (read by :mod:`shardwise.model`); :class:`~shardwise.recipe.recipe.Recipe`, made
of the other records, says where every byte goes.
Shapes are in elements, sizes in elements along one tensor dim, dtypes are torch's names without the ``torch.`` prefix.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "DTYPE_BYTES",
    "Anatomy",
    "BlockList",
    "Buffer",
    "Cut",
    "Edit",
    "Note",
    "Param",
    "Part",
    "Record",
    "TensorFact",
    "Unit",
    "human_bytes",
]

ROOT = ""  # name of the root module, and of the unit that holds what no other unit holds

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
    """Modules that stand in a list."""

    name: str
    blocks: tuple[str, ...]


class Anatomy(Record, frozen=True):
    """What was read in a module: tensors, ties, outermost block lists, class names."""

    module_class: str
    params: dict[str, TensorFact]
    buffers: dict[str, TensorFact]
    lists: tuple[BlockList, ...]
    classes: dict[str, str]  # module name -> class name
    class_paths: dict[
        str, str
    ] = {}  # module name -> class name with its package, as in "torch.nn.modules.linear.Linear"
    module_aliases: dict[str, str] = {}  # other name of a module that has several -> its first
    containers: tuple[str, ...] = ()  # modules without a forward of their own, as a ModuleList


class Part(Record, frozen=True):
    """A slice of a dim, ``size`` long, cut evenly over an axis; or, with ``replicas`` = r, cut over every r-th rank and
    held whole by r neighbours (key/value heads fewer than ranks)."""

    size: int
    replicas: int = 1


class Cut(Record, frozen=True):
    """A dim divided over an axis. No ``parts``: the whole (local) dim is one part.

    Even means as ``torch.chunk`` does it: pieces of ``ceil(size / degree)``, the last ones shorter or empty.
    """

    axis: str
    dim: int
    parts: tuple[Part, ...] = ()


class Param(Record, frozen=True):
    """One parameter: what it is, which unit gathers it, how it is cut, in which dtypes it is stored, used, reduced."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]
    unit: str
    cuts: tuple[Cut, ...]
    storage: str
    compute: str
    reduce: str


class Buffer(Record, frozen=True):
    """One buffer: replicated on every rank, kept in its own dtype."""

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    aliases: tuple[str, ...] = ()


class Unit(Record, frozen=True):
    """Modules gathered together; ``reshard`` as FSDP2's ``reshard_after_forward`` takes it. The units named in
    ``prefetch_forward`` are gathered when this one's forward begins, those in ``prefetch_backward`` when its backward
    does; None: as FSDP2 does by itself, the unit that ran before this one."""

    name: str
    modules: tuple[str, ...]
    reshard: bool | int
    why: str
    prefetch_forward: tuple[str, ...] = ()
    prefetch_backward: tuple[str, ...] | None = None


class Edit(Record, frozen=True):
    """A change in the code of one module: what a technique does to it, with final values that JSON can hold."""

    module: str
    technique: str
    action: str
    args: dict[str, Any]
    why: str


class Note(Record, frozen=True):
    """A choice made for the user, and its reason.

    Attributes:
        name: of the module, parameter or unit; or of the option.
        why: the reason.
        option: key of the option that it is about, as a file has it below ``parallel`` ("precision.reduce"); None: ``name`` is of a module,
            parameter or unit, which may be called as an option is.
        warns: ``parallelize`` gives it as a UserWarning too.
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
