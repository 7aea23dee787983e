"""Every kind of source is loaded into sharded models, bit for bit; what we write as DCP, torch loads into its own shards."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import every_layout
from models.zoo import ConvNet, Odd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.state.convert import Conversion, convert

MODELS = {"odd": Odd, "conv": ConvNet}


def plain(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(torch.bfloat16 if name == "odd" else torch.float32)


def load(name: str, layout: str, source: str) -> dict[str, torch.Tensor]:
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(plain(name, 0), world, sharding=sw.Sharding(min_unit_bytes=0))
        sw.load_weights(model, source)
        return sw.full_state_dict(model)


@pytest.mark.quick(
    "converted dcp-odd-fsdp-4",
    "converted hf-odd-ddp-2",
    "converted safetensors-conv-fsdp-4",
    "converted torch-conv-ddp-2",
    "dcp-conv-one",
    "dcp-odd-fsdp-4",
    "torch-odd-fsdp-4",
)
@every_layout("one", "ddp-2", "fsdp-4")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "kind", ["torch", "dcp", "converted hf", "converted safetensors", "converted torch", "converted dcp"]
)
def test_a_sharded_model_loads_every_kind(ranks, tmp_path, kind, name, layout):
    state = plain(name, 1).state_dict()
    torch.save({"model": state, "optimizer": {"lr": 1.0}}, tmp_path / "source.pt")
    path = tmp_path / "source.pt"
    if kind == "dcp":
        path = tmp_path / "dcp"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process without a group
            dcp.save({"model": state, "step": 3}, checkpoint_id=path, no_dist=True)
    elif kind != "torch":
        to = kind.removeprefix("converted ")
        path = tmp_path / {"hf": "out", "safetensors": "out.safetensors", "torch": "out.pt", "dcp": "out"}[to]
        convert(
            Conversion(source=tmp_path / "source.pt", dest=path, to=to, max_shard_bytes=None if path.suffix else 2000)
        )
    found = ranks.run(load, layout.num_ranks, name, layout.text, str(path))[0]
    assert list(found) == list(state)
    for key, tensor in state.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def saved_by_torch(folder: str) -> dict[str, torch.Tensor]:
    model = plain("conv", 1)
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with sw.init("dp_shard=4", device="cpu"):
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return full


def test_what_four_ranks_saved_with_torch_is_loaded_by_two(ranks, tmp_path):
    state = ranks.run(saved_by_torch, 4, str(tmp_path / "dcp"))[0]
    found = ranks.run(load, 2, "conv", "dp_shard=2", str(tmp_path / "dcp"))[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def loaded_by_torch(folder: str) -> dict[str, torch.Tensor]:
    model = plain("conv", 0)
    with sw.init("dp_shard=2", device="cpu"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()
        }


def test_torch_loads_a_converted_dcp_directory_into_its_shards(ranks, tmp_path):
    state = plain("conv", 1).state_dict()
    torch.save(state, tmp_path / "source.pt")
    convert(Conversion(source=tmp_path / "source.pt", dest=tmp_path / "out", to="dcp", max_shard_bytes=5000))
    found = ranks.run(loaded_by_torch, 2, str(tmp_path / "out"))[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
