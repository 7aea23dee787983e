"""Files by torch.save are read at their offsets, as torch reads them, and nothing in them is ever run."""

import collections
import json
import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from state.mutant_pickles import replace_pickle
from state.sources import Runs, loaded, same_bytes
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.recipe.boxes import Box
from shardwise.state.files import OpenFiles
from shardwise.state.source import open_source

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip


def check_against_torch(path: Path) -> dict[str, torch.Tensor]:
    found, wanted = loaded(open_source(path)), torch.load(path, weights_only=True, mmap=True)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert same_bytes(found[name], tensor), name
    return found


def test_every_dtype(tmp_path):
    state = {str(dtype): torch.arange(1, 13).to(dtype).view(3, 4) for dtype in DTYPES}
    torch.save(state, tmp_path / "a.pt")
    check_against_torch(tmp_path / "a.pt")


def test_views_empty_and_scalar_tensors_parameters_and_ties(tmp_path):
    base = torch.randn(6, 8, 4)
    state = {
        "turned": base.permute(2, 0, 1), "part": base[1:5:2, ::3], "row": base[3], "repeated": torch.randn(1, 4).expand(5, 4),
        "scalar": torch.tensor(2.5), "scalar_in_a_row": base[1, 2, 3], "empty": torch.empty(0, 3), "none": torch.empty(2, 0).t(),
        "param": nn.Parameter(torch.randn(3, 3)), "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "tied": base[3], "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    check_against_torch(tmp_path / "a.pt")
    with OpenFiles() as files:  # a box of a strided tensor is read as a box
        stored = open_source(tmp_path / "a.pt").tensors["turned"]
        out = torch.empty(2, 3, 5)
        stored.read(Box((1, 2, 3), (2, 3, 5)), out, files)
    assert torch.equal(out, state["turned"][1:3, 2:5, 3:8])


def test_a_modules_state_dict_with_its_metadata(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert hasattr(model.state_dict(), "_metadata")
    check_against_torch(tmp_path / "a.pth")


def test_parameters_with_attributes(tmp_path):
    weight = nn.Parameter(torch.randn(2, 2))
    weight.tensor_model_parallel = True  # as Megatron marks them
    plain = torch.randn(3)
    plain.note = "x"
    torch.save({"weight": weight, "plain": plain}, tmp_path / "a.pt")
    found = loaded(open_source(tmp_path / "a.pt"))
    assert same_bytes(found["weight"], weight)
    assert same_bytes(found["plain"], plain)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_the_models_mapping_is_found_and_the_rest_told(tmp_path, key):
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3)).sum().backward()
    optim.step()
    state = {
        "step": 3,
        key: model.state_dict() | {"extra": "text"},
        "optimizer": optim.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(state, tmp_path / "a.ckpt")
    source = open_source(tmp_path / "a.ckpt")
    assert set(source.tensors) == {"weight", "bias"}
    assert source.left_out == {
        "step": f"it stands beside '{key}', which has the weights",
        "extra": "it is no tensor",
        "optimizer": "optimizer state",
        "rng": f"it stands beside '{key}', which has the weights",
    }
    assert same_bytes(loaded(source)["weight"], model.weight)


def test_nested_mappings_are_joined(tmp_path):
    torch.save(
        {"encoder": {"w": torch.ones(2)}, "decoder": {"w": torch.zeros(2), "n": 1}, "optim": {"x": torch.ones(1)}},
        tmp_path / "a.pt",
    )
    source = open_source(tmp_path / "a.pt")
    assert set(source.tensors) == {"encoder.w", "decoder.w"}
    assert source.left_out == {"decoder.n": "it is no tensor", "optim": "optimizer state"}


def test_one_name_for_two_tensors_is_refused(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="joined by"):
        open_source(tmp_path / "a.pt")
    torch.save({1: torch.ones(1), "1": torch.zeros(1)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="look the same"):
        open_source(tmp_path / "b.pt")
    torch.save({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="model and state_dict"):
        open_source(tmp_path / "c.pt")


def test_only_the_bytes_of_a_box_are_read(tmp_path):
    torch.save({"w": torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)}, tmp_path / "a.pt")
    stored = open_source(tmp_path / "a.pt").tensors["w"]
    with OpenFiles() as files:
        stored.load(files, Box((512, 0), (4, 1024)))
        assert files.num_bytes == 4 * 1024 * 4


def test_what_is_not_plain_is_refused_by_name(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            "sparse": torch.eye(3).to_sparse(),
            "quantized": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
            "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
            "meta": torch.empty(3, device="meta"),
        }
    for kind, tensor in odd.items():
        torch.save({"fine": torch.ones(1), "layer.weight": tensor}, tmp_path / f"{kind}.pt")
        with pytest.raises(CheckpointError) as caught:
            open_source(tmp_path / f"{kind}.pt")
        assert kind in str(caught.value)  # the file
        assert caught.value.name == "layer.weight" or "torch." in caught.value.given


@pytest.mark.parametrize("summed", [True, False])
def test_a_wrong_length_in_the_header_of_a_record_is_refused(tmp_path, summed):
    """Values would be read from another place, and without checksums nothing else would say so."""
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(summed)
    try:
        torch.save({"w": torch.randn(64)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    check_against_torch(path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("a/data/0").header_offset
    for bit in range(7):
        changed = bytearray(data)
        changed[at + 28] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="a/data/0"):
            open_source(path)


def test_records_that_overlap_are_refused(tmp_path):
    """One in the bytes of another, with a header of its own and the right checksum."""
    torch.save({"a": torch.zeros(64), "b": torch.zeros(2)}, tmp_path / "a.pt")
    inner = zipfile.ZipInfo("a/data/1")
    inner.file_size = inner.compress_size = 8
    inner.CRC = zlib.crc32(bytes(8))
    data = inner.FileHeader() + bytes(8)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist() if name != "a/data/1"}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, values in records.items():
            archive.writestr(name, data.ljust(256, b"x") if name == "a/data/0" else values)
        outer = archive.getinfo("a/data/0")
        inner.header_offset = outer.header_offset + len(outer.FileHeader())
        archive.filelist.append(inner)
    assert torch.load(tmp_path / "b.pt", weights_only=True, mmap=True)["b"].tolist() == [0, 0]
    with pytest.raises(CheckpointError, match=r"data/1\n.*overlaps|Overlapped entries"):  # some Pythons look themselves
        open_source(tmp_path / "b.pt")


def test_the_old_format_is_refused_with_the_way_out(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6") as caught:
        open_source(tmp_path / "a.pt")
    assert "weights_only=True" in caught.value.fix


def test_torchscript_and_single_tensors_are_refused(tmp_path):
    torch.save(torch.ones(2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="a single tensor"):
        open_source(tmp_path / "a.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_source(tmp_path / "b.pt")


def test_a_pickle_that_runs_code_is_refused_by_name_and_not_run(tmp_path):
    torch.save({"w": torch.ones(2), "x": Runs(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"(posix|os|nt)\.system"):
        open_source(tmp_path / "a.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="bare pickle"):
        open_source(tmp_path / "bare.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "key",
    [
        b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)),  # 2^60 values to hash, of which each is stored once
        b")" + b"\x85" * 1_000_000,  # too deep for the stack of the processor
    ],
)
def test_a_key_that_would_never_be_hashed_is_refused_at_once(tmp_path, key):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    replace_pickle(tmp_path / "a.pt", b"\x80\x02}(" + key + b"Nu.")
    with pytest.raises(CheckpointError, match="a tuple as a key"):
        open_source(tmp_path / "a.pt")


def test_a_class_of_the_users_own_is_refused_by_name(tmp_path):
    torch.save({"w": torch.ones(2), "config": SimpleNamespace(a=1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"types\.SimpleNamespace"):
        open_source(tmp_path / "a.pt")


def test_directories_of_torch_files(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    state = model.state_dict()
    one = tmp_path / "one"
    one.mkdir()
    torch.save(state, one / "pytorch_model.bin")
    assert all(same_bytes(loaded(open_source(one))[name], tensor) for name, tensor in state.items())
    many = tmp_path / "many"
    many.mkdir()
    parts = {
        "pytorch_model-00001-of-00002.bin": ["0.weight", "0.bias"],
        "pytorch_model-00002-of-00002.bin": ["1.weight", "1.bias"],
    }
    for file, names in parts.items():
        torch.save(collections.OrderedDict((name, state[name]) for name in names), many / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (many / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert all(same_bytes(loaded(open_source(many))[name], tensor) for name, tensor in state.items())
    (many / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_source(many)
