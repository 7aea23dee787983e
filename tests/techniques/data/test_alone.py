"""dp_shard=1 in mixed precision: parameters are cast once for a step and gradients are not copied, with the bits that FSDP2's own
collectives over one rank give."""

from collections import Counter
from typing import Any
from unittest import mock

import models
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise._torch import fsdp2
from shardwise.parallel import runtime_of
from shardwise.verify.sharded import share_of

BLOCKS = sw.Sharding(min_unit_bytes=0)
PRECISIONS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "reduced in bf16": sw.Precision(compute="bf16", reduce="bf16"),
    "a part in fp32": sw.Precision(compute="bf16", parts={"head": "fp32"}),
}
OPTIONS: dict[str, Any] = {
    "one unit": {"sharding": sw.Sharding()},
    "blocks": {"sharding": BLOCKS},
    "blocks recomputed": {"sharding": BLOCKS, "remat": "full"},
    "each micro-batch reduced": {"sharding": sw.Sharding(min_unit_bytes=0, sync_every_microbatch=True)},
}


def bits(layout: str, case: str, precision: Any, options: Any, own: bool, num: int = 3) -> dict[str, Any]:
    """What three windows of two micro-batches come to, with casts of ours or with FSDP2's collectives."""
    torch.manual_seed(0)
    given = models.get(case)
    found: dict[str, Any] = {}
    theirs = mock.patch.object(fsdp2, "_is_whole", lambda group: False)
    with sw.init(layout, device="cpu", timeout_s=30) as world, theirs if not own else mock.MagicMock():
        model = sw.parallelize(given.build(), world, precision=PRECISIONS[precision], **OPTIONS[options])
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = sw.TrainStep(model, optim, loss=given.loss, forward=given.forward, max_grad_norm=1.0)
        for i, batches in enumerate(given.windows(num, 2 * world.size)):
            out = step(share_of(batches, world))
            found[f"loss {i}"], found[f"norm {i}"] = out.loss, out.grad_norm
        with sw.window(model, share_of(batches, world)) as w:
            for batch in w:
                (given.loss(given.forward(model, batch), batch) / w.num_tokens).backward()
        for name, param in runtime_of(model).parameters.items():
            found[name] = _local(param.detach()).tolist()
            found[f"gradient of {name}"] = None if param.grad is None else _local(param.grad).tolist()
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.quick("dp_replicate=2-branches", "dp_shard=1-experts")
@pytest.mark.parametrize("case", ["experts", "branches", "llama"])
@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_replicate=2"])
def test_numbers_are_those_of_collectives_over_one_rank(ranks, layout, case):
    size = 1 if layout == "dp_shard=1" else 2
    ours, theirs = (ranks.run(bits, size, layout, case, "bf16", "blocks", own) for own in (True, False))
    assert ours == theirs


@pytest.mark.quick("bf16-one unit", "a part in fp32-each micro-batch reduced")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_option_gives_the_same_numbers(ranks, precision, options):
    ours, theirs = (ranks.run(bits, 1, "dp_shard=1", "reference", precision, options, own) for own in (True, False))
    assert ours == theirs


class Copies(TorchDispatchMode):
    """Counts elements that are copied, or cast, by operator."""

    NAMES = (
        "_foreach_copy_",
        "copy_",
        "_to_copy",
        "chunk_cat",
        "all_gather_copy_in",
        "split_with_sizes_copy",
        "div",
        "clone",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            first = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.found[name] += sum(x.numel() for x in first if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


class Tower(nn.Module):
    """Blocks without a cast of their own in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def copies(num: int, own_loop: bool) -> tuple[dict[str, int], int, int]:
    """Elements copied in a window of ``num`` micro-batches of one row; those of the model; bytes of casts that are left."""
    torch.manual_seed(0)
    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(Tower(), world, precision="bf16", sharding=BLOCKS)
        batches = [{"x": torch.ones(1, 32)} for _ in range(num)]
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(
            model, optim, loss=lambda out, batch: out.sum(), count=lambda batch: len(batch["x"]),
            forward=lambda model, batch: model(batch["x"]),
        )  # fmt: skip
        for _ in range(2):
            with Copies() as seen:
                if own_loop:
                    with sw.window(model, batches, count=lambda batch: 1) as w:
                        for batch in w:
                            (model(batch["x"]).sum() / w.num_tokens).backward()
                    optim.step()
                    optim.zero_grad()
                else:
                    step(batches)
        casts = [p._unsharded_param for unit in runtime_of(model).engine.order.units.all() for p in unit._params]
        left = sum(cast.untyped_storage().nbytes() for cast in casts)
        return dict(seen.found), sum(param.numel() for param in model.parameters()), left


def test_parameters_are_cast_once_for_a_window_and_gradients_only_to_their_dtype(ranks):
    found, size, left = ranks.run(copies, 1, 4, False)[0]
    assert left == 0
    assert found.pop("_foreach_copy_") == size
    # Each micro-batch's gradients are cast to float32, in which they are summed.
    assert sum(found.values()) <= 4 * size + 4 * 200


def test_a_loop_of_ones_own_casts_them_for_each_forward(ranks):
    found, size, left = ranks.run(copies, 1, 4, True)[0]
    assert left == 0
    assert found["_foreach_copy_"] == 4 * size


def writes(where: str) -> list[Tensor]:
    """Outputs of two micro-batches of a window, between which the parameters are doubled."""
    torch.manual_seed(0)
    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(Tower(), world, precision="bf16", sharding=BLOCKS)
        found = []

        def double() -> None:
            with torch.no_grad():
                for param in model.parameters():
                    if where == "through data":
                        param.data.mul_(2)
                    elif where == "by a list":
                        torch._foreach_mul_([param], 2)
                    else:
                        param.mul_(2)

        with sw.window(model, [{"x": torch.ones(1, 32)}] * 2, count=lambda batch: 1) as w:
            for batch in w:
                found.append(model(batch["x"]).detach())
                if where != "after the window" and len(found) == 1:
                    double()
        if where == "after the window":
            double()
            found.append(model(torch.ones(1, 32)).detach())
        return found


def writes_in_a_step() -> list[Tensor]:
    """The same in a TrainStep, whose forward writes them before it calls the model."""
    torch.manual_seed(0)
    found: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> Tensor:
        if found:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
        output = model(batch["x"])
        found.append(output.detach())
        return output

    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(Tower(), world, precision="bf16", sharding=BLOCKS)
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        step = sw.TrainStep(
            model, optim, loss=lambda out, batch: out.sum(), count=lambda batch: len(batch["x"]), forward=forward
        )
        step([{"x": torch.ones(1, 32)}] * 2)
    return found[:2]


@pytest.mark.parametrize("where", ["in the window", "through data", "by a list", "after the window"])
def test_a_write_to_parameters_is_seen_by_the_next_forward(ranks, where):
    """They are cast again."""
    _see_doubled(*ranks.run(writes, 1, where)[0])


def test_a_write_in_a_step_is_seen_by_the_next_forward(ranks):
    _see_doubled(*ranks.run(writes_in_a_step, 1)[0])


def _see_doubled(first: Tensor, *others: Tensor) -> None:
    *_, last = others
    torch.manual_seed(0)
    model = Tower()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        whole = model.bfloat16()(torch.ones(1, 32, dtype=torch.bfloat16))
    assert torch.equal(last, whole) and not torch.equal(first, last)


def test_the_recipe_says_that_nothing_is_gathered(ranks):
    text = ranks.run(described, 1)[0]
    assert "nothing is gathered; a TrainStep casts each unit once for all micro-batches" in text
    assert "prefetch: Prefetch(forward=2, backward=1) has no effect here: dp_shard=1, so nothing is gathered" in text


def described() -> str:
    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world:
        sharding = sw.Sharding(min_unit_bytes=0, prefetch=sw.Prefetch(forward=2))
        return sw.describe(sw.parallelize(Tower(), world, precision="bf16", sharding=sharding))
