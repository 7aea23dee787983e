"""Traps of dtypes, written as the script that falls into them: what plain PyTorch gives, and what a sharded module gives."""

import pytest
import torch
from torch import nn

from shardwise.parallel import parallelize
from shardwise.step.step import TrainStep
from shardwise.world import init


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def batches(num: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=draw) for _ in range(num)]


def loss_of(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (output.float() - batch).pow(2).mean(1).sum()


def called(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"])


def share_changed(before: list[torch.Tensor], model: nn.Module) -> float:
    after = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    changed = sum(int((a.float() != b.float()).sum()) for a, b in zip(after, before, strict=True))
    return changed / sum(b.numel() for b in before)


def t_bf16_master_plain() -> float:
    model = build().bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optim = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    for batch in batches(10):
        loss_of(model(batch.bfloat16()), batch).backward()
        optim.step()
        optim.zero_grad()
    return share_changed(before, model)


def t_bf16_master(layout: str) -> tuple[float, set[torch.dtype], set[torch.dtype]]:
    with init(layout, device="cpu", timeout_s=20) as world:
        module, seen = build(), set()
        before = [p.detach().clone() for p in module.parameters()]
        model = parallelize(module, world, precision="bf16")
        model[2].register_forward_pre_hook(lambda _module, args: seen.add(args[0].dtype))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        step = TrainStep(
            model, optim, loss=lambda y, b: loss_of(y, b["x"]), count=lambda b: len(b["x"]), forward=called
        )
        for batch in batches(10):
            step([{"x": batch.chunk(world.size)[world.rank]}])
        moments = {value.dtype for state in optim.state.values() for value in state.values() if value.dim()}
        return share_changed(before, model), seen, moments


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_replicate=2", "dp_shard=2"])
def test_t_bf16_master(ranks, layout):
    """A module cast to bf16 keeps most of its weights where they are: a step of 1e-5 is less than half of their last bit."""
    assert t_bf16_master_plain() < 0.2
    for changed, computed, moments in ranks.run(t_bf16_master, 1 if layout.endswith("1") else 2, layout):
        assert changed > 0.95
        assert computed == {torch.bfloat16} and moments == {torch.float32}
