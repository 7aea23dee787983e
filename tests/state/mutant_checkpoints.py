"""Checkpoints that somebody has damaged, on purpose or not: made from a good one by a seed, kind by kind.

A kind is ``(rng, folder, other) -> None``: it changes the copy in ``folder``; ``other`` is a good checkpoint of the same run, of
another step. Those named "forged" are given fresh checksums, as somebody can who knows the format.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shardwise.state.integrity.manifest import MANIFEST, FileFact, Manifest
from shardwise.state.integrity.sums import BLOCK, Sums, put_together

__all__ = ["KINDS", "Kind", "Runs", "flip", "sign", "swap_stretches", "zero"]

Kind = Callable[[random.Random, Path, Path], None]
STATE, REST = "training/state.json", "training/rest.safetensors"
TENSORS = ("model.safetensors", "training/optimizer.safetensors", REST)


class Runs:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def flip(rng: random.Random, path: Path, low: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(low, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def swap_stretches(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    size = rng.randrange(1, 200)
    while True:
        a, b = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
        if abs(a - b) >= size and data[a : a + size] != data[b : b + size]:
            break
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)


def zero(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) - 64)
    start = next(i for i in range(start, -1, -1) if any(data[i : i + 64]))
    data[start : start + 4096] = bytes(min(4096, len(data) - start))
    path.write_bytes(data)


def sign(folder: Path, **changes) -> None:
    """Writes a manifest that fits what lies there, with ``changes`` of its fields."""
    (folder / MANIFEST).unlink(missing_ok=True)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    facts = {}
    for name in names:
        data = (folder / name).read_bytes()
        sums = Sums()
        for block in range(-(-len(data) // BLOCK)):
            sums.add(name, block, memoryview(data)[block * BLOCK : (block + 1) * BLOCK])
        facts[name] = FileFact(len(data), put_together({name: len(data)}, [sums.partial_sums()])[name])
    fields = {"step": 2, "layout": "", "num_ranks": 1, "fingerprint": "", "versions": {}, "files": facts}
    (folder / MANIFEST).write_bytes(Manifest(**{**fields, **changes}).to_bytes())


def _bit_in(name: str) -> Kind:
    return lambda rng, folder, other: flip(rng, folder / name)


def _bit_in_header(rng, folder, other):
    path = folder / rng.choice(TENSORS)
    data = bytearray(path.read_bytes())
    data[rng.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _any_file(rng, folder) -> Path:
    return folder / rng.choice([*TENSORS, STATE, "training/recipe.json", MANIFEST])


def truncated(rng, folder, other):
    path = _any_file(rng, folder)
    os.truncate(path, rng.randrange(path.stat().st_size))


def longer(rng, folder, other):
    with _any_file(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def missing(rng, folder, other):
    _any_file(rng, folder).unlink()


def extra(rng, folder, other):
    place = folder / rng.choice(["", "training", "new"])
    place.mkdir(exist_ok=True)
    (place / f"{rng.choice(['model-00002-of-00002.safetensors', 'notes.txt', 'pytorch_model.bin'])}").write_bytes(b"x")


def swapped(rng, folder, other):
    one, two = rng.sample(TENSORS, 2)
    (folder / one).rename(folder / "aside")
    (folder / two).rename(folder / one)
    (folder / "aside").rename(folder / two)


def of_another_step(rng, folder, other):
    name = rng.choice([*TENSORS, STATE])
    shutil.copy(other / name, folder / name)


def swapped_stretches(rng, folder, other):
    swap_stretches(rng, folder / rng.choice(TENSORS))


def zeroed(rng, folder, other):
    zero(rng, folder / rng.choice(TENSORS))


def manifest_of_another(rng, folder, other):
    shutil.copy(other / MANIFEST, folder / MANIFEST)


def edited_manifest(rng, folder, other):
    content = json.loads((folder / MANIFEST).read_text())
    name = rng.choice(list(content["files"]))
    entry = content["files"][name]
    match rng.randrange(5):
        case 0:
            content["step"] += rng.randrange(1, 9)
        case 1:
            entry["size"] += rng.choice([-1, 1, 4096])
        case 2:
            entry["crc32c"] = f"{rng.randrange(1 << 32):08x}" + entry["crc32c"][8:]
        case 3:
            del content["files"][name]
        case 4:
            content["fingerprint"] = "0" * 16
    (folder / MANIFEST).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def unlike_spelling(rng, folder, other):
    content = json.loads((folder / MANIFEST).read_text())
    text = json.dumps(content, indent=rng.choice([None, 0, 2, 4]), sort_keys=True)
    (folder / MANIFEST).write_text(text + rng.choice(["", "\n", " \n"]))


def renamed(rng, folder, other):
    sign(folder, step=rng.randrange(3, 1000))


def link(rng, folder, other):
    name = rng.choice([*TENSORS, STATE, MANIFEST])
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def linked_folder(rng, folder, other):
    (folder / "training").rename(folder.parent / "elsewhere")
    (folder / "training").symlink_to(folder.parent / "elsewhere")


def _with_fact(folder, name, size, num_sums):
    fact = Manifest.read(folder)
    files = dict(fact.files)
    files[name] = FileFact(size, np.zeros(num_sums, dtype=np.uint32))
    (folder / MANIFEST).write_bytes(Manifest(**{**_fields(fact), "files": files}).to_bytes())


def _fields(manifest):
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}


def forged_path(rng, folder, other):
    (folder.parent / "outside").write_bytes(b"x")
    name = rng.choice(["../outside", str(folder.parent / "outside"), "a/../../outside", "./model.safetensors", "a//b"])
    _with_fact(folder, name, 1, 1)


def forged_size(rng, folder, other):
    name = rng.choice([*TENSORS, "new"])
    size = rng.choice([1 << 40, 1 << 62, (1 << 63) - 1, 10**30])
    _with_fact(folder, name, size, rng.choice([0, 1, 7]))


def _edit_header(rng, folder, act):
    path = folder / rng.choice(TENSORS[:2])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    act(header, rng.choice(names))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    sign(folder)


def forged_dtype(rng, folder, other):
    def act(header, name):
        header[name]["dtype"] = {"F64": "I64", "F32": "I32", "I32": "F32"}.get(header[name]["dtype"], "U8")

    _edit_header(rng, folder, act)


def forged_shape(rng, folder, other):
    def act(header, name):
        header[name]["shape"] = [*header[name]["shape"], 1]

    _edit_header(rng, folder, act)


def forged_name(rng, folder, other):
    def act(header, name):
        header[name + rng.choice(["x", ".weight", "/exp_avg", "'"])] = header.pop(name)

    _edit_header(rng, folder, act)


def forged_header_size(rng, folder, other):
    path = folder / rng.choice(TENSORS)
    data = path.read_bytes()
    size = rng.choice([0, 1, len(data), 1 << 40, (1 << 64) - 1])
    path.write_bytes(size.to_bytes(8, "little") + data[8:])
    sign(folder)


def forged_pickle(rng, folder, other):
    mark = folder.parent / "mark"
    path = folder / rng.choice([*TENSORS, STATE])
    if rng.random() < 0.5:
        path.write_bytes(pickle.dumps(Runs(mark)))
    else:
        torch.save({"embed.weight": torch.zeros(2), "x": Runs(mark)}, path)
    sign(folder)


def forged_state(rng, folder, other):
    content = json.loads((folder / STATE).read_text())
    bad = rng.choice([
        {"$tensor": "nothing of that name"}, {"$dtype": "torch.os"}, {"$device": "nowhere"}, {"$code": "1"},
        {"$scalar": "object", "value": 1}, {"$bytes": "zz"}, {"$tuple": 5}, {"$dict": [[{"$tuple": [[]]}, 1]]}, 7, None,
    ])  # fmt: skip
    content[rng.choice(["optimizer", "step", "random", "extra"])] = bad
    (folder / STATE).write_text(json.dumps(content))
    sign(folder)


def forged_nesting(rng, folder, other):
    depth = rng.randrange(100_000, 300_000)
    name = rng.choice([STATE, MANIFEST])
    (folder / name).write_text('{"a":' * depth + "1" + "}" * depth)
    if name == STATE:
        sign(folder)


KINDS: dict[str, Kind] = {
    "a bit in the weights": _bit_in("model.safetensors"),
    "a bit in the optimizer's tensors": _bit_in("training/optimizer.safetensors"),
    "a bit in other tensors": _bit_in(REST),
    "a bit in a header": _bit_in_header,
    "a bit in the state": _bit_in(STATE),
    "a bit in the recipe": _bit_in("training/recipe.json"),
    "a bit in the manifest": _bit_in(MANIFEST),
    "a truncated file": truncated,
    "a file with more at its end": longer,
    "a missing file": missing,
    "an extra file": extra,
    "two files swapped": swapped,
    "a file of another step": of_another_step,
    "two stretches swapped": swapped_stretches,
    "a stretch of zeros": zeroed,
    "the manifest of another step": manifest_of_another,
    "an edited manifest": edited_manifest,
    "a manifest spelled otherwise": unlike_spelling,
    "a link for a file": link,
    "a link for a directory": linked_folder,
    "forged: another step": renamed,
    "forged: paths that leave the directory": forged_path,
    "forged: absurd sizes": forged_size,
    "forged: another dtype": forged_dtype,
    "forged: another shape": forged_shape,
    "forged: another name": forged_name,
    "forged: another header length": forged_header_size,
    "forged: pickles that run code": forged_pickle,
    "forged: a state that is none": forged_state,
    "forged: absurd nesting": forged_nesting,
}
