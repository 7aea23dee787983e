"""What a run keeps beside its weights: each of it comes back, as it was when save was called, and nothing of another's."""

import copy
import json
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from state.runs import EVERY, equal, make, state
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.state.checkpoint.fault_points import on_reach
from shardwise.state.checkpoint.restore import restore


class Running(nn.Module):
    """Weights in bfloat16; beside them statistics in float32 and int64, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 6, dtype=torch.bfloat16), nn.BatchNorm1d(6)
        self.scale, self.seen = nn.Parameter(torch.ones(6, dtype=torch.bfloat16)), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.norm(self.lin(x.bfloat16()).float()) * self.scale.float()

    def get_extra_state(self) -> dict:
        return {"seen": self.seen}

    def set_extra_state(self, given: dict) -> None:
        self.seen = given["seen"]


def weighted(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out * batch["weight"]).square().sum()


def windows(weight: float = 1.0) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(3, 4), "weight": torch.tensor(weight)}]


def running(world) -> sw.TrainStep:
    torch.manual_seed(0)
    model = sw.parallelize(Running(), world, sharding=EVERY)
    optim = torch.optim.SGD([{"params": list(model.parameters()), "marks": [1, {"a": [2]}]}], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    return sw.TrainStep(model, optim, loss=weighted, count=lambda batch: 1, scaler=scaler)


def kept(step: sw.TrainStep) -> dict:
    """A copy of all of it, with what one rank alone does not show."""
    buffers = {name: value.clone() for name, value in step.model.named_buffers()}
    return copy.deepcopy((*state(step.model, step.optim), buffers, step.state_dict(), step.model.seen))


def saved_while_it_goes_on(root: str) -> tuple:
    """Saves in the background, and changes everything before any of it is written; what there was, and what came back."""
    may_write = threading.Event()
    on_reach(lambda point: point != "begun" or may_write.wait(30) or None)
    try:
        with sw.init("dp_shard=2", device="cpu") as world:
            step = running(world)
            with sw.CheckpointManager(root, step) as manager:
                for weight in (1.0, 1.0, 1e20, 1.0):  # the third overflows in float32, and is skipped
                    step(windows(weight))
                before = kept(step)
                manager.save()
                for _ in range(3):
                    step(windows())
                step.optim.param_groups[0]["marks"][1]["a"].append(3)
                after = kept(step)
                may_write.set()
                manager.wait()
            fresh = running(world)
            with sw.CheckpointManager(root, fresh) as manager:
                assert manager.load() == 4
            found = kept(fresh)
            return before, after, found
    finally:
        may_write.set()
        on_reach(None)


def test_statistics_scaler_counts_and_settings_come_back_as_they_were_at_the_save(ranks, tmp_path):
    for before, after, found in ranks.run(saved_while_it_goes_on, 2, str(tmp_path)):
        _, _, buffers, step, seen = before
        assert equal(found, before)
        # Each of it had moved from where it began, and has moved on since.
        # What the skipped step has noted went back with the statistics that it had written.
        assert step["num_skipped"] == 1 and step["scaler"]["scale"] == 32.0 and seen[1:] == [3] * 3
        assert {str(value.dtype) for value in buffers.values()} == {"torch.float32", "torch.int64"}
        assert not any(torch.equal(value, after[2][name]) for name, value in buffers.items())
        assert after[3]["scaler"]["scale"] == 64.0 and len(after[4]) == 7
        for optim, marks in ((before[1], [1, {"a": [2]}]), (after[1], [1, {"a": [2, 3]}])):
            assert [group["marks"] for group in optim.get("param_groups", ())] in ([marks], [])  # [] but on rank 0


def apart(root: str) -> tuple:
    """Two checkpoints of one step, each for one rank alone; what restoring says, and whether the run is as it was."""
    world, model, step = make("dp_shard=2")
    with world:
        for name in ("0", "1"):
            with sw.CheckpointManager(f"{root}/{name}", step, async_save=False) as manager:
                manager.save()
            for value in runtime_of(model).local_tensors().values():
                value.add_(1)
        before, told = state(model, step.optim), None
        try:
            restore(Path(root, str(world.rank), "step-00000000"), model, step.optim, {})
        except sw.CheckpointError as error:
            told = str(error)
        return told, equal(before, state(model, step.optim))


def test_ranks_that_see_different_checkpoints_under_one_name_all_refuse(ranks, tmp_path):
    for told, unchanged in ranks.run(apart, 2, str(tmp_path)):
        assert told is not None and "ranks see different ones under this name" in told and unchanged


def damaged_for_one(root: str) -> tuple:
    """Two checkpoints, the newer with a byte changed that rank 1 alone reads; what loading each says and leaves."""
    world, model, step = make("dp_shard=2", dim=600)
    values, own = runtime_of(model).local_tensors(), {}
    with world, sw.CheckpointManager(root, step, async_save=False) as manager:
        for number in (1, 2):
            step._runtime.step = number
            manager.save()
            own[number] = {name: value.clone() for name, value in values.items()}
            for value in values.values():
                value.add_(1)
        if world.is_main:
            path = Path(root, "step-00000002", "model.safetensors")
            content = bytearray(path.read_bytes())
            size = int.from_bytes(content[:8], "little")
            begin, end = json.loads(content[8 : 8 + size])["blocks.1.lin.weight"]["data_offsets"]
            content[8 + size + begin + (end - begin) * 3 // 4] ^= 1  # far from what rank 0 reads, by whole blocks
            path.write_bytes(content)
        world.barrier()
        before, told = {name: value.clone() for name, value in values.items()}, None
        try:
            manager.load(2)
        except sw.CheckpointError as error:
            told = str(error)
        unchanged = equal(dict(values), before)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            return told, unchanged, manager.load(), equal(dict(values), own[1])


def test_damage_that_one_rank_alone_reads_is_damage_to_all_before_anything_changes(ranks, tmp_path):
    for told, *rest in ranks.run(damaged_for_one, 2, str(tmp_path)):
        assert told is not None and "(on rank 1)" in told and "not what was written there" in told
        assert rest == [True, 1, True]


def within_a_window(root: str) -> tuple:
    """What saving within a window says, and what stands there after a save behind it."""
    with sw.init("dp_shard=2", device="cpu") as world:
        step, told = running(world), ""
        with sw.CheckpointManager(root, step) as manager:
            with sw.window(step.model, windows(), count=lambda batch: 1) as window:
                for batch in window:
                    weighted(step.model(batch["x"]), batch).backward()
                    try:
                        manager.save()
                    except sw.UsageError as error:
                        told = str(error)
            step.optim.zero_grad()
            manager.save()
        return told, [path.name for path in Path(root).glob("step-*")]


def test_a_save_within_a_window_is_refused_and_behind_it_done(ranks, tmp_path):
    for told, names in ranks.run(within_a_window, 2, str(tmp_path)):
        assert "in the middle of a window" in told and names == ["step-00000001"]


# ---- which stay -----------------------------------------------------------------------------------------------------


def saved_beside_damage(root: str, how: str) -> list[list[int]]:
    """The steps that stand there after the third save and the fourth, of which two are kept; the second is damaged."""
    world, _, step = make("dp_shard=2")
    found = []
    with world, sw.CheckpointManager(root, step, keep=2, async_save=False) as manager:
        for number in (1, 2, 3, 4):
            step._runtime.step = number
            manager.save()
            folder = Path(root, "step-00000002")
            if number == 2 and world.is_main:
                os.truncate(folder / "model.safetensors", 100) if how == "short" else os.unlink(
                    folder / "manifest.json"
                )
            world.barrier()
            found.append(sorted(int(path.name[5:]) for path in Path(root).glob("step-*")))
            world.barrier()
    return found[2:]


@pytest.mark.parametrize("how", ["short", "no manifest"])
def test_a_checkpoint_that_is_not_whole_takes_the_place_of_none_that_is(ranks, tmp_path, how):
    third, fourth = ranks.run(saved_beside_damage, 2, str(tmp_path), how)[0]
    assert third == [1, 2, 3]  # two of them are whole
    assert fourth == [3, 4]
