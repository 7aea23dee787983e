"""Sources that change while they are read: values of two versions never come out as one."""

import json
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.config.conversion import Conversion
from shardwise.errors import CheckpointError
from shardwise.state import convert as convert_module
from shardwise.state import files as files_module
from shardwise.state import load as load_module
from shardwise.state.changed_rows import Reordered
from shardwise.state.source import open_source
from shardwise.state.stored_parts import Assembled, view_of_all

NAMES = [f"{number}.weight" for number in range(4)]


def build():
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in NAMES))


def write(folder, value):
    """One file a tensor, and an index; where they are there already, each is replaced. Times are kept, as by ``cp -p``."""
    os.makedirs(folder, exist_ok=True)
    homes = {name: f"model-{number:05}-of-00004.safetensors" for number, name in enumerate(NAMES, start=1)}
    for name, file in homes.items():
        save_file({name: torch.full((8, 8), value)}, f"{folder}/new")
        os.utime(f"{folder}/new", (1, 1))
        os.replace(f"{folder}/new", f"{folder}/{file}")
    with open(f"{folder}/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": homes}, file)


def load_while_replaced(folder, rank, when, shared):
    """The directory is replaced before the read number ``when`` of ``rank``."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build, world, sharding=sw.Sharding(min_unit_bytes=0))
        kept, calls = files_module.OpenFiles.read, [0]

        def read(self, path, offset, memory, record=None):
            calls[0] += 1
            if world.rank == rank and calls[0] == when:
                write(folder, 2.0)
            kept(self, path, offset, memory, record)

        try:
            with patch.object(files_module.OpenFiles, "read", read):
                sw.load_weights(model, folder, shared_files=shared)
        except sw.CheckpointError as error:
            told = str(error)
        try:
            model(torch.zeros(1, 8))
        except sw.UsageError as error:
            told += str(error)
        sw.load_weights(model, folder, shared_files=shared)
        return told, sw.full_state_dict(model)


@pytest.mark.parametrize(("rank", "when", "shared"), [(0, 1, True), (1, 3, True), (0, 4, True), (0, 3, False)])
def test_a_directory_that_is_replaced_while_it_is_loaded(ranks, tmp_path, rank, when, shared):
    write(tmp_path, 1.0)
    (told, state), (other, _) = ranks.run(load_while_replaced, 2, str(tmp_path), rank, when, shared)
    for words in (told, other):
        assert "it changed while it was being read" in words and "not loaded whole" in words
    assert {float(tensor.mean()) for tensor in state.values()} == {2.0}


def plan_and_replace(folder, rank):
    """On one rank headers are of the older version, on the other of the newer."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build, world, sharding=sw.Sharding(min_unit_bytes=0))
        kept = load_module.plan_of

        def plan_of(*args):
            if world.rank == rank:
                world.barrier()
                write(folder, 2.0)
                return kept(*args)
            plan = kept(*args)
            world.barrier()
            return plan

        with patch.object(load_module, "plan_of", plan_of):
            try:
                sw.load_weights(model, folder)
            except sw.CheckpointError as error:
                return str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_saw_different_versions(ranks, tmp_path, rank):
    write(tmp_path, 1.0)
    assert all("it changed" in told for told in ranks.run(plan_and_replace, 2, str(tmp_path), rank))


def crossed(path):
    """A file of the same size in whose header two names have changed places."""
    data = path.read_bytes().replace(b'"a"', b'"x"').replace(b'"b"', b'"a"').replace(b'"x"', b'"b"')
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


def test_a_source_that_is_replaced_before_its_values_are_converted(tmp_path):
    source, planned = tmp_path / "s.safetensors", convert_module._planned
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, source)

    def late(*given):
        found = planned(*given)
        crossed(source)
        return found

    job = Conversion(source=source, dest=tmp_path / "o.safetensors", verify=True)
    with patch.object(convert_module, "_planned", late), pytest.raises(CheckpointError, match="it changed while"):
        convert_module.convert(job)
    assert not job.dest.exists()
    convert_module.convert(job)
    assert torch.equal(load_file(job.dest)["b"], torch.zeros(4))


def test_a_source_that_is_replaced_while_it_is_compared(tmp_path):
    source, compare = tmp_path / "s.safetensors", convert_module._compare
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, source)

    def late(*args):
        compare(*args)
        crossed(source)

    job = Conversion(source=source, dest=tmp_path / "o.safetensors", verify=True)
    with patch.object(convert_module, "_compare", late), pytest.raises(CheckpointError, match="it changed while"):
        convert_module.convert(job)
    assert not job.dest.exists()


def test_parts_that_are_put_together_and_rows_in_another_order_say_where_they_come_from(tmp_path):
    save_file({"a": torch.zeros(4, 2)}, tmp_path / "s.safetensors")
    part = open_source(tmp_path / "s.safetensors").tensors["a"]
    (chunk,) = part.origins
    view = view_of_all("a", (4, 2))
    assert Assembled((4, 2), "float32", ((view, part), (view, part))).origins == (chunk, chunk)
    assert Reordered((4, 2), "float32", part, 1, True).origins == (chunk,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_files_by_torch_have_a_time_too(tmp_path, kind):
    source, planned = tmp_path / "source.pt", convert_module._planned
    state = {"a": torch.zeros(4), "b": torch.ones(4)}
    if kind == "torch":
        torch.save(state, source)
    else:
        source = tmp_path / "source"
        dcp.save(state, checkpoint_id=source, no_dist=True)

    def late(*given):
        found = planned(*given)
        file = source if kind == "torch" else next(source.glob("*.distcp"))
        os.utime(file, ns=(0, 0))
        return found

    job = Conversion(source=source, dest=tmp_path / "o.safetensors")
    with patch.object(convert_module, "_planned", late), pytest.raises(CheckpointError, match="it changed while"):
        convert_module.convert(job)
