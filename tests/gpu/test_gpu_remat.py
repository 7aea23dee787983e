"""Blocks that run again on one CUDA device: the same gradients with dropout drawn there, and memory that goes down.

Collected with `make gpu`; see test_gpu.py.
"""

import pytest
import torch
from torch import nn

import shardwise as sw

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
DIM, NUM_BLOCKS = 512, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.2, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x)  # by keyword: torch looks for devices in positional arguments only
        return x


def step(remat) -> tuple[torch.Tensor, int]:
    """All gradients, and the bytes that forward leaves on the device for backward."""
    with sw.init("dp_shard=1") as world:
        model = sw.parallelize(Model, world, remat=remat)
        x = torch.randn(2048, DIM, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        torch.manual_seed(2)
        before = torch.cuda.memory_allocated()
        loss = model(x).square().sum()
        kept = torch.cuda.memory_allocated() - before
        torch.rand(7, device="cuda")
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu(), kept


@pytest.mark.parametrize("remat", ["full", "selective", sw.Remat(offload=True)])
def test_less_is_kept_and_gradients_stay(remat):
    want, whole = step(None)
    grads, kept = step(remat)
    torch.testing.assert_close(grads, want, rtol=1e-5, atol=1e-5)
    assert kept < whole
    if remat != "selective":
        inputs = 2048 * DIM * 4
        assert kept < (3 if isinstance(remat, sw.Remat) else NUM_BLOCKS + 3) * inputs
