"""Damaged and hostile torch files and DCP directories; see ``mutants.py``."""

import copy
import io
import pickle
import random
import re
import warnings
import zipfile
from pathlib import Path

import torch
from state.good_sources import Good, copied

__all__ = [
    "archives_that_lie",
    "chunks_that_do_not_tile",
    "dcp_that_runs_code",
    "memo_bombs",
    "replace_pickle",
    "storages_out_of_range",
    "torch_file_that_runs_code",
]


def replace_pickle(path: Path, pickled: bytes) -> None:
    """The archive with another pickle, its checksum right."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else data)


def _pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


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
    replace_pickle(file, _with_payload(_pickle_of(file), rng, _payload(rng, good.marker)))
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
        replace_pickle(path, b"\x80\x02" + _bomb(rng))
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
    replace_pickle(path, target.getvalue())
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
