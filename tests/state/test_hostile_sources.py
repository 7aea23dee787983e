"""Damaged and hostile weights: each is refused with the file named, or read to exactly what was there. None is read wrong.

Those that differ in a name, a shape or a dtype from the model's tensors without contradicting themselves (a wrong bit in a
name of a safetensors header, which has no checksum) are counted as told: a model is loaded only if all of these agree.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from state.good_sources import Good, copied, make_good
from state.mutant_files import no_values
from state.mutants import KINDS
from state.sources import loaded, same_bytes

from shardwise.errors import CheckpointError
from shardwise.state.convert import Conversion, convert
from shardwise.state.source import open_source


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    return make_good(tmp_path_factory.mktemp("good"))


def outcome(path: Path, good: Good) -> str:
    """What comes of a source: "refused", "told", "read", or in which way it is wrong."""
    begin = time.perf_counter()
    try:
        source = open_source(path)
        facts = {name: (stored.shape, stored.dtype) for name, stored in source.tensors.items()}
        if facts != {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in good.tensors.items()}:
            return "told"
        found = loaded(source)
    except CheckpointError as error:
        named = str(path.parent) in str(error)
        return "refused" if named else f"refused without the file: {error}"
    finally:
        assert time.perf_counter() - begin < 5, f"{path}: it takes too long"
    wrong = [name for name, tensor in good.tensors.items() if not same_bytes(found[name], tensor)]
    return f"read silently wrong: {wrong}" if wrong else "read"


def test_the_good_ones_are_read(good):
    for path in (good.file, good.folder, good.torch_file, good.torch_folder, good.dcp):
        assert outcome(path, good) == "read", path


def check(kind: str, num: int, seed: int, good: Good, place: Path) -> None:
    print(f"seed {seed}, {num} of {kind!r}")
    found: Counter[str] = Counter()
    for number in range(num):
        folder = place / str(number)
        folder.mkdir()
        path = KINDS[kind](random.Random(f"{seed} {kind} {number}"), good, folder)
        result = outcome(path, good)
        assert result in ("refused", "told", "read"), f"{kind} {number}, seed {seed}: {result}"
        found[result] += 1
    assert not good.marker.exists(), "a pickle was run"
    print(dict(found))
    if not kind.startswith(("a bit", "truncated")):  # a bit, or an end, that nothing reads leaves the values whole
        assert found["refused"] == num, found


@pytest.mark.parametrize("kind", KINDS)
def test_no_mutant_is_read_wrong(kind, good, tmp_path):
    check(kind, 20, 20260, good, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_mutant_of_many_is_read_wrong(kind, good, tmp_path):
    check(kind, 1000, random.randrange(1 << 32), good, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["file", "torch_file", "dcp"])
def test_no_single_wrong_bit_is_read_wrong(kind, good, tmp_path):
    """Every bit of a safetensors header, of a torch file but for its values, and of DCP's metadata."""
    path = copied(getattr(good, kind), tmp_path)
    file = path / ".metadata" if path.is_dir() else path
    data = file.read_bytes()
    places = {
        "file": lambda: range(8 + int.from_bytes(data[:8], "little")),
        "torch_file": lambda: no_values(data, path),
        "dcp": lambda: range(len(data)),
    }[kind]()
    for place in places:
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            assert outcome(path, good) in ("refused", "told", "read"), f"byte {place}, bit {bit}"


def test_files_beside_the_weights_that_are_links_out_are_not_carried_along(good, tmp_path):
    folder = copied(good.folder, tmp_path)
    (tmp_path / "secret").write_text("{}")
    (folder / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link out of the directory"):
        convert(Conversion(source=folder, dest=tmp_path / "out", to="hf"))
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        open_source(tmp_path / "pipe.pt")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.gguf", b"GGUF" + bytes(40), "a file for GGUF"),
        ("a.npz", b"PK\x03\x04" + bytes(40), "a file for NumPy"),
        ("notes.txt", b"hello, world, this is a text", "neither as a safetensors file nor as one by torch.save"),
        ("nothing", b"", "neither as a safetensors file nor as one by torch.save"),
    ],
)
def test_a_file_of_another_kind_is_not_called_damaged(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(tmp_path / name)
    assert "damaged" not in str(caught.value) and "a Hugging Face directory" in caught.value.fix
