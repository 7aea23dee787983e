"""Tensors of a module: names, ties, what is trained, what is stored."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import canonical_name, module_state, read_anatomy


def test_a_tie_is_one_tensor_with_all_its_names():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "a": shared, "b": shared})
    model["head"].weight = model["embed"].weight
    model["c"] = nn.Linear(3, 3)
    model["c"].weight = shared.weight
    params = read_anatomy(model).params
    assert list(params) == ["embed.weight", "a.weight", "a.bias", "c.bias"]
    assert params["embed.weight"].aliases == ("head.weight",)
    assert params["a.weight"].aliases == ("b.weight", "c.weight")
    assert params["a.bias"].aliases == ("b.bias",)


def test_parameters_directly_on_containers_and_on_the_root():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.listed = nn.ParameterList([torch.ones(2), torch.ones(3)])
            self.keyed = nn.ParameterDict({"a": torch.ones(1, 2)})
            self.absent = None
            self.register_parameter("none", None)

    params = read_anatomy(Root()).params
    assert {name: fact.shape for name, fact in params.items()} == {
        "scale": (), "listed.0": (2,), "listed.1": (3,), "keyed.a": (1, 2)
    }  # fmt: skip
    assert params["scale"].numel == 1


def test_frozen_and_mixed_dtypes_are_noted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False))
    model[0].bias.requires_grad_(False)
    params = read_anatomy(model).params
    assert {name: (fact.dtype, fact.trainable) for name, fact in params.items()} == {
        "0.weight": ("float32", True),
        "0.bias": ("float32", False),
        "1.weight": ("bfloat16", False),
        "1.bias": ("bfloat16", False),
    }


def test_buffers_persistent_or_not_and_tied():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Identity())
    model[1].register_buffer("table", torch.zeros(2), persistent=False)
    model[1].register_buffer("mean", model[0].running_mean)
    model[1].register_buffer("none", None)
    buffers = read_anatomy(model).buffers
    assert {name: (fact.dtype, fact.persistent, fact.trainable) for name, fact in buffers.items()} == {
        "0.running_mean": ("float32", True, False),
        "0.running_var": ("float32", True, False),
        "0.num_batches_tracked": ("int64", True, False),
        "1.table": ("float32", False, False),
    }
    assert buffers["0.running_mean"].aliases == ("1.mean",)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d()])
def test_lazy_modules_are_refused_by_name(lazy):
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"late": lazy}))
    with pytest.raises(UnsupportedError, match="a lazy Lazy") as caught:
        read_anatomy(model)
    assert caught.value.name == ("1.late.weight")


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch.jit, as torch.compile loads it
def test_names_are_the_same_through_wrappers_and_back():
    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    wrapped = torch.compile(inner)
    run_time = [name for name, _ in wrapped.named_parameters()]
    assert run_time[2] == "_orig_mod.1._checkpoint_wrapped_module.0.weight"
    assert [canonical_name(wrapped, name) for name in run_time] == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert list(read_anatomy(wrapped).params) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


def test_a_module_that_holds_itself_is_read_once():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    assert list(read_anatomy(model).params) == ["0.weight", "0.bias"]


def test_reading_on_meta_makes_no_tensor_and_changes_nothing():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(64)))  # 4 GiB, were it real
    before = [id(p) for p in model.parameters()]
    found = read_anatomy(model)
    assert [id(p) for p in model.parameters()] == before
    assert found.params["3.weight"].shape == (4096, 4096) and len(found.lists[0].blocks) == 64


class Keeps(nn.Module):
    """Keeps what it has computed, in itself and in its class."""

    tables: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.up, self.notes = nn.Linear(4, 4), {}

    def forward(self, x):
        self.h = self.notes["h"] = self.up(x)
        self.tables["mean"] = self.h.mean()
        self.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            self.up.weight.mul_(0.5)
            self.up.weight.data.sub_(1.0)
            self.up.bias = nn.Parameter(self.up.bias + 1.0)
        return self.h


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_run_of_the_example_leaves_nothing_behind(device):
    """Other ranks would wait for values that one has kept; and training would start with them."""
    module = Keeps().to(device)
    before = [(param, param.detach().clone()) for param in module.parameters()]
    read_anatomy(module, example={"x": torch.ones(2, 4)})
    assert not hasattr(module, "h")
    for param, (same, values) in zip(module.parameters(), before, strict=True):
        assert param is same and (device == "meta" or torch.equal(param, values))
    assert not (module.notes or Keeps.tables or module._forward_hooks)


def test_parameters_that_are_too_large_to_copy_and_that_the_example_writes_are_refused(monkeypatch):
    monkeypatch.setattr(module_state, "_LARGEST", 16)
    with pytest.raises(UsageError, match="a model whose forward writes its parameters"):
        read_anatomy(Keeps(), example={"x": torch.ones(2, 4)})
    read_anatomy(nn.Linear(4, 4), example={"input": torch.ones(2, 4)})
