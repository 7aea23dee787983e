"""What the first code wrote can be read by the code there is: checkpoints under other layouts, exports, a file of torch's."""

import shutil

import pytest
import torch
from layouts import LAYOUTS
from state.kept_files import KEPT, RUNS, SAVED_AT, UNTIL, digests, expected
from state.runs import make, run

import shardwise as sw
from shardwise.cli.main import main


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-4"])
@pytest.mark.parametrize("kept", RUNS)
def test_a_kept_checkpoint_resumes_under_another_layout(ranks, tmp_path, kept, layout):
    shutil.copytree(KEPT / kept, tmp_path / "run")
    words, num_ranks, _ = LAYOUTS[layout]
    found = ranks.run(run, num_ranks, words, tmp_path / "run", UNTIL, async_save=False)[0]
    told = expected(kept)
    assert found["began"] == SAVED_AT
    assert digests(found["first"]) == told["at the save"]
    assert found["samples"] == told["samples"] and len(found["samples"]) == UNTIL - SAVED_AT
    for figures, before in zip(found["figures"], told["figures"], strict=True):
        assert figures == pytest.approx(tuple(before), rel=1e-10)


def test_a_kept_checkpoint_resumes_under_its_own_layout_with_its_random_numbers(ranks, tmp_path):
    shutil.copytree(KEPT / "fsdp-3", tmp_path / "run")
    found = ranks.run(run, 3, "dp_shard=3", tmp_path / "run", UNTIL, async_save=False)[0]
    assert found["warnings"] == []
    assert [list(draw) for draw in found["draws"]] == expected("fsdp-3")["draws"]


@pytest.mark.parametrize("kept", RUNS)
def test_the_command_verifies_a_kept_checkpoint(tmp_path, capsys, kept):
    shutil.copytree(KEPT / kept, tmp_path / "run")
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    damaged = tmp_path / "run" / f"step-{SAVED_AT:08}" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 1
    capsys.readouterr()


def _read(layout: str, how: str) -> tuple:
    world, model, step = make(layout, torch.float32)
    with world:
        if how == "whole.pt":
            held = torch.load(KEPT / "export" / how, weights_only=True)
            # Their owner gives them on rank 0, and nothing elsewhere.
            sw.load_full_state_dict(model, held["model"] if world.is_main else {})
            sw.load_full_optimizer_state_dict(model, step.optim, held["optimizer"] if world.is_main else {})
        else:
            sw.load_weights(model, KEPT / "export" / how, cast=how == "rounded")
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, step.optim)


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", ["one", "fsdp-2", "hsdp-2x2"])
@pytest.mark.parametrize("how", ["weights", "rounded", "whole.pt"])
def test_a_kept_export_is_read(ranks, layout, how):
    words, num_ranks, _ = LAYOUTS[layout]
    model, optimizer = ranks.run(_read, num_ranks, words, how)[0]
    told = expected("export")
    if how == "rounded":
        exact = ranks.run(_read, num_ranks, words, "weights")[0][0]
        for name, tensor in exact.items():
            rounded = tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
            assert torch.equal(model[name], rounded), name
        return
    assert digests(model) == told["model"]
    if how == "whole.pt":
        assert digests(optimizer) == told["optimizer"]
