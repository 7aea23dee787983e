"""State in attributes of modules without a buffer counts the forwards that count: not trials of the loss, nor skipped steps."""

import pytest
import torch
from torch import nn

import shardwise as sw


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.number, self.tensor, self.listed = 0, torch.zeros(()), []

    def forward(self, x, y):
        self.number += 1
        self.tensor += 1
        self.listed.append(1)
        return (self.layer(x).sum(1) - y).square().mean()

    def counts(self):
        return self.number, int(self.tensor), len(self.listed)


@pytest.mark.parametrize("how", ["a loss that is tried", "a model's own loss", "a skipped step"])
def test_trials_and_skipped_steps_are_not_counted(how):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Counts(), world)
        is_own = how == "a model's own loss"
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=sw.model_loss if is_own else None,
            count=lambda batch: len(batch["x"]),
            forward=lambda m, batch: m(batch["x"], batch["y"]) * (1 if is_own else len(batch["x"])),
            on_nonfinite="skip",
        )
        for _ in range(2):
            step([{"x": torch.randn(3, 4), "y": torch.randn(3)} for _ in range(2)])
        assert model.counts() == (4, 4, 4)
        if how == "a skipped step":
            assert step([{"x": torch.full((3, 4), torch.nan), "y": torch.randn(3)}]).skipped
            assert model.counts() == (4, 4, 4)
