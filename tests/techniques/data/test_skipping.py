"""Ranks that run other blocks than each other train as one process does: plain FSDP2 hangs, or adds up gradients of other blocks."""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from models.stacks import BLOCKS, Stack
from techniques.data.skips import ALL, CASES, LOOPS, MICRO, ORDERS, STEPS, At, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise import Compile, Prefetch, Remat, Sharding
from shardwise.errors import ShardwiseError
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.step.window import window
from shardwise.verify.sharded import CountCollectives
from shardwise.world import init

EAGER = functools.partial(Compile, backend="aot_eager")
HSDP = "dp_replicate=2,dp_shard=2"
WHERE: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "shards": ("dp_shard=2", 2, {}, {}),
    "remat": ("dp_shard=2", 2, {}, {"remat": Remat}),
    "compile": ("dp_shard=2", 2, {}, {"compile": EAGER}),
    "compile and remat": ("dp_shard=2", 2, {}, {"compile": EAGER, "remat": Remat}),
    "offload": ("dp_shard=2", 2, {"offload": True}, {}),
    "kept": ("dp_shard=2", 2, {"reshard_after_forward": False}, {}),
    "every second kept": ("dp_shard=2", 2, {"reshard_every": 2}, {}),
    "no prefetch": ("dp_shard=2", 2, {"prefetch": "none"}, {}),
    "much prefetch": ("dp_shard=2", 2, {"prefetch": Prefetch(forward=2, backward=2)}, {}),
    "each micro-batch": ("dp_shard=2", 2, {"sync_every_microbatch": True}, {}),
    "hsdp": (HSDP, 4, {}, {}),
    "hsdp, kept, each micro-batch": (HSDP, 4, {"reshard_after_forward": False, "sync_every_microbatch": True}, {}),
    "kept over 2 of 4": ("dp_shard=4", 4, {"reshard_after_forward": 2}, {}),
    "4 shards": ("dp_shard=4", 4, {}, {}),
}
"""Name -> layout, ranks, options of Sharding, techniques of blocks."""


@functools.cache
def one_process(name: str, size: int, is_compiled: bool) -> list[dict[str, Tensor | None]]:
    """The gradients of each step, the micro-batches of all ranks one after the other. With compiled blocks: torch gives their
    unused results a gradient of zeros, where an eager block's parameters have none."""
    case = CASES[name]
    model = case.build()
    for child in model.children() if is_compiled else ():
        for block in child if isinstance(child, nn.ModuleList) else ():
            block.compile(backend="aot_eager")
    optim, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        given = [At(rank, step, micro) for micro in range(MICRO) for rank in range(size)]
        for at in given:
            case.loop(model, at, float(sum(each.num_tokens for each in given)))
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optim.step()
        optim.zero_grad()
    return found


def trained(where: str, names: list[str]) -> tuple[dict[str, Any], int]:
    """Name of a case -> this rank's part of the gradients of each step, or the text of an error; and the fewest units that a model had."""
    layout, _, sharding, options = WHERE[where]
    found, fewest = {}, 99
    with init(layout, device="cpu", timeout_s=30) as world, _compiling():
        for number, name in enumerate(names):
            if number % 20 == 0:
                torch._dynamo.reset()  # its limit counts for the code of blocks, which all cases have in common
            case = CASES[name]
            units = {"units": case.units} if case.units else {"min_unit_bytes": 0}
            of_blocks = {key: option(targets=case.units or "blocks") for key, option in options.items()}
            model = parallelize(case.build(), world, sharding=Sharding(**sharding, **units), **of_blocks)
            fewest = min(fewest, len(recipe_of(model).units))
            try:
                found[name] = _train(model, case.loop, world.rank)
            except ShardwiseError as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found, fewest


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Compiled blocks have several backwards, and stay compiled for all cases."""
    with (
        torch._functorch.config.patch(donated_buffer=False),
        torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        yield


def _train(model: nn.Module, loop: Any, rank: int) -> list[dict[str, tuple[Tensor, tuple[int, ...]] | None]]:
    shown = [id(param) for param in model.parameters()]
    optim, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        given = [{"micro": torch.tensor(micro)} for micro in range(MICRO)]
        with window(model, given, count=lambda b, step=step: At(rank, step, int(b["micro"])).num_tokens) as w:
            for b in w:
                loop(model, At(rank, step, int(b["micro"])), w.num_tokens)
                assert [id(param) for param in model.parameters()] == shown
        grads = {name: param.grad for name, param in runtime_of(model).parameters.items()}
        found.append({name: None if grad is None else _own(grad) for name, grad in grads.items()})
        optim.step()
        optim.zero_grad()
    return found


def _own(grad: DTensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a gradient, and where it begins: gathering the whole ones would take a fifth of all the time."""
    return grad.to_local(), compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)[1]


def check(ranks, where: str, names: list[str], timeout_s: float = 60) -> None:
    _, size, _, options = WHERE[where]
    with _compiling():
        want = {name: one_process(name, size, "compile" in options) for name in names}
    for found, units in ranks.run(trained, size, where, names, timeout_s=timeout_s):
        assert units >= 2
        faults = [text for name in names for text in differences(found[name], want[name], name)]
        assert not faults, "\n".join(faults)


def differences(found: Any, want: list[dict[str, Tensor | None]], name: str) -> list[str]:
    """What of a rank's part is not as in one process, to 1e-12 of each gradient."""
    if isinstance(found, str):
        return [f"{name}: {found}"]
    faults = []
    for step, (mine, one) in enumerate(zip(found, want, strict=True)):
        largest = max(float(grad.abs().max()) for grad in one.values() if grad is not None)
        for param, grad in one.items():
            other = mine[param]
            if grad is None or other is None:
                if other is not grad:
                    faults.append(f"{name}: step {step}: {param}: {'None' if other is None else 'not None'}")
                continue
            part, start = other
            if not part.numel():
                continue
            wanted = grad[tuple(slice(i, i + n) for i, n in zip(start, part.shape, strict=True))]
            error = float((part - wanted).abs().max()) / max(float(grad.abs().max()), 1e-6 * largest)
            if not error < 1e-12:
                faults.append(f"{name}: step {step}: {param}: {error:.1e}")
    return faults


PLAIN = [name for name in CASES if ":" not in name or name.endswith(": plain")]
OTHER_LOOPS = [f"{order}: {loop}" for loop in LOOPS for order in ("others on each rank", "drawn anew each time")]
OTHER_MODELS = [name for name in CASES if name.partition(": ")[2] in ORDERS]
SAMPLE = [f"{order}: plain" for order in ("all blocks on one rank", "drawn anew each time", "again on one rank")]
FEW = [*SAMPLE, "text only at first", "an expert each", "one block, by rank", "a frozen tower"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(PLAIN[::2], id="half of the orders"),
        pytest.param(PLAIN[1::2], id="the other orders", marks=pytest.mark.soak),
        pytest.param(OTHER_LOOPS, id="loops", marks=pytest.mark.soak),
        pytest.param(OTHER_MODELS, id="models", marks=pytest.mark.soak),
    ],
)
def test_blocks_that_ranks_skip(ranks, names):
    check(ranks, "shards", names)


METHODS = [name for name in CASES if name.startswith("another method")]


@pytest.mark.parametrize(
    "where", ["kept", *(pytest.param(name, marks=pytest.mark.soak) for name in ("kept over 2 of 4", "much prefetch"))]
)
def test_blocks_used_by_another_method_that_ranks_keep(ranks, where):
    """A rank that ran one freed it before its backward and gathered it anew; those that skipped it held it, and gathered nothing."""
    check(ranks, where, METHODS, timeout_s=100)


OPTIONS = {"remat": FEW, "kept": FEW, "hsdp": SAMPLE[1:]}
RARELY = {"compile": SAMPLE[1:2], "offload": FEW, "much prefetch": FEW, "kept over 2 of 4": SAMPLE}


@pytest.mark.quick("kept")
@pytest.mark.parametrize("where", [*OPTIONS, *(pytest.param(where, marks=pytest.mark.soak) for where in RARELY)])
def test_skipped_blocks_under_options(ranks, where):
    check(ranks, where, (OPTIONS | RARELY)[where])


@pytest.mark.soak
@pytest.mark.parametrize("where", list(WHERE))
def test_everything_that_ranks_skip(ranks, where):
    check(ranks, where, list(CASES), timeout_s=1200)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def counted(sharding: dict[str, Any], orders: list[list[int]]) -> list[dict[str, int]]:
    """The collectives of each step, in which all ranks run the blocks in this order."""
    with init("dp_shard=2", device="cpu", timeout_s=30) as world:
        model = parallelize(Stack().double(), world, sharding=Sharding(min_unit_bytes=0, **sharding))
        counts = []
        for step, order in enumerate(orders):
            at = At(world.rank, step, 0)
            with window(model, [{"x": at.x}], count=lambda _: 1) as w:
                for b in w:
                    with CountCollectives() as counter:
                        loss_of(model(b["x"], order), at).backward()
                    counts.append(counter.counts)
        return counts


@pytest.mark.parametrize(
    ("sharding", "gathers"),
    [({}, 2 * BLOCKS + 1), ({"prefetch": "none"}, 2 * BLOCKS + 1), ({"reshard_after_forward": False}, BLOCKS + 1)],
    ids=["default", "no prefetch", "kept"],
)
def test_a_model_that_skips_nothing_costs_what_it_did(ranks, sharding, gathers):
    """Ranks tell each other their order in the first window; after it they say nothing."""
    for first, *later in ranks.run(counted, 2, sharding, [ALL] * 3):
        assert sum(first.values()) > gathers + BLOCKS + 1
        assert later == [{"_allgather_base": gathers, "_reduce_scatter_base": BLOCKS + 1}] * 2


def test_ranks_that_turn_to_another_order_agree_on_it_once(ranks):
    """The step that leaves the old order drops it, and the next one agrees from its start; the steps after it say nothing."""
    turned = ALL[::-1]
    for counts in ranks.run(counted, 2, {}, [ALL, ALL, *[turned] * 5]):
        told = [step.keys() - {"_allgather_base", "_reduce_scatter_base"} != set() for step in counts]
        assert told == [True, False, True, True, False, False, False]
        assert counts[4:] == [counts[1]] * 3


def threads_of_groups(num_blocks: int) -> tuple[int, int]:
    """Threads of this rank with a model of two blocks, and with a second model of many."""
    sharding = Sharding(min_unit_bytes=0, reshard_after_forward=2)
    with init("dp_shard=4", device="cpu", timeout_s=30) as world:
        counts = []
        for num in (2, num_blocks):
            model = parallelize(Stack(num).double(), world, sharding=sharding)
            assert len(recipe_of(model).units) == num + 1
            counts.append(len(os.listdir("/proc/self/task")))
        return counts[0], counts[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by /proc")
def test_units_kept_over_some_ranks_share_their_groups(ranks):
    """torch makes two process groups for each unit, of some threads each: a model of 80 blocks had a thousand."""
    for few, many in ranks.run(threads_of_groups, 4, 6):
        assert many == few
