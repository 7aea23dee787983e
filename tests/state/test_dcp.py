"""DCP directories are read chunk by chunk at their offsets, as torch reads them, and nothing in them is ever run."""

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from state.sources import Runs, loaded, same_bytes
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.recipe.boxes import Box
from shardwise.state.files import OpenFiles
from shardwise.state.source import open_source


def save(state: dict, folder: Path, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)


def values() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(6, 4), "half": torch.randn(5).bfloat16(), "turned": torch.randn(3, 7).t(), "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3), "count": torch.tensor(7), "mask": torch.tensor([True, False]), "part": torch.randn(8, 8)[2:4, 1:3],
    }  # fmt: skip


def check(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = loaded(open_source(folder))
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert same_bytes(found[name], tensor), name


@pytest.mark.parametrize("form", [SerializationFormat.TORCH_SAVE, SerializationFormat.SAFETENSORS])
def test_a_flat_state_dict(tmp_path, form):
    state = values()
    if form is SerializationFormat.SAFETENSORS:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    save(state, tmp_path / "d", serialization_format=form)
    check(tmp_path / "d", state)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_the_model_is_found_beside_the_optimizer(tmp_path, key):
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3)).sum().backward()
    optim.step()
    save({key: model.state_dict(), "optim": optim.state_dict(), "step": 3, "list": [1, torch.ones(1)]}, tmp_path / "d")
    check(tmp_path / "d", model.state_dict())
    left_out = open_source(tmp_path / "d").left_out
    assert left_out["optim"] == "optimizer state"
    assert set(left_out) == {"optim", "step", "list"}


def test_torchtitans_names(tmp_path):
    state = {"tok_embeddings.weight": torch.randn(5, 4), "layers.0.attention.wq.weight": torch.randn(4, 4)}
    beside = {
        "optimizer": {"state.layers.0.attention.wq.weight.exp_avg": torch.randn(4, 4), "param_groups.lr": 0.1},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
    }
    save(state | beside, tmp_path / "d")
    check(tmp_path / "d", state)
    assert set(open_source(tmp_path / "d").left_out) == set(beside)


def test_a_wrapped_application_state(tmp_path):
    model = nn.Linear(3, 2)
    save({"app": {"model": model.state_dict(), "optim": {"lr": 1.0}}}, tmp_path / "d")
    check(tmp_path / "d", model.state_dict())


def sharded(folder: str) -> dict[str, torch.Tensor]:
    """Ranks save a model whose rows do not divide, under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(2, 9, dtype=torch.bfloat16))
    full = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with sw.init("dp_shard=4"):
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return full


def test_chunks_of_several_ranks(ranks, tmp_path):
    full = ranks.run(sharded, 4, str(tmp_path / "d"))[0]
    check(tmp_path / "d", full)
    stored = open_source(tmp_path / "d").tensors["0.weight"]
    assert len(stored.chunks) == 4
    out = torch.empty(4, 2)
    with OpenFiles() as files:
        stored.read(Box((1, 2), (4, 2)), out, files)
        assert files.num_bytes <= 4 * 5 * 4
    assert torch.equal(out, full["0.weight"][1:5, 2:4])


def rewrite(folder: Path, change) -> None:
    """The metadata with a change made to torch's own records."""
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def info_of(metadata: Metadata, name: str):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def swap_places(metadata: Metadata) -> None:
    a, b = info_of(metadata, "w"), info_of(metadata, "half")
    a.offset, b.offset, a.length, b.length = b.offset, a.offset, b.length, a.length


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(info_of(m, "w"), "relative_path", "../outside.distcp"), "leaves the directory"),
        (lambda m: setattr(info_of(m, "w"), "relative_path", "/etc/passwd"), "leaves the directory"),
        (lambda m: setattr(info_of(m, "w"), "relative_path", "__9_0.distcp"), "no such file"),
        (lambda m: setattr(info_of(m, "w"), "length", 1 << 40), "cut off"),
        (lambda m: setattr(info_of(m, "w"), "offset", info_of(m, "half").offset), "several chunks"),
        (swap_places, ".metadata has"),
        (lambda m: setattr(info_of(m, "w"), "transform_descriptors", ["zstd"]), "zstd"),
        (lambda m: m.state_dict_metadata["w"].chunks.clear(), "a gap"),
        (lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0]), "overlap"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([7, 4])), "a gap"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([5, 4])), "beyond"),
        (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.float64), "has float64"),
        (lambda m: m.storage_data.clear(), "no file is named"),
        (lambda m: m.state_dict_metadata.__setitem__("x", Runs(Path("/nowhere"))), "system"),
    ],
)  # fmt: skip
def test_metadata_that_contradicts_the_files_is_refused(tmp_path, change, words):
    save(values(), tmp_path / "d")
    rewrite(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(tmp_path / "d")
    assert str(tmp_path / "d") in str(caught.value)
    assert caught.value.name in ("w", "half", None) or words == "no file is named"


def test_links_out_of_the_directory_are_refused(tmp_path):
    save(values(), tmp_path / "d")
    os.rename(tmp_path / "d" / "__0_0.distcp", tmp_path / "away.distcp")
    (tmp_path / "d" / "__0_0.distcp").symlink_to(tmp_path / "away.distcp")
    with pytest.raises(CheckpointError, match="link out of the directory"):
        open_source(tmp_path / "d")


def test_metadata_that_runs_code_is_not_run(tmp_path):
    save(values(), tmp_path / "d")
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        open_source(tmp_path / "d")
    assert not (tmp_path / "ran").exists()


def test_metadata_as_older_versions_of_torch_wrote_it(tmp_path):
    def older(metadata: Metadata) -> None:
        for entry in metadata.state_dict_metadata.values():
            entry.properties = OldProperties(dtype=entry.properties.dtype)
        metadata.planner_data = metadata.storage_meta = metadata.version = None

    state = values()
    save(state, tmp_path / "d")
    rewrite(tmp_path / "d", older)
    assert b"_shard.sharded_tensor" in (tmp_path / "d" / ".metadata").read_bytes()
    check(tmp_path / "d", state)


@pytest.mark.parametrize("by_name", [False, True])
def test_members_of_enumerations_are_read_by_name_and_by_value(tmp_path, monkeypatch, by_name):
    """Python 3.11.0 to 3.11.3 pickle them by name, as getattr of their class; all others by value."""
    way = (
        (lambda self, _: (getattr, (type(self), self.name)))
        if by_name
        else (lambda self, _: (type(self), (self.value,)))
    )
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", way)
    state = values()
    save(state, tmp_path / "d")
    assert (b"getattr" in (tmp_path / "d" / ".metadata").read_bytes()) == by_name
    check(tmp_path / "d", state)


@pytest.mark.parametrize("owner", [_MEM_FORMAT_ENCODING, "a text"])
def test_nothing_else_is_taken_out_of_what_a_pickle_names(tmp_path, owner):
    class Taken:
        def __reduce__(self):
            return getattr, (owner, "upper") if isinstance(owner, str) else (owner, 1)

    save(values(), tmp_path / "d")
    rewrite(tmp_path / "d", lambda metadata: setattr(metadata, "planner_data", Taken()))
    with pytest.raises(CheckpointError, match="an attribute of what is no enumeration"):
        open_source(tmp_path / "d")


def sharded_as_hugging_face(folder: str, consolidated: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    full = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with sw.init("dp_shard=2"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        writer = dcp.HuggingFaceStorageWriter(
            folder,
            fqn_to_index_mapping=dict.fromkeys(full, 1),
            save_distributed=True,
            enable_consolidation=consolidated,
        )
        dcp.save(model.state_dict(), storage_writer=writer)
    return full


@pytest.mark.parametrize("consolidated", [True, False])
def test_what_dcp_writes_as_safetensors_is_read_whole_or_refused(ranks, tmp_path, consolidated):
    folder = tmp_path / "hf"
    full = ranks.run(sharded_as_hugging_face, 2, str(folder), consolidated)[0]
    parts = folder / "sharded" if consolidated else folder
    if consolidated:
        check(folder, full)
    with pytest.raises(CheckpointError, match="do not say what belongs together"):
        open_source(parts)
    for file in parts.glob("*.safetensors"):
        with pytest.raises(CheckpointError, match="one rank's parts"):
            open_source(file)
