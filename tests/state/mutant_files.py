"""Damaged safetensors files, directories, and single wrong bits of any kind; see ``mutants.py``."""

import json
import os
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from state.good_sources import Good, copied

__all__ = [
    "bit_in_dcp_metadata",
    "bit_in_safetensors_header",
    "bit_in_torch_archive",
    "duplicate_names",
    "gaps",
    "huge_sizes",
    "index_misses_extra",
    "index_names_missing",
    "links_out",
    "no_values",
    "offsets_out_of_range",
    "overlapping_offsets",
    "paths_that_leave",
    "truncated",
    "wrong_dtype",
    "wrong_header_length",
    "wrong_shape",
]


def _header(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(header: dict | str, rest: bytes) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def _flip(data: bytes, rng: random.Random, low: int, high: int) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _change_header(change: Callable[[random.Random, dict, str], None]) -> Callable[[random.Random, Good, Path], Path]:
    """A kind that changes one tensor's entry in a safetensors header, in the one file or in one of the directory."""

    def make(rng: random.Random, good: Good, place: Path) -> Path:
        path = copied(rng.choice([good.file, good.folder]), place)
        file = path if path.is_file() else rng.choice(sorted(path.glob("*.safetensors")))
        header, rest = _header(file.read_bytes())
        name = rng.choice([name for name in header if name not in ("__metadata__", "e.empty")])
        change(rng, header, name)
        file.write_bytes(_with_header(header, rest))
        return path

    return make


def truncated(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.file, good.folder, good.torch_file, good.torch_folder, good.dcp]), place)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix != ".json")
    file = rng.choice(files)
    os.truncate(file, rng.randrange(file.stat().st_size))
    return path


def wrong_header_length(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.file, place)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    other = rng.choice(
        [length - rng.randrange(1, 9), length + rng.randrange(1, 64), rng.getrandbits(64), rng.getrandbits(20), 0, 1]
    )
    path.write_bytes((other if other != length else 2).to_bytes(8, "little") + data[8:])
    return path


def _overlap(rng: random.Random, header: dict, name: str) -> None:
    others = [n for n in header if n not in ("__metadata__", name, "e.empty")]
    entry, other = header[name]["data_offsets"], header[rng.choice(others)]["data_offsets"]
    length = entry[1] - entry[0]
    start = max(0, other[0] + rng.randrange(-min(length, 3), other[1] - other[0]))
    start = start if start != entry[0] else start + 1
    header[name]["data_offsets"] = [start, start + length]


def _out_of_range(rng: random.Random, header: dict, name: str) -> None:
    start, end = header[name]["data_offsets"]
    far = rng.choice([1 << 20, 1 << 40, 1 << 62, 1 << 63, 1 << 64, -1 - start, -5 - end])
    header[name]["data_offsets"] = rng.choice([[start + far, end + far], [start, end + far], [end, start]])


def gaps(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.file, place)
    header, rest = _header(path.read_bytes())
    names = [name for name in header if name != "__metadata__"]
    at = header[rng.choice(names)]["data_offsets"][0]
    width = rng.choice([1, 2, 8, 24])
    for name in names:
        header[name]["data_offsets"] = [x + width if x >= at else x for x in header[name]["data_offsets"]]
    if rng.random() < 0.5:
        rest = rest[:at] + bytes(width) + rest[at:]
    path.write_bytes(_with_header(header, rest))
    return path


def duplicate_names(rng: random.Random, good: Good, place: Path) -> Path:
    if rng.random() < 0.3:  # the same tensor in two files of a directory
        path = copied(good.folder, place)
        first, second = rng.sample(sorted(path.glob("*.safetensors")), 2)
        header, rest = _header(first.read_bytes())
        name = rng.choice([n for n in header if n != "__metadata__"])
        other, others = _header(second.read_bytes())
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        other[name] = header[name] | {"data_offsets": [len(others), len(others) + size]}
        second.write_bytes(_with_header(other, others + bytes(size)))
        return path
    path = copied(good.file, place)
    header, rest = _header(path.read_bytes())
    a, b = rng.sample([name for name in header if name != "__metadata__"], 2)
    text = json.dumps(header)
    text = (
        text.replace(json.dumps(a), json.dumps(b))
        if rng.random() < 0.5
        else f"{{{json.dumps(a)}:{json.dumps(header[b])},{text[1:]}"
    )
    path.write_bytes(_with_header(text, rest))
    return path


def _huge(rng: random.Random, header: dict, name: str) -> None:
    entry = header[name]
    entry["shape"] = rng.choice(
        [[1 << 62], [1 << 31, 1 << 31], [1 << 64], [1 << 32, 1 << 32, 1 << 32], [4, 1 << 40], [-4, -6]]
    )
    if rng.random() < 0.3:
        entry["data_offsets"][1] = 1 << rng.choice([40, 62, 63, 70])


def _wrong_dtype(rng: random.Random, header: dict, name: str) -> None:
    width = {"F32": "F64", "BF16": "F32", "I64": "I32", "I32": "I16"}
    entry = header[name]
    entry["dtype"] = rng.choice(
        [width[entry["dtype"]], "F128", "", "float32", None, 7, ["F32"], "Q4_0", entry["dtype"].lower()]
    )


def _wrong_shape(rng: random.Random, header: dict, name: str) -> None:
    shape = header[name]["shape"] or [1]
    dim = rng.randrange(len(shape))
    longer = [*shape[:dim], shape[dim] + rng.randrange(1, 9), *shape[dim + 1 :]]
    header[name]["shape"] = rng.choice(
        [longer, [*shape, 2], [*shape[:-1], 0], [str(shape[0])], [2.0, *shape], [True, 3], "6,4", None]
    )


overlapping_offsets = _change_header(_overlap)
offsets_out_of_range = _change_header(_out_of_range)
huge_sizes = _change_header(_huge)
wrong_dtype = _change_header(_wrong_dtype)
wrong_shape = _change_header(_wrong_shape)


# ---- directories --------------------------------------------------------------------------------------------------


def _index_of(path: Path) -> Path:
    return next(path.glob("*.index.json"))


def _change_index(path: Path, change: Callable[[dict], None]) -> None:
    index = _index_of(path)
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def index_names_missing(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.folder, good.torch_folder]), place)
    files = sorted(file for file in path.iterdir() if file.suffix != ".json")
    how = rng.randrange(4)
    if how == 0:
        rng.choice(files).unlink()
    elif how == 1:
        _change_index(path, lambda names: names.update({f"layer.{rng.randrange(99)}": rng.choice(files).name}))
    elif how == 2:
        _change_index(
            path, lambda names: names.update({rng.choice(list(names)): f"model-{rng.randrange(9999)}.safetensors"})
        )
    else:
        name = rng.choice(list(good.tensors))
        _change_index(
            path, lambda names: names.update({name: rng.choice([f.name for f in files if f.name != names[name]])})
        )
    return path


def index_misses_extra(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.folder, good.torch_folder]), place)
    if rng.random() < 0.5:  # a tensor that the index does not name
        _change_index(path, lambda names: names.pop(rng.choice(list(names))))
        return path
    file = next(file for file in sorted(path.iterdir()) if "00001" in file.name)
    shutil.copy(file, path / re.sub(r"\d{5}-of-\d{5}", f"{rng.randrange(4, 99):05}-of-00099", file.name))
    return path


def paths_that_leave(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.folder, good.torch_folder, good.dcp]), place)
    outside = place / "outside"
    out = [
        f"../{outside.name}",
        str(outside),
        "a/../../outside",
        "/etc/passwd",
        "..",
        "..\\outside",
        "x\0y",
        "/proc/self/mem",
        "",
        ".",
    ]
    aim = rng.choice(out)
    if path.name == "dcp":
        shutil.copy(path / "__0_0.distcp", outside)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        rng.choice(list(metadata.storage_data.values())).relative_path = aim
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path
    names = json.loads(_index_of(path).read_text())["weight_map"]
    file = rng.choice(sorted(set(names.values())))
    shutil.copy(path / file, outside)
    _change_index(path, lambda names: names.update({n: aim for n, f in names.items() if f == file}))
    return path


def links_out(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.folder, good.torch_folder, good.dcp]), place)
    files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".distcp"))
    file = rng.choice(files)
    outside = place / "outside"
    file.rename(outside)
    aim = rng.choice([outside, Path("..") / "outside", Path("/dev/zero"), Path("/etc/passwd"), place / "nowhere"])
    if rng.random() < 0.3:
        (path / "inner").symlink_to(aim)
        aim = Path("inner")
    file.symlink_to(aim)
    return path


# ---- single wrong bits --------------------------------------------------------------------------------------------


def bit_in_safetensors_header(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.file, good.folder]), place)
    file = path if path.is_file() else rng.choice(sorted(path.iterdir()))
    data = file.read_bytes()
    end = len(data) if file.suffix == ".json" else 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(_flip(data, rng, 0, end))
    return path


def no_values(data: bytes, path: Path) -> list[int]:
    """The places of a torch file that are not within a tensor's values."""
    values: set[int] = set()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if "/data/" in entry.filename:
                head = data[entry.header_offset : entry.header_offset + 30]
                start = (
                    entry.header_offset
                    + 30
                    + int.from_bytes(head[26:28], "little")
                    + int.from_bytes(head[28:30], "little")
                )
                values.update(range(start, start + entry.file_size))
    return [place for place in range(len(data)) if place not in values]


def bit_in_torch_archive(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.torch_file, place)
    data = path.read_bytes()
    at = rng.choice(no_values(data, path))
    path.write_bytes(_flip(data, rng, at, at + 1))
    return path


def bit_in_dcp_metadata(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.dcp, place)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(_flip(data, rng, 0, len(data)))
    return path
