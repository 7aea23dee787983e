"""Reads and plans safetensors files: 8 bytes of length, a header in JSON, then the tensors' bytes without gaps.

The format is https://huggingface.co/docs/safetensors (with a table of its dtypes). Headers are read here and not by the
library because the library does not return the offsets, and silently takes one of two tensors with the same name.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import whole
from shardwise.state.files import reading, stamp_of
from shardwise.state.formats.checks import counts_in, damaged, without_doubles
from shardwise.state.stored import Chunk, FileTensor, Source

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
CODES = {name: code for code, name in DTYPES.items()}

MODULES = "modules"  # the key in __metadata__ of the versions of modules
MAX_HEADER = 100_000_000  # bytes, the library's own limit
_FIELDS = {"dtype", "shape", "data_offsets"}


def looks_like_safetensors(path: Path) -> bool:
    """Whether a file begins like a safetensors file: with a length, and JSON."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return True  # the error is raised when it is read


def open_safetensors(path: Path) -> Source:
    tensors, metadata = _opened(path, 0)
    return Source(
        place=str(path), kind="a safetensors file", tensors=tensors, metadata=_versions_in(path, metadata.get(MODULES))
    )


def _versions_in(path: Path, text: str | None) -> dict[str, Any] | None:
    """The versions of modules in a file that :func:`place_tensors` has planned; None: they are not there."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{MODULES} in its __metadata__", str(error), None) from error
    if not isinstance(found, dict) or not all(isinstance(own, dict) for own in found.values()):
        raise damaged(path, f"{MODULES} in its __metadata__", "it is a mapping from modules to their versions", None)
    return found


def tensors_in(path: Path, at: int = 0) -> dict[str, FileTensor]:
    """Name -> tensor of a file (or of one that begins at byte ``at`` of another and reaches to its end), in the order
    of their bytes; everything that the header says is checked against the file."""
    return _opened(path, at)[0]


def _opened(path: Path, at: int) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """As :func:`tensors_in`, and what the header says beside."""
    stamp = stamp_of(path)
    size, header, begin = _read_header(path, at)
    found = {name: _entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    metadata = header.get("__metadata__", {})
    _check_metadata(path, metadata)
    position = 0
    for name, (dtype, shape, start, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if start != position:
            kind = "overlaps the tensor before it" if start < position else "leaves a gap before it"
            raise damaged(path, f"data_offsets [{start}, {end}]", f"that {kind}, which ends at {position}", name)
        if end > size - begin:
            raise damaged(
                path,
                f"data_offsets [{start}, {end}]",
                f"the file has {size - begin} bytes of tensors: it is cut off",
                name,
            )
        if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise damaged(
                path,
                f"{end - start} bytes",
                f"{dtype} of shape {list(shape)} takes {math.prod(shape) * DTYPE_BYTES[dtype]}",
                name,
            )
        position = end
    if position != size - begin:
        raise damaged(path, f"{size - begin} bytes of tensors", f"its header names {position}", None)
    ordered = sorted(found.items(), key=lambda item: item[1][2:])
    tensors = {
        name: FileTensor(shape, dtype, (Chunk(whole(shape), path, stamp, at + begin + start),))
        for name, (dtype, shape, start, _) in ordered
    }
    return tensors, metadata


def _read_header(path: Path, at: int) -> tuple[int, dict[str, Any], int]:
    """Reads the header; returns the file's size from ``at`` on, the header, and where the tensors begin relative to
    ``at``."""
    with reading(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - at
        file.seek(at)
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if length < 0 or length > size - 8:
            raise damaged(
                path,
                f"{size} bytes" if length < 0 else f"a header of {length} bytes in a file of {size}",
                "a safetensors file begins with the length of its header, and the header itself",
                None,
            )
        if length > MAX_HEADER:
            raise damaged(path, f"a header of {length} bytes", f"the format allows {MAX_HEADER}", None)
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_doubles, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "its header", f"that is not JSON as the format has it: {error}"[:300], None) from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise damaged(path, "its header", "the format has an object there, from names to places", None)
    return size, header, 8 + length


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise damaged(path, f"an entry {str(entry)[:80]}", f"an entry has {', '.join(sorted(_FIELDS))}", name)
    dtype, shape, offsets = entry["dtype"], counts_in(entry["shape"]), counts_in(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(path, f"dtype {str(dtype)[:40]!r}", f"the dtypes read here are {', '.join(DTYPES)}", name)
    if shape is None:
        raise damaged(
            path, f"shape {str(entry['shape'])[:80]}", "a shape is a list of numbers that are 0 or more", name
        )
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(path, f"data_offsets {str(entry['data_offsets'])[:80]}", "they are a begin and an end", name)
    return DTYPES[dtype], shape, offsets[0], offsets[1]


def _check_metadata(path: Path, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise damaged(path, "its __metadata__", "the format has texts there, by name", None)
    if "DCP_SHARDING_INFO" in value and path.name.startswith("shard-"):
        raise CheckpointError(
            f"the file {path}",
            why="it holds one rank's parts of the tensors, and nothing says how many ranks there were",
            fix="save again with HuggingFaceStorageWriter(..., enable_consolidation=True), or as a DCP directory",
        )


# ---- writing: the places of tensors -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """The place of a tensor in a file to be written: ``offset`` bytes from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def place_tensors(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    align: int = 8,
    modules: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[bytes, list[Placed], int]:
    """Plans a file with ``tensors`` (name -> shape, dtype): returns its header, the place of each tensor, and its size.

    Tensors whose size is a multiple of a higher power of two come first, up to ``align``, so that each begins at a
    multiple of that power, and at least of its element's size; the header is padded with blanks, so that this holds for
    the first one too.

    Args:
        tensors: in the model's order, which is kept among sizes of the same power of two.
        align: a power of two, 8 or more, in bytes: the largest alignment to use.
        modules: the versions of modules, as JSON; None: none are written.
        shapes: those that the header says of tensors whose elements are written in the same order, but in another shape.
    """
    sizes = {name: math.prod(shape) * DTYPE_BYTES[dtype] for name, (shape, dtype) in tensors.items()}
    # With align=8 only the element size counts, so that a file of one dtype keeps the model's order.
    powers = {
        name: DTYPE_BYTES[tensors[name][1]] if align == 8 else min(size & -size or align, align)
        for name, size in sizes.items()
    }
    order = sorted(tensors, key=lambda name: -powers[name])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **({} if modules is None else {MODULES: modules})}}
    position, starts = 0, {}
    for name in order:
        shape, dtype = tensors[name]
        end = position + sizes[name]
        entries[name] = {
            "dtype": CODES[dtype],
            "shape": [*(shapes or {}).get(name, shape)],
            "data_offsets": [position, end],
        }
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % align)
    head = len(text).to_bytes(8, "little") + text
    placed = [Placed(name, tensors[name][1], tuple(tensors[name][0]), len(head) + starts[name]) for name in order]
    return head, placed, len(head) + position
