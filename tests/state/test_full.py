"""Whole state on rank 0: bit-exact from any layout, nothing elsewhere; files that stock tools open."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from layouts import KINDS, every_layout
from models.zoo import ConvNet, Odd
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.state import check_dtypes, save_weights, weights_bytes

MODELS = {"odd": Odd, "conv": ConvNet}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().to(torch.bfloat16 if name == "odd" else torch.float32)


def full(name, layout, trainable_only=False):
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(world.rank + 1)
        module = build(name) if world.rank == 0 else MODELS[name]().to(next(build(name).parameters()).dtype)
        model = sw.parallelize(module, world, sharding=sw.Sharding(min_unit_bytes=0))
        return sw.full_state_dict(model, trainable_only=trainable_only)


@pytest.mark.quick("odd-fsdp-2", "odd-hsdp-2x2", "conv-ddp-2")
@every_layout(*KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_full_state_is_rank_0s_to_the_last_bit_and_nothing_elsewhere(ranks, name, layout):
    first, *others = ranks.run(full, layout.num_ranks, name, layout.text)
    expected = build(name).state_dict()
    assert list(first) == list(expected)
    for key, value in expected.items():
        assert first[key].dtype == value.dtype and torch.equal(first[key], value), key
    assert all(other == {} for other in others)
    if name == "odd":
        assert first["head.weight"] is first["embed.weight"]


def test_trainable_only_leaves_out_frozen_parameters_and_buffers(ranks):
    state = ranks.run(full, 2, "odd", "dp_shard=2", True)[0]
    assert "frozen.weight" not in state and "embed.weight" in state
    assert "stages.0.1.running_mean" not in ranks.run(full, 2, "conv", "dp_shard=2", True)[0]


def save(name, layout, dest):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build(name), world, sharding=sw.Sharding(min_unit_bytes=0))
        try:
            save_weights(model, dest)
            return weights_bytes(model)
        except sw.CheckpointError as error:
            return error


@pytest.mark.parametrize("name", MODELS)
def test_saved_weights_open_with_safetensors_and_ties_are_stored_once(ranks, name, tmp_path):
    foretold = ranks.run(save, 2, name, "dp_shard=2", str(tmp_path / "w"))
    stored = load_file(tmp_path / "w" / "model.safetensors")
    expected = build(name).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in stored.items())
    assert set(expected) - set(stored) == ({"head.weight", "blocks.1.shared.weight", "blocks.1.shared.bias",
        "blocks.2.shared.weight", "blocks.2.shared.bias"} if name == "odd" else set())  # fmt: skip
    assert os.listdir(tmp_path / "w") == ["model.safetensors"]
    tensors = sum(value.numel() * value.element_size() for value in stored.values())
    assert tensors < (tmp_path / "w" / "model.safetensors").stat().st_size <= foretold[0] == foretold[1]
    assert foretold[0] < tensors + 300 * len(stored)


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank_and_keeps_the_old_file(ranks, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for error in ranks.run(save, 2, "conv", "dp_shard=2", str(tmp_path / "file" / "w")):
        assert isinstance(error, sw.CheckpointError) and f"{tmp_path / 'file'} is a file" in error.why
    assert Path(tmp_path / "file").read_text() == "not a directory"


def save_under_umask(umask, dest):
    before = os.umask(umask)
    try:
        save("odd", "dp_shard=2", dest)
    finally:
        os.umask(before)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_umask_decides_who_may_read_weights(ranks, tmp_path, umask, mode):
    ranks.run(save_under_umask, 2, umask, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


class Wave(nn.Module):
    """Complex128, which safetensors does not know."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, 3, dtype=torch.complex128))


def save_wave(dest):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Wave(), world)
        refusals = []
        for call in (lambda: save_weights(model, dest), lambda: check_dtypes(model)):
            try:
                call()
            except sw.UnsupportedError as error:
                refusals.append((error.name, error.given))
        return refusals, sw.full_state_dict(model)


def test_a_dtype_that_safetensors_does_not_know_is_refused_by_name_on_every_rank(ranks, tmp_path):
    for refusals, state in ranks.run(save_wave, 2, str(tmp_path / "w")):
        assert refusals == [("phase", "weights with a tensor of complex128")] * 2
        assert not state or state["phase"].dtype == torch.complex128
    assert not (tmp_path / "w").exists()


class Scaled(nn.Module):
    """Modules with states of their own, as Transformer Engine's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Counted(), Counted()
        self.tied = self.a
        self.b.history = None

    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state):
        self.epoch = state["epoch"]


class Counted(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros(2))
        self.history = [1, 2]

    def get_extra_state(self):
        return self.history

    def set_extra_state(self, state):
        self.history = state


def save_scaled(dest):
    with sw.init("dp_shard=2", device="cpu") as world:
        torch.manual_seed(0)
        model = sw.parallelize(Scaled(), world, sharding=sw.Sharding(min_unit_bytes=0))
        if world.rank:
            model.a.history = ["of rank 1"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save_weights(model, dest)
        return (
            sw.full_state_dict(model),
            sw.full_state_dict(model, trainable_only=True),
            [str(w.message) for w in caught],
        )


def test_extra_states_of_modules_are_in_the_full_state_and_left_out_of_weights_by_name(ranks, tmp_path):
    (state, trainable, told), (other, _, silent) = ranks.run(save_scaled, 2, str(tmp_path))
    torch.manual_seed(0)
    plain = Scaled()
    assert list(state) == list(plain.state_dict()) and other == {} and silent == []
    assert state["_extra_state"] == {"epoch": 3} and state["tied._extra_state"] == [1, 2]
    assert not any("extra" in name for name in trainable)
    plain.load_state_dict(state)
    assert len(told) == 1 and told[0].startswith("weights without _extra_state, a._extra_state, tied._extra_state:")
    assert sorted(load_file(tmp_path / "model.safetensors")) == [
        f"{name}.{attr}" for name in "ab" for attr in ("bias", "count", "weight")
    ]


def load_with_torchs_own(layout):
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(1)
        plain = ConvNet()
        model = sw.parallelize(build("conv"), world, sharding=sw.Sharding(min_unit_bytes=0))
        before = sw.full_state_dict(model)
        model.load_state_dict(model.state_dict())  # its own, of shards
        try:
            model.load_state_dict(plain.state_dict())
        except sw.UsageError as error:
            after = sw.full_state_dict(model)
            return error, all(torch.equal(after[name], before[name]) for name in before)
        return None, all(torch.equal(t, plain.state_dict()[n]) for n, t in sw.full_state_dict(model).items())


def test_whole_tensors_given_to_torchs_own_load_state_dict_are_refused_with_what_to_call(ranks):
    for error, same in ranks.run(load_with_torchs_own, 2, "dp_shard=2"):
        assert isinstance(error, sw.UsageError) and same
        assert error.name == "stages.0.0.weight" and "sw.load_full_state_dict(model, state)" in error.fix
    for error, same in ranks.run(load_with_torchs_own, 2, "dp_replicate=2"):
        assert error is None and same  # replicas are plain tensors: torch's own call does it
