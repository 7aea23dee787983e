"""Blocks that run twice: one plain process that draws what the ranks draw, and what can be seen of a second run."""

import contextlib
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from models.recomputed import Feed, Stack, build
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shardwise import Sharding
from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.dtensor import local_tensor
from shardwise.data.batch import MicroBatch
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.step.window import window
from shardwise.world import init
from shardwise.world.rng import derive_seed, forked_rng

NUM_MICRO = 4
SEED = 11


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for i in range(NUM_MICRO):
        ids = torch.randint(0, 13, (2, 6), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, 5 - i :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, extra = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1).to(torch.float64), batch["labels"].flatten(), reduction="sum") + extra


def one_process(make=build) -> dict[str, Tensor | None]:
    """Gradients of one plain process: no shardwise but for the names of its random streams."""
    model, given = make(), batches()
    tokens = sum(int((b["labels"] != -100).sum()) for b in given)
    for i, batch in enumerate(given):
        with forked_rng(derive_seed(SEED, "forward", 0, i)):
            (loss_of(model, batch) / tokens).backward()
    return {name: param.grad for name, param in model.named_parameters()}


class CountOps(TorchDispatchMode):
    """Within: counts operators by name."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def bytes_kept(found: list[int]):
    """Within: adds up the bytes that forward keeps for backward."""
    found.append(0)

    def pack(tensor: Tensor) -> Tensor:
        found[-1] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def of_feed() -> Stack:
    return Stack(Feed)


class Kept(NamedTuple):
    """Bytes that one forward leaves in memory for backward, in the first step and in the second; operators that the second
    backward runs; and what was chosen."""

    at_first: int
    then: int
    operators: int
    chosen: str


def kept_and_run(remat, make=Stack) -> Kept:
    """Two steps with ``remat``. Bytes by torch's own profiler: hooks on saved tensors do not see what selective keeps."""
    with init("dp_shard=1", device="cpu", seed=SEED) as world:
        model, x = parallelize(make, world, sharding=Sharding(min_unit_bytes=0), remat=remat), torch.ones(128, 64)
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        kept, ran = [], []
        for _ in range(2):  # the first one also makes what stays for good, and what selective and a budget go by
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                loss = model(x).square().sum()
            with CountOps() as ops:
                loss.backward()
            optim.step()
            kept.append(sum(event.self_cpu_memory_usage for event in profiler.events()))
            ran.append(sum(ops.counts.values()))
        return Kept(*kept, ran[1], runtime_of(model).chosen.get("remat", ""))


def train(layout: str, engine: str = "auto", make=build, units=None, **options):
    """One window on this rank. Gives whole gradients, runs of each block, operators in backward, bytes kept per forward,
    names, edits of the recipe, and the order in which dynamo's graphs grew."""
    from torch._dynamo.utils import counters

    keep = {"min_unit_bytes": 0} if engine != "ddp" and units is None else {}
    keep |= {"units": units} if units else {}
    with init(layout, device="cpu", seed=SEED, timeout_s=60) as world:
        counters.clear()
        model = make()
        model = parallelize(model, world, sharding=Sharding(engine=engine, **keep), **options)
        if options.get("remat") is not None and not is_decided(model):
            settle(model)
        mine = [MicroBatch(b, index=i, padding=False) for i, b in enumerate(batches()) if i % world.size == world.rank]
        kept: list[int] = []
        backward: Counter[str] = Counter()
        with window(model, mine) as w:
            for batch in w:
                with bytes_kept(kept):
                    loss = loss_of(model, batch) / w.num_tokens
                with CountOps() as ops:
                    loss.backward()
                backward += ops.counts
        grads = {}
        for name, param in runtime_of(model).parameters.items():
            grad = param.grad
            full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            grads[name] = None if full is None else local_tensor(full).detach().clone()
        return {
            "grads": grads,
            "runs": [getattr(block, "runs", None) for block in model.blocks],
            "backward": backward,
            "kept": kept,
            "names": [list(model.state_dict()), [name for name, _ in model.named_modules()]],
            "edits": [(edit.technique, edit.module) for edit in recipe_of(model).edits],
            "graphs": counters["stats"].get("unique_graphs", 0),
            "breaks": sum(counters["graph_break"].values()),
            "micro": len(mine),
        }


def is_decided(model: nn.Module) -> bool:
    """Whether nothing is left to be chosen at the first optimizer step."""
    return not runtime_of(model).before_first_step


def settle(model: nn.Module) -> None:
    """A first window and optimizer step, after which all is chosen; leaves everything else as it was."""
    runtime, world = runtime_of(model), runtime_of(model).world
    mine = [MicroBatch(b, index=i, padding=False) for i, b in enumerate(batches()) if i % world.size == world.rank]
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    with window(model, mine) as w:
        for batch in w:
            (loss_of(model, batch) / w.num_tokens).backward()
    optim.step()
    optim.zero_grad()
    runtime.step = 0  # the random streams of the next window are those of the first
    for block in model.blocks:
        block.runs = 0


def assert_same(grads: dict[str, Tensor | None], want: dict[str, Tensor | None], gate: float = 1e-12) -> None:
    largest = max(float(g.abs().max()) for g in want.values() if g is not None)
    for name, other in want.items():
        assert (grads[name] is None) == (other is None), name
        if other is not None:
            error = float((grads[name] - other).abs().max()) / max(float(other.abs().max()), 1e-6 * largest)
            assert error <= gate, f"{name}: {error:.1e}"
