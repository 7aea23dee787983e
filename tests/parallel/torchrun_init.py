"""What torchrun's ranks run in a test: models of every kind of initialiser, whose whole values rank 0 writes down; then what else
ranks compare.

Each rank has a hash seed of its own, as ranks have that nobody gave one, and addresses of its own, since none is forked.
"""

import os
import sys
import warnings
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != os.environ["RANK"]:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": os.environ["RANK"]})

import models
import torch
from torch import nn

import shardwise as sw

WORDS = {"query", "key", "value", "gate", "up", "down", "norm", "bias"}


class Seen:
    """Where a run stands, as users keep it."""

    def state_dict(self):
        return {"seen": WORDS, "twice": frozenset({("a", 1), ("b", 2), ("c", 3)})}

    def load_state_dict(self, state):
        assert state == self.state_dict()


class FromASet(nn.Module):
    def __init__(self):
        super().__init__()
        for word in WORDS:
            setattr(self, f"of_{word}", nn.Linear(3, 3))

    def forward(self, x):
        return self.of_key(x)


def loss(output, _batch):
    return output.pow(2).sum()


folder, *names = sys.argv[1:]
found, told = {}, []
with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.manual_seed(world.rank)
    for name in names:
        model = sw.parallelize(models.get(name).build, world)
        told.append(next(note.why for note in sw.recipe_of(model).notes if note.name == "init"))
        found[name] = sw.full_state_dict(model)
    told += [str(warning.message) for warning in caught if str(warning.message).startswith("init: ")]

    model = sw.parallelize(lambda: nn.Linear(4, 4), world)
    group = {"params": list(model.parameters()), "schedule": lambda step: 1.0, "kinds": WORDS, "owner": Seen()}
    step = sw.TrainStep(model, torch.optim.SGD([group], lr=0.1), loss=loss, count=len)
    with sw.CheckpointManager(Path(folder) / "run", step, extra={"seen": Seen()}) as manager:
        del step.optim.param_groups[0]["schedule"], step.optim.param_groups[0]["owner"]  # which no checkpoint holds
        step([{"x": torch.ones(2, 4)}])
        manager.save()
        manager.load()

    errors = []
    for way in (None, "rank0"):
        try:
            sw.parallelize(FromASet, world, init=way)
        except sw.RankError as error:
            errors.append(str(error))
    torch.save((told, found, errors), Path(folder) / f"{world.rank}.pt")
