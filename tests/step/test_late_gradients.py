"""Gradients that come after those of their bucket were sent: a step of replicas counts them in the norm, and steps with them."""

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.verify.sharded import share_of

REFERENCE = models.get("reference")
NUM_STEPS, NUM_MICRO = 3, 2
ONE_BY_ONE = {"ddp": sw.DDP(bucket_cap_mb=0.001)}


def early(model: nn.Module, batch: Any) -> None:
    """A backward before that of the loss, so that each gradient of the loss is late."""
    (0.01 * sw.next_token_loss(model(batch["input_ids"].flip(0)), batch)).backward()


def is_late(batch: Any, where: str) -> bool:
    return where == "all" or batch["number"] == 3


def windows() -> list[list[dict[str, Any]]]:
    """The micro-batches of each step, in the order of one process: those of two data-parallel ranks alternate."""
    found = REFERENCE.windows(NUM_STEPS, NUM_MICRO * 2)
    return [[{**batch, "number": i} for i, batch in enumerate(batches)] for batches in found]


def in_one_process(where: str) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = REFERENCE.build().double()
    optim, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batches in windows():
        num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        for batch in batches:
            if is_late(batch, where):
                early(model, batch)
            (sw.next_token_loss(model(batch["input_ids"]), batch) / num_tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optim.step()
        optim.zero_grad()
    return norms, [param.detach() for param in model.parameters()]


def of_replicas(layout: str, where: str, parallel: dict[str, Any]) -> tuple[list[float], list[Tensor], int]:
    torch.manual_seed(0)
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = sw.parallelize(REFERENCE.build().double(), world, **parallel)

        def forward(model: nn.Module, batch: Any) -> Tensor:
            if is_late(batch, where):
                early(model, batch)
            return model(batch["input_ids"])

        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=forward, max_grad_norm=0.3)
        norms, before = [], world.agreement.num_exchanges
        for batches in windows():
            norms.append(step(share_of(batches, world)).grad_norm)
        num_exchanges = world.agreement.num_exchanges - before
        whole = sw.full_state_dict(model)  # of rank 0
        return norms, [whole[name] for name, _ in model.named_parameters() if whole], num_exchanges


@pytest.mark.quick("dp_replicate=2-*", "dp_replicate=2,tp=2-all-parallel3")
@pytest.mark.parametrize(
    ("layout", "where", "parallel"),
    [
        ("dp_replicate=2", "all", {}),
        ("dp_replicate=2", "all", ONE_BY_ONE),
        ("dp_replicate=2", "one rank", ONE_BY_ONE),
        ("dp_replicate=2,tp=2", "all", ONE_BY_ONE),
        ("dp_replicate=2,tp=2", "one rank", ONE_BY_ONE),
    ],
)
def test_late_gradients_count_in_the_norm_and_the_step(ranks, layout, where, parallel):
    norms, params = in_one_process(where)
    for found_norms, found, num_exchanges in ranks.run(
        of_replicas, 4 if "tp" in layout else 2, layout, where, parallel
    ):
        torch.testing.assert_close(found_norms, norms, rtol=1e-10, atol=0)
        for ours, plain in zip(found, params, strict=bool(found)):
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)
        # A third exchange for the norm, only where there is such a gradient.
        assert (num_exchanges > 2 * NUM_STEPS) == (parallel is ONE_BY_ONE)
