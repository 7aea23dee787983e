"""What many of the scripts train: the small model of the step's tests, its micro-batches, and what one process makes of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step.plain import batch, build, gradients, mine, plain_backward, sum_loss, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

__all__ = [
    "DDP", "batch", "build", "corpus", "drift", "gradients", "language_model", "mean_loss", "mine", "of_one_process", "params", "plain_backward",
    "sharded", "sum_loss", "train", "values",
]  # fmt: skip

DDP = DistributedDataParallel


def mean_loss(output: Any, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), ignore_index=-100)


def sharded(world: sw.World, make: Callable[[], nn.Module] = build, **options: Any) -> nn.Module:
    """The model in units as small as they come."""
    return sw.parallelize(make(), world, sharding=sw.Sharding(min_unit_bytes=0), **options)


def of_one_process(indices: Iterable[int], make: Callable[[], nn.Module] = build) -> dict[str, Tensor | None]:
    """Gradients of a window of the micro-batches ``indices``."""
    model = make()
    plain_backward(model, [batch(i) for i in indices])
    return {name: param.grad for name, param in model.named_parameters()}


def train(windows: Iterable[list[int]], lr: float = 0.1, make: Callable[[], nn.Module] = build) -> dict[str, Tensor]:
    """Parameters after a step of SGD on each window."""
    model = make()
    optim = torch.optim.SGD(model.parameters(), lr=lr)
    for window in windows:
        plain_backward(model, [batch(i) for i in window])
        optim.step()
        optim.zero_grad()
    return params(model)


def params(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def drift(model: nn.Module) -> float:
    """How far the parameters of rank 1 are from those of rank 0, relative to the largest change possible: the largest element."""
    worst, largest = 0.0, 0.0
    for tensor in model.state_dict().values():
        all_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, tensor.detach().contiguous())
        worst = max(worst, float((all_ranks[1] - all_ranks[0]).abs().max()))
        largest = max(largest, float(all_ranks[0].abs().max()))
    return worst / largest


def language_model(vocab: int = 32, dim: int = 16) -> nn.Module:
    """Logits of each token from the token before."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(vocab, dim), nn.Linear(dim, vocab))


def corpus(num: int = 8, length: int = 13, vocab: int = 32) -> Tensor:
    return torch.randint(1, vocab, (num, length), generator=torch.Generator().manual_seed(5))
