"""A part of a model is frozen, or unfrozen, in the middle of a run, as the error says that it is done."""

import pytest
import torch
import torch.nn.functional as F
from step.plain import assert_close
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError


def build(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11)).double()
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def batches(turn):
    generator = torch.Generator().manual_seed(turn)
    rows = [torch.randint(0, 11, (2, length), generator=generator) for length in (5, 3, 4, 6)]
    return [{"input": row, "labels": (row * 7 + turn) % 11} for row in rows]


def loss_of(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def adam(model, held):
    """Of all parameters, or of those of some modules."""
    modules = [model] if held is None else [model[index] for index in held]
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.05)


# name -> frozen before, frozen after, the modules that the optimizer is built of (None: all), and that are added to it
CASES = {
    "freeze": ((), (1,), None, ()),
    "unfreeze": ((1,), (), None, ()),
    "freeze the embedding and unfreeze the head": ((4,), (0,), None, ()),
    "gradual, one more each time": ((0, 1), (0,), (3, 4), (1,)),
    "frozen, and the optimizer has them all": ((0, 1), (0, 1, 3), (3, 4), ()),
}


def run(layout, case, directory):
    """Whole parameters after training through the change, and how the change alone is refused."""
    before, after, held, added = CASES[case]
    with sw.init(layout, device="cpu", seed=3, timeout_s=30) as world:
        model = sw.parallelize(build(before), world, sharding=sw.Sharding(min_unit_bytes=0))
        step, refused = sw.TrainStep(model, adam(model, held), loss=loss_of), None
        axis = world.axis("dp")
        for turn in range(5):
            given = batches(turn)[axis.rank :: axis.size]
            if turn == 4:  # in the directory from which the run was resumed, by another manager
                with sw.CheckpointManager(directory, step) as saved:
                    saved.save()
            if turn == 2:
                for index in {*before, *after}:
                    model[index].requires_grad_(index not in after)
                with pytest.raises(UsageError) as caught:
                    step(given)
                refused = str(caught.value)
                with sw.CheckpointManager(directory, step) as saved:
                    saved.save()
                model = sw.parallelize(build(after), world, sharding=sw.Sharding(min_unit_bytes=0))
                step = sw.TrainStep(model, adam(model, held), loss=loss_of)
                with sw.CheckpointManager(directory, step) as saved:
                    saved.load()
                for index in added:
                    step.optim.add_param_group({"params": list(model[index].parameters()), "lr": 0.02})
            step(given)
        return {name: sw.full_tensor(p).detach() for name, p in model.named_parameters()}, refused


def alone(case):
    before, after, held, added = CASES[case]
    model = build(before)
    optim = adam(model, held)
    for turn in range(5):
        if turn == 2:
            for index in {*before, *after}:
                model[index].requires_grad_(index not in after)
            for index in added:
                optim.add_param_group({"params": list(model[index].parameters()), "lr": 0.02})
        given = batches(turn)
        num = sum(batch["labels"].numel() for batch in given)
        (sum(loss_of(model(batch["input"]), batch) for batch in given) / num).backward()
        optim.step()
        optim.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.combinations("values")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2"])
def test_a_run_goes_on_as_one_process_would(ranks, tmp_path, layout, case):
    wanted = alone(case)
    for found, refused in ranks.run(run, 2, layout, case, str(tmp_path)):
        assert_close(found, wanted)
        assert "frozen" in refused.partition("\n")[0]
        assert all(
            words in refused
            for words in ("CheckpointManager(directory, step)", "build the model anew", "add_param_group")
        )


def test_one_rank(tmp_path):
    found, _ = run("dp_shard=1", "unfreeze", str(tmp_path))
    assert_close(found, alone("unfreeze"), 4e-15)
