"""What the ranks send in a window does not grow with its micro-batches, where what is gathered is kept between them."""

from typing import Any

import models
import pytest
import torch

import shardwise as sw
from shardwise.run.device_use import _CollectiveBytes
from shardwise.verify.sharded import share_of

REFERENCE = models.get("reference")


def bytes_of_windows(layout: str, options: dict[str, Any]) -> tuple[int, list[int]]:
    """Bytes of the model, and of collectives of a window of 1 and of one of 4 micro-batches, the second of each size."""
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = sw.parallelize(REFERENCE.build(), world, **options)
        step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0)
        found = []
        for num in (1, 4):
            for batches in REFERENCE.windows(4, num * world.axis("dp").size):
                with _CollectiveBytes() as counter:
                    step(share_of(batches, world))
            found.append(counter.num_bytes)
        size = sum(p.shape.numel() * p.element_size() for p in model.parameters())
        return size, found


@pytest.mark.quick("ddp", "bf16")
@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp_replicate=2", {}), ("dp_shard=2", {}), ("dp_shard=2", {"precision": "bf16"})],
    ids=["ddp", "fsdp2", "bf16"],
)
def test_four_micro_batches_send_what_one_sends(ranks, layout, options):
    for size, (one, four) in ranks.run(bytes_of_windows, 2, layout, options):
        assert four <= 1.01 * one
        assert one >= size


WRITES: dict[str, Any] = {
    "in place": lambda param: param.mul_(1.5),
    "data": lambda param: param.data.mul_(1.5),
    "list": lambda param: torch._foreach_mul_([param], 1.5),
}


def writing(how: str) -> list[float]:
    """Losses of steps whose forward writes a parameter before each micro-batch."""
    torch.manual_seed(0)
    with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
        model = sw.parallelize(REFERENCE.build().double(), world)
        first = next(model.parameters())

        def forward(model: Any, batch: Any) -> Any:
            with torch.no_grad():
                WRITES[how](first)
            return model(batch["input_ids"])

        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward=forward)
        return [step(share_of(batches, world)).loss for batches in REFERENCE.windows(2, 2 * world.size)]


@pytest.mark.parametrize("how", WRITES)
def test_parameters_that_a_forward_writes_are_gathered_again(ranks, how):
    torch.manual_seed(0)
    plain, losses = REFERENCE.build().double(), []
    optim = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for batches in REFERENCE.windows(2, 4):
        total = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        losses.append(0.0)
        for i, batch in enumerate(batches):
            if i % 2 == 0:  # two ranks run two micro-batches at a time
                with torch.no_grad():
                    next(plain.parameters()).mul_(1.5)
            loss = sw.next_token_loss(plain(batch["input_ids"]), batch) / total
            loss.backward()
            losses[-1] += float(loss.detach())
        optim.step()
        optim.zero_grad()
    for found in ranks.run(writing, 2, how):
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=0)
