"""Tests what Shardwise relies on in torch: ``python -m shardwise.verify.torch_check``. Two ranks on the CPU, some
seconds.

It checks first that the private names that are used exist, then what they do: the order in which units are gathered
when ranks skip different blocks; parameters that no rank, or only one rank, uses; parameters that stay the objects that
the user has; units of several dtypes. Each is compared with the same in one plain process.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.probes import missing
from shardwise.errors import ShardwiseError
from shardwise.launch import launch_local
from shardwise.parallel import parallelize, runtime_of
from shardwise.parallel.torch_check import RUNS
from shardwise.step.window import window
from shardwise.techniques.data.options import Sharding
from shardwise.techniques.precision.options import Precision
from shardwise.world import World, init

_EXACT, _HALF = 1e-12, 2e-2


class Tried(nn.Module):
    """The test model: blocks, one of which a forward may skip, a layer that it may skip, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3))
        self.rare, self.never = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, skip: int, rare: bool) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != skip:
                x = x + torch.tanh(block(x))
        return self.rare(x) if rare else x


def _build() -> nn.Module:
    torch.manual_seed(0)
    return Tried().double()


def _batch(rank: int, *, skip: int, rare: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2 + rank, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "skip": torch.tensor(skip), "rare": torch.tensor(rare)}


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    x = batch["x"].to(next(model.parameters()).dtype)
    return model(x, int(batch["skip"]), bool(batch["rare"])).double().square().sum()


def _count(batch: Any) -> int:
    return len(batch["x"])


def _trained(world: World, skips: tuple[int, int], rare: tuple[bool, bool], **options: Any) -> tuple[Any, nn.Module]:
    """The sharded and the plain model, each with the gradients of one window of two micro-batches per rank."""
    plain = _build()
    batches = [
        [_batch(rank + 2 * i, skip=skips[rank], rare=rare[rank]) for i in range(2)] for rank in range(world.size)
    ]
    total = sum(_count(batch) for own in batches for batch in own)
    model = parallelize(copy.deepcopy(plain), world, sharding=Sharding(min_unit_bytes=0), **options)
    for own in batches:
        for batch in own:
            (_loss(plain, batch) / total).backward()
    with window(model, batches[world.rank], count=_count) as w:
        for batch in w:
            (_loss(model, dict(batch)) / w.num_tokens).backward()
    return model, plain


def _differences(model: nn.Module, plain: nn.Module, most: float) -> Iterator[str]:
    runtime, wanted = runtime_of(model), dict(plain.named_parameters())
    found = runtime.gradients()
    for name, param in wanted.items():
        if (param.grad is None) != (name not in found):
            yield f"{name} has {'a' if name in found else 'no'} gradient"
            continue
        for piece, local in runtime.parts(name, found[name]) if name in found else ():
            grad = param.grad[piece.full_index]  # type: ignore[index]
            error = float((local.double() - grad).abs().max() / param.grad.abs().max())  # type: ignore[union-attr]
            if not error <= most:
                yield f"the gradient of {name} is {error:.1e} off"


def order(world: World) -> Iterator[str]:
    """Checks gradients when each rank skips a different block."""
    yield from _differences(*_trained(world, (0, 2), (False, False)), _EXACT)


def unused(world: World) -> Iterator[str]:
    """Checks gradients when only one rank uses a layer, and no rank a parameter."""
    yield from _differences(*_trained(world, (9, 9), (True, False)), _EXACT)


def identity(world: World) -> Iterator[str]:
    """Checks that an optimizer's parameters are still the model's after a window and a step, and were updated."""
    model = parallelize(_build(), world, sharding=Sharding(min_unit_bytes=0))
    before = dict(model.named_parameters())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {name: param.detach().clone() for name, param in before.items()}
    with window(model, [_batch(world.rank, skip=9, rare=True)], count=_count) as w:
        for batch in w:
            (_loss(model, dict(batch)) / w.num_tokens).backward()
    optim.step()
    for name, param in model.named_parameters():
        if param is not before[name]:
            yield f"{name} is another object after a window"
        elif name != "never" and torch.equal(param.to_local(), held[name].to_local()):  # type: ignore[operator]
            yield f"{name} was not moved by optim.step()"


def dtypes(world: World) -> Iterator[str]:
    """Checks gradients of units whose norms compute in float32 and whose other layers compute in bfloat16."""
    precision = Precision(storage="float32", compute="bfloat16", reduce="float32", parts={"LayerNorm": "fp32"})
    yield from _differences(*_trained(world, (9, 9), (True, True), precision=precision), _HALF)


CHECKS: tuple[Callable[[World], Iterator[str]], ...] = (order, unused, identity, dtypes)


def on_rank() -> list[str]:
    """Runs all checks on this rank of two; returns what is wrong, as texts."""
    with init("dp_shard=2", device="cpu", timeout_s=60) as world:
        return [f"{check.__name__}: {words}" for check in CHECKS for words in check(world)]


def main() -> int:
    """Runs the checks and prints what is wrong. Returns 0 if nothing is."""
    os.environ[RUNS] = "1"
    absent = missing()
    if absent:
        print(f"missing private names: {', '.join(absent)}")
        return 1
    try:
        found = [words for of_rank in launch_local(f"{__spec__.name}:on_rank", nproc=2) for words in of_rank]
    except ShardwiseError as error:
        found = [str(error)]
    print(
        "\n".join(dict.fromkeys(found))
        or f"torch {torch.__version__}: {', '.join(c.__name__ for c in CHECKS)}: as they should be"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
