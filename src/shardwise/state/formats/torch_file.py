"""Reads files of ``torch.save``: a zip archive with a pickle that describes the tensors, and a record of bytes per
storage.

Storages and their tensors are described in torch's serialization notes
(https://docs.pytorch.org/docs/2.13/notes/serialization.html). The pickle is read, never executed (``pickles.py``).
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import row_strides, whole
from shardwise.state.files import reading
from shardwise.state.formats.archives import Archive, open_archive
from shardwise.state.formats.checks import counts_in, damaged, is_count
from shardwise.state.formats.pickles import Named, Ordered, Persistent, name_of, named, read_pickle, shown
from shardwise.state.formats.trees import MODELS, flatten, weights_in
from shardwise.state.stored import Chunk, FileTensor, Source

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
"""torch's storage classes and the dtype that each stands for."""

_UTILS = "torch._utils._rebuild_"
_PLAIN = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
_BYTES = {"torch.storage.UntypedStorage", "torch.UntypedStorage"}
_KNOWN = {
    *_PLAIN, *_BYTES, *(f"torch.{name}" for name in (*DTYPE_BYTES, *STORAGES)),
    # of other values next to weights, which are only reported
    "torch.device", "torch.serialization._get_layout", "argparse.Namespace", "builtins.set", "__builtin__.set",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Strided:
    """The description of one plain tensor in a pickle: what ``_rebuild_tensor_v3`` is called with."""

    storage: Any = None
    start: Any = None
    shape: Any = None
    strides: Any = None
    requires_grad: Any = None
    hooks: Any = None
    dtype: Any = None  # None: the storage's
    metadata: Any = None


def _with_attributes(function: Any, kind: Any, args: Any, attributes: Any) -> Any:
    if name_of(kind) not in _PLAIN:
        raise ValueError(f"a tensor of the class {shown(kind)}")
    return function(*args)


_STAND_INS = {
    f"{_UTILS}tensor": lambda storage, at, shape, strides: _Strided(storage, at, shape, strides),
    f"{_UTILS}tensor_v2": lambda storage, at, shape, strides, grad, hooks, metadata=None: _Strided(
        storage, at, shape, strides, metadata=metadata
    ),
    f"{_UTILS}tensor_v3": _Strided,
    f"{_UTILS}parameter": lambda tensor, *_: tensor,
    f"{_UTILS}parameter_with_state": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": lambda sizes=(): sizes,
}

_PICKLE = b"\x80"
MAX_TENSOR = 1 << 48  # bytes: strides of 0 can claim any size for a few values


def looks_like_torch(path: Path) -> bool:
    """Whether a file begins like torch's, in its current or old format, or has such a name."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        head = b""  # the error is raised when it is read
    return head.startswith((b"PK", b"\x80")) or path.suffix in (".pt", ".pth", ".bin", ".ckpt")


def open_torch_file(path: Path) -> Source:
    archive, value, num_bytes = _content(path)
    if not isinstance(value, Mapping):
        what = "a single tensor" if _is_tensor(value) else "no mapping"
        raise CheckpointError(
            f"{path}: {what}",
            why="weights are a mapping from names to tensors",
            fix="torch.save(model.state_dict(), path)",
        )
    # An entry takes more than a byte of the pickle, unless mappings are shared many times.
    leaves = flatten(value, str(path), max_entries=num_bytes)
    found, left_out = weights_in(leaves, str(path), _is_tensor)
    tensors = {name: _tensor(archive, value, name) for name, value in found.items()}
    return Source(
        place=str(path), kind="a torch file", tensors=tensors, left_out=left_out, metadata=_metadata_in(value)
    )


def _metadata_in(value: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The versions of modules that torch puts on a state dict: of the file's, or of one under a name in it."""
    for state in (value, *(value.get(name) for name in MODELS)):
        told = state.attributes if isinstance(state, Ordered) else None
        found = told.get("_metadata") if isinstance(told, dict) else None
        if isinstance(found, dict) and all(isinstance(name, str) for name in found):
            return {name: dict(own) for name, own in found.items() if isinstance(own, dict)}
    return None


def tensor_in(path: Path, begin: int, length: int, name: str, read_before: dict[bytes, Any]) -> FileTensor:
    """The single tensor in an archive that is part of a file, as for a chunk of a DCP directory.

    Args:
        begin: where the archive begins in it.
        read_before: cache of pickles and their values; chunks of one shape have the same, and there may be millions.
    """
    archive, value, _ = _content(path, begin, length, read_before)
    if not _is_tensor(value):
        raise damaged(path, f"{length} bytes at {begin}", "they should hold one tensor", name)
    return _tensor(archive, value, name)


def _content(
    path: Path, begin: int = 0, length: int | None = None, read_before: dict[bytes, Any] | None = None
) -> tuple[Archive, Any, int]:
    """Opens an archive; returns it, the value of its pickle, and the pickle's length in bytes."""
    if length is None:
        with reading(path), path.open("rb") as file:
            head = file.read(len(_PICKLE))
        if head == _PICKLE:
            raise CheckpointError(
                f"the file {path}",
                why="it is a bare pickle, or of torch's format before 1.6: tensors lie at no place that could be told",
                fix="open it with what wrote it, and torch.save a mapping of names to tensors; if torch wrote it: "
                f"torch.save(torch.load({str(path)!r}, weights_only=True), other_path)",
            )
    archive = open_archive(path, begin, length)
    if "data.pkl" not in archive.small:
        raise damaged(path, "an archive without data.pkl", "torch.save writes it")
    order = archive.small.get("byteorder", sys.byteorder.encode())
    if order != sys.byteorder.encode():
        raise CheckpointError(
            f"{path}: byte order {order[:20]!r}",
            why=f"this machine's is {sys.byteorder}, and values are read as they lie",
            fix="torch.load(path, weights_only=True) and torch.save it again on this machine",
        )
    data = archive.small["data.pkl"]
    known = {} if read_before is None else read_before
    if data not in known:
        known[data] = read_pickle(data, f"{path}: data.pkl", _stand_in)
    return archive, known[data], len(data)


def _stand_in(name: str) -> Any:
    # Also for tensors that are not plain, so that the error can name them; nothing is called here.
    is_known = name in _KNOWN or (name.startswith(_UTILS) and "." not in name[len(_UTILS) :])
    return _STAND_INS.get(name) or (named(name) if is_known else None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Strided) or (isinstance(value, Named) and value.name.startswith(_UTILS))


def _tensor(archive: Archive, told: _Strided | Named, name: str) -> FileTensor:
    if isinstance(told, Named):
        raise CheckpointError(
            f"{archive.path}: {shown(told)}",
            why="plain tensors are read; this one is sparse, quantized, nested, sharded or of a class of its own",
            fix="save it as plain tensors: to_dense(), dequantize(), full_tensor()",
            name=name,
        )
    key, dtype, num_storage_bytes = _storage(archive, told, name)
    shape, strides = counts_in(told.shape), counts_in(told.strides)
    if shape is None or strides is None or len(shape) != len(strides) or not is_count(told.start):
        given = f"shape {shown(told.shape)}, strides {shown(told.strides)} at {shown(told.start)}"
        raise damaged(archive.path, given, "a tensor has a stride per dim and begins within its storage", name)
    if told.metadata:
        raise CheckpointError(
            f"{archive.path}: {shown(told.metadata)}",
            why="it is stored as the conjugate or the negative of other values",
            fix="save tensor.resolve_conj().resolve_neg() instead",
            name=name,
        )
    width, (_, offset, num_bytes, crc) = DTYPE_BYTES[dtype], archive.records[f"data/{key}"]
    last = told.start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = (last + 1 if math.prod(shape) else told.start) * width
    if end > min(num_bytes, num_storage_bytes):
        raise damaged(
            archive.path,
            f"{dtype} of shape {list(shape)} up to byte {end} of its storage",
            f"data/{key} has {min(num_bytes, num_storage_bytes)}",
            name,
        )
    if math.prod(shape) * width >= MAX_TENSOR:
        raise damaged(archive.path, f"{dtype} of shape {list(shape)}", "no machine could hold that", name)
    own = row_strides(shape)
    lies_in_rows = all(a == b or size <= 1 for a, b, size in zip(strides, own, shape, strict=True))
    own_order = None if lies_in_rows else strides
    record = archive.records[f"data/{key}"] if crc else None  # 0: torch computed none
    chunk = Chunk(whole(shape), archive.path, archive.stamp, offset + told.start * width, own_order, record)
    return FileTensor(shape, dtype, (chunk,))


def _storage(archive: Archive, told: _Strided, name: str) -> tuple[str, str, int]:
    """Key of a tensor's storage, the tensor's dtype, and the number of bytes of the storage according to the pickle."""
    id = told.storage.id if isinstance(told.storage, Persistent) else None
    if (
        not isinstance(id, tuple)
        or len(id) != 5
        or id[0] != "storage"
        or not isinstance(id[2], str)
        or not is_count(id[4])
    ):
        raise damaged(archive.path, shown(id), "a storage has a type, a key, a place and a length", name)
    _, kind, key, _, length = id
    home, _, word = (name_of(kind) or "").rpartition(".")
    own = STORAGES.get(word) if home in ("torch", "torch.storage") else None
    dtype = own if told.dtype is None else (name_of(told.dtype) or "").removeprefix("torch.")
    if name_of(kind) in _BYTES:
        own = "uint8"
    if own is None or dtype not in DTYPE_BYTES:
        raise damaged(archive.path, f"a storage of {shown(kind)}", "its dtype cannot be told", name)
    if f"data/{key}" not in archive.records:
        raise damaged(archive.path, f"the storage {key[:40]!r}", "the archive has no such record: no values", name)
    return key, dtype, length * DTYPE_BYTES[own]
