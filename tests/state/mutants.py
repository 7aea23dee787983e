"""Weights that somebody has damaged, on purpose or not: made from good ones by a seed, kind by kind.

Every kind is a function ``(rng, good, place) -> path``: it writes one damaged copy of something good under ``place`` and
returns what a user would name. ``KINDS`` lists them all.
"""

import copy
import io
import json
import os
import pickle
import random
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

__all__ = ["KINDS", "Good", "copied", "make_good", "no_values"]


@dataclass(frozen=True)
class Good:
    """The undamaged sources, in one folder: their paths, and what is in each of them."""

    tensors: dict[str, Tensor]
    file: Path  # safetensors
    folder: Path  # safetensors with an index
    torch_file: Path
    torch_folder: Path
    dcp: Path
    marker: Path  # a file that a pickle would make if it were run


def make_good(place: Path) -> Good:
    """All of them. Two tensors have the same shape and dtype, so that one read in place of the other would be seen."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(6, 4, generator=generator), "b.weight": torch.randn(6, 4, generator=generator),
        "c.weight": torch.randn(5, 3, generator=generator).bfloat16(), "d.count": torch.tensor(7), "e.empty": torch.empty(0, 3),
        "f.turned": torch.randn(4, 5, generator=generator).t(), "g.ids": torch.arange(12, dtype=torch.int32),
    }  # fmt: skip
    good = Good(tensors, *(place / name for name in ("m.safetensors", "hf", "m.pt", "bin", "dcp", "ran")))
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, good.file, metadata={"format": "pt"})
    torch.save(tensors, good.torch_file)
    parts = [list(tensors)[:2], list(tensors)[2:5], list(tensors)[5:]]
    for folder, stem, suffix in ((good.folder, "model", "safetensors"), (good.torch_folder, "pytorch_model", "bin")):
        folder.mkdir()
        names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.{suffix}" for i in range(len(parts))]
        for file, part in zip(names, parts, strict=True):
            if suffix == "bin":
                torch.save({name: tensors[name] for name in part}, folder / file)
            else:
                save_file({name: plain[name] for name in part}, folder / file)
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {n: f for f, part in zip(names, parts, strict=True) for n in part},
        }
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=1))
    _save_dcp(tensors, good.dcp)
    return good


def _save_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    """As three ranks would have: the first two tensors in chunks of two rows."""
    pieces = {f"{name}@{row}": tensors[name][row : row + 2].clone() for name in list(tensors)[:2] for row in (0, 2, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(pieces | dict(list(tensors.items())[2:]), storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for piece in pieces:
        name, row = piece.split("@")
        entry = metadata.state_dict_metadata.pop(piece)
        chunk = ChunkStorageMetadata(torch.Size([int(row), 0]), torch.Size([2, 4]))
        whole = metadata.state_dict_metadata.setdefault(name, entry)
        whole.size, whole.chunks = torch.Size([6, 4]), [*(whole.chunks if whole is not entry else []), chunk]
        info = next(metadata.storage_data.pop(key) for key in list(metadata.storage_data) if key.fqn == piece)
        metadata.storage_data[MetadataIndex(name, torch.Size([int(row), 0]))] = info
        metadata.planner_data.pop(piece)
        metadata.planner_data[name] = (name,)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# ---- helpers ------------------------------------------------------------------------------------------------------


def copied(good: Path, place: Path) -> Path:
    target = place / good.name
    if good.is_dir():
        shutil.copytree(good, target)
    else:
        shutil.copy(good, target)
    return target


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


def _rezip(path: Path, pickled: bytes) -> None:
    """The archive with another pickle, its checksum right."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else data)


def _pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


# ---- files that end too early, or lie about themselves ------------------------------------------------------------


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


# ---- pickles ------------------------------------------------------------------------------------------------------

_CALLS = [
    ("os", "system"), ("posix", "system"), ("builtins", "exec"), ("builtins", "eval"), ("__builtin__", "eval"), ("subprocess", "Popen"),
    ("subprocess", "call"), ("builtins", "getattr"), ("builtins", "__import__"), ("importlib", "import_module"), ("runpy", "run_path"),
    ("pickle", "loads"), ("torch", "load"), ("torch.serialization", "load"), ("torch.storage", "_load_from_bytes"), ("torch.hub", "load"),
    ("numpy", "load"), ("operator", "attrgetter"), ("functools", "partial"), ("shutil", "rmtree"), ("pty", "spawn"), ("code", "interact"),
    ("torch", "save"), ("collections", "OrderedDict.__init__"), ("torch._utils", "os.system"), ("types", "FunctionType"),
]  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _payload(rng: random.Random, marker: Path) -> bytes:
    """Opcodes that leave one value on the stack, and would run something on the way, each by another opcode."""
    module, name = rng.choice(_CALLS)
    argument = _text(f"touch {marker}" if "system" in name else f"open({str(marker)!r}, 'w')")
    by_name = f"c{module}\n{name}\n".encode()
    by_stack = _text(module) + _text(name) + b"\x93"
    called = rng.choice([by_name, by_stack])
    return rng.choice(
        [
            called + argument + b"\x85R",  # REDUCE
            called + argument + b"\x85\x81",  # NEWOBJ
            called + argument + b"\x85}\x92",  # NEWOBJ_EX
            b"(" + argument + f"i{module}\n{name}\n".encode(),  # INST
            b"(" + called + argument + b"o",  # OBJ
            called + b")R}" + _text("__setstate__") + called + b"sb",  # BUILD with a state that names a function
            b"ccollections\nOrderedDict\n)R}" + _text("__reduce__") + called + b"sb",  # BUILD on what is allowed
            b"ctorch._utils\n_rebuild_tensor_v2\n" + b"}" + _text("__code__") + called + b"sb",  # BUILD on a function itself
            b"\x82\x01",  # EXT1
            b"Pposix.system\n",  # PERSID
            called,  # only named
        ]
    )  # fmt: skip


def _with_payload(data: bytes, rng: random.Random, payload: bytes) -> bytes:
    """The payload alone, before everything, or as one more entry of a mapping at the end."""
    return rng.choice(
        [
            b"\x80\x02" + payload + b".",
            data[:2] + payload + b"0" + data[2:],
            b"\x80\x02}" + _text("x") + payload + b"s.",
        ]
    )


def torch_file_that_runs_code(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.torch_file, good.torch_folder]), place)
    file = path if path.is_file() else rng.choice(sorted(path.glob("*.bin")))
    _rezip(file, _with_payload(_pickle_of(file), rng, _payload(rng, good.marker)))
    if rng.random() < 0.2:
        file.write_bytes(_with_payload(b"\x80\x02}.", rng, _payload(rng, good.marker)))  # a bare pickle
    return path


def dcp_that_runs_code(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.dcp, place)
    data = (path / ".metadata").read_bytes()
    if rng.random() < 0.3:  # in one of the chunks
        file = path / "__0_0.distcp"
        blob = io.BytesIO()
        torch.save({}, blob)
        file.write_bytes(b"\x80\x02" + _payload(rng, good.marker) + b"." + file.read_bytes()[:-1])
        return path
    (path / ".metadata").write_bytes(_with_payload(data, rng, _payload(rng, good.marker)))
    return path


def _bomb(rng: random.Random) -> bytes:
    """A few bytes that stand for a value without end."""
    depth = rng.randrange(30, 60)
    pair = b"\x94h\x00h\x00\x86"
    return rng.choice(
        [
            b"(" * 100_000 + b"t" * 100_000 + b".",  # nested tuples
            b"]" * 50_000 + b"a" * 49_999 + b".",  # nested lists
            b"]\x94h\x00a.",  # a list within itself
            b"}\x94" + _text("x") + b"h\x00s.",  # a mapping within itself
            b"}" + b"".join(b"q" + bytes([i]) + b"}(" + _text("a") + b"h" + bytes([i]) + _text("b") + b"h" + bytes([i]) + b"u" for i in range(depth)) + b".",
            b"}" + b"".join(b"(K\x01K\x01\x86q" + bytes([i]) + b"0" for i in range(3)) + b".",
            b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth)) + b".",  # 2^depth values
            b"}(" + b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth)) + b"Nu.",  # ... as a key
            b"}r\xff\xff\xff\xff.",  # memo 4 294 967 295
            b"\x8b\xff\xff\xff\x7f" + b"\xff" * 64 + b".",  # a number of 2 GB
            b"X\xff\xff\xff\x7f" + b"a" * 64 + b".",  # a text of 2 GB
            b"\x8d" + b"\xff" * 8 + b"a.",  # a text of 2^64
            b"K\x01" + pair * depth + b".",
            b"N" * 100_000 + b".",
            b"0.", b"R.", b"h\x05.", b"s.", b"b.", b"t.", b"", b".", b"\x80\xff.",
        ]
    )  # fmt: skip


def memo_bombs(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(rng.choice([good.torch_file, good.dcp]), place)
    if path.is_dir():
        (path / ".metadata").write_bytes(b"\x80\x04" + _bomb(rng))
    else:
        _rezip(path, b"\x80\x02" + _bomb(rng))
    return path


class _Storage:
    def __init__(self, kind: type, key: str, length: int):
        self.id = ("storage", kind, key, "cpu", length)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.id if isinstance(obj, _Storage) else None


class _Rebuilt:
    def __init__(self, *args: object):
        self.args = args

    def __reduce__(self):
        from torch._utils import _rebuild_tensor_v2

        return _rebuild_tensor_v2, self.args


def storages_out_of_range(rng: random.Random, good: Good, place: Path) -> Path:
    """A torch file whose pickle names places beyond its records."""
    path = copied(good.torch_file, place)
    shape, strides, start, key, length = rng.choice(
        [
            ((6, 4), (4, 1), 1, "0", 24), ((6, 4), (4, 1), 1 << 40, "0", 24), ((7, 4), (4, 1), 0, "0", 24), ((7, 4), (4, 1), 0, "0", 28),
            ((6, 4), (40, 1), 0, "0", 24), ((6, 4), (-4, 1), 20, "0", 24), ((6, 4), (4, 1), -1, "0", 24), ((6, 4), (4, 1), 0, "99", 24),
            ((6, 4), (4, 1), 0, "../data.pkl", 24), ((1 << 62, 4), (0, 0), 0, "0", 24), ((1 << 40, 1 << 40), (0, 0), 0, "0", 24),
            ((6, 4), (4,), 0, "0", 24), ((6,), (4, 1), 0, "0", 24), ((6, -4), (4, 1), 0, "0", 24), ((6, 4.0), (4, 1), 0, "0", 24),
            ((6, 4), (1 << 62, 1), 0, "0", 24), ((True, 4), (4, 1), 0, "0", 24), ((6, 4), (4, 1), 0, "0", 23), ((6, 4), (4, 1), 0, "0", -1),
        ]
    )  # fmt: skip
    target = io.BytesIO()
    wrong = _Rebuilt(_Storage(torch.FloatStorage, key, length), start, shape, strides, False, {})
    _Pickler(target, protocol=2).dump({rng.choice(list(good.tensors)): wrong})
    _rezip(path, target.getvalue())
    return path


# ---- archives and chunks ------------------------------------------------------------------------------------------


def archives_that_lie(rng: random.Random, good: Good, place: Path) -> Path:
    """Records twice, compressed, encrypted, missing, or at each other's places."""
    path = copied(good.torch_file, place)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    how = rng.randrange(6)
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if how == 0 else zipfile.ZIP_STORED) as archive,
    ):
        warnings.simplefilter("ignore")  # of a name written twice
        victim = rng.choice([name for name in records if "/data/" in name and records[name]])
        for name, data in records.items():
            if how == 1 and name == victim:
                continue
            archive.writestr(name, data[: len(data) // 2] if how == 2 and name == victim else data)
        if how == 3:
            archive.writestr(victim, bytes(len(records[victim])))
        elif how == 4:
            archive.writestr("other/data.pkl", b"}.")
    if how == 5:  # one record listed at another's place
        data = bytearray(path.read_bytes())
        places = [match.start() for match in re.finditer(b"PK\x01\x02", data)]
        a, b = rng.sample(places, 2)
        data[a + 42 : a + 46] = data[b + 42 : b + 46]
        path.write_bytes(data)
    return path


def chunks_that_do_not_tile(rng: random.Random, good: Good, place: Path) -> Path:
    path = copied(good.dcp, place)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = rng.choice(["a.weight", "b.weight"])
    entry = metadata.state_dict_metadata[name]
    how = rng.randrange(7)
    if how == 0:
        entry.chunks.pop(rng.randrange(3))
    elif how == 1:
        entry.chunks.append(copy.copy(rng.choice(entry.chunks)))
    elif how == 2:
        entry.chunks[rng.randrange(3)].offsets = torch.Size([rng.choice([1, 3, 5, 6, 1 << 40]), rng.choice([0, 1])])
    elif how == 3:
        entry.chunks[rng.randrange(3)].sizes = torch.Size([rng.choice([1, 3, 1 << 40]), rng.choice([4, 5])])
    elif how == 4:
        entry.size = torch.Size(rng.choice([[5, 4], [7, 4], [6, 5], [6], [6, 4, 1], [1 << 40, 4]]))
    elif how == 5:
        entry.properties.dtype = rng.choice([torch.float64, torch.int32, torch.bfloat16])
    else:
        infos = [info for index, info in metadata.storage_data.items() if index.fqn == name]
        info = rng.choice(infos)
        other = rng.choice([o for o in metadata.storage_data.values() if o is not info])
        info.offset = rng.choice([other.offset, info.offset + 1, 1 << 40])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
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


KINDS: dict[str, Callable[[random.Random, Good, Path], Path]] = {
    "truncated file": truncated,
    "wrong header length": wrong_header_length,
    "overlapping offsets": _change_header(_overlap),
    "offsets out of range": _change_header(_out_of_range),
    "gaps between tensors": gaps,
    "duplicate names": duplicate_names,
    "huge sizes": _change_header(_huge),
    "wrong dtype in the header": _change_header(_wrong_dtype),
    "wrong shape in the header": _change_header(_wrong_shape),
    "index names what is missing": index_names_missing,
    "index does not name what is there": index_misses_extra,
    "paths that leave the directory": paths_that_leave,
    "links out of the directory": links_out,
    "torch file that runs code": torch_file_that_runs_code,
    "DCP directory that runs code": dcp_that_runs_code,
    "memo bombs": memo_bombs,
    "storages out of range": storages_out_of_range,
    "archives that lie": archives_that_lie,
    "chunks that do not tile": chunks_that_do_not_tile,
    "a bit in a safetensors header or index": bit_in_safetensors_header,
    "a bit in a torch archive": bit_in_torch_archive,
    "a bit in DCP metadata": bit_in_dcp_metadata,
}
