"""What the step's tests compare with: one plain process, none of the library's code; and small tools for ranks."""

from collections.abc import Callable
from typing import Any

from models.tied import batch, build, sum_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw


def shard(
    layout: str,
    *,
    engine: str | None = None,
    build: Callable[[], nn.Module] = build,
    buffers: Any = "rank0",
    **options: Any,
) -> Any:
    """``(world, model)`` on this rank's part of ``layout``, in units as small as they come."""
    world = sw.init(layout, device="cpu", timeout_s=20)
    sharding = sw.Sharding(min_unit_bytes=0, buffers=buffers, **({"engine": engine} if engine else {}))
    return world, sw.parallelize(build(), world, sharding=sharding, **options)


def mine(batches: list[Any], world: Any) -> list[Any]:
    """This rank's micro-batches of a window."""
    axis = world.axis("dp")
    return batches[axis.rank :: axis.size]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name; every rank gets them."""
    return {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p) for n, p in model.named_parameters()}


def plain_backward(model: nn.Module, batches: list[Any], loss: Callable = sum_loss) -> float:
    """One window in one process: gradients of the sum over all tokens, divided by their number. Returns the loss."""
    num = max(1, sum(int((b["labels"] != -100).sum()) for b in batches))
    total = 0.0
    for b in batches:
        value = loss(model(b["input_ids"]), b) / num
        value.backward()
        total += float(value.detach())
    return total


def assert_close(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    """Each tensor within ``tolerance`` of the largest element, relatively; None only where None is wanted."""
    assert got.keys() == wanted.keys()
    scale = max(float(t.abs().max()) for t in wanted.values() if t is not None and t.numel())
    for name, other in wanted.items():
        mine_ = got[name]
        assert (mine_ is None) == (other is None), f"{name}: {mine_} instead of {other}"
        if other is not None and mine_ is not None and other.numel():
            error = float((mine_ - other).abs().max()) / max(float(other.abs().max()), 1e-6 * scale, 1e-300)
            assert error <= tolerance, f"{name}: off by {error:.3g}"


__all__ = [
    "assert_close", "batch", "build", "gradients", "mine", "plain_backward", "shard", "sum_loss",
    "values", "whole",
]  # fmt: skip
