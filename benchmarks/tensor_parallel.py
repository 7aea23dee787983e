"""Measures tensor parallelism beside torch's ``parallelize_module``, on 2 CPU ranks over gloo; and the search for a plan.

    python benchmarks/tensor_parallel.py                                       # prints two tables; some minutes on 2 cores
    python benchmarks/tensor_parallel.py --write docs/tensor-parallel.md       # and puts them into the page
    python benchmarks/tensor_parallel.py --sequence [--write ...]              # what sequence parallelism sends and keeps; seconds

Both sides run the same 24 small blocks on the same batches in the same processes, turn by turn: forward, and backward of
a sum. torch's side is what its tutorial shows: ``ColwiseParallel`` for q, k, v and up, ``RowwiseParallel`` for out and
down. Before anything is timed, output and gradients of each side in fp64 equal those of the plain module to 1e-12.
Collectives are counted in one forward and backward.

The search is timed without ranks: for the shapes of Llama 70B, on meta, for 8 ranks.

With ``--sequence`` nothing is timed: collectives and bytes of one block and micro-batch are counted, with and without sequence parallelism.
"""

import argparse
import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.launch import launch_local
from shardwise.model.calling import run_on
from shardwise.recipe import extents
from shardwise.techniques.tp.search.cut_search import search

__all__ = ["CONTENDERS", "measure", "measure_search", "measure_sequence", "table", "table_of_sequence"]

WIDTH, HEADS, NUM_BLOCKS, BATCH, LENGTH = 64, 4, 24, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _by_torch(module: nn.Module, world: sw.World) -> nn.Module:
    plan = {key: ColwiseParallel() for key in ("q", "k", "v", "up")} | {
        key: RowwiseParallel() for key in ("out", "down")
    }
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, world.mesh["tp"], plan)
    return module


def _ours(module: nn.Module, world: sw.World) -> nn.Module:
    dtype = next(module.parameters()).dtype
    return sw.parallelize(module, world, example={"x": torch.ones(1, 2, WIDTH, dtype=dtype)})


CONTENDERS: dict[str, Callable[[nn.Module, sw.World], nn.Module]] = {
    "plain, every rank by itself": lambda module, _: module,
    "torch, parallelize_module": _by_torch,
    "Shardwise, tp=2": _ours,
}
OURS = "Shardwise, tp=2"
REFERENCE = "torch, parallelize_module"


# ---- one rank ------------------------------------------------------------------------------------------------------


_NAMES = ("reduce", "gather", "all_to_all", "broadcast", "scatter")


class _Collectives(TorchDispatchMode):
    """Within: counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.namespace in ("c10d", "_c10d_functional") and any(word in str(func) for word in _NAMES)
        return func(*args, **(kwargs or {}))


def _run(module: nn.Module, x: Tensor) -> Tensor:
    """A forward and a backward alone: of Shardwise within ``accumulate``, whose last micro-batch never comes."""
    y = module(x)
    y.square().sum().backward()
    return y


def measure(rounds: int, num_blocks: int = NUM_BLOCKS, warmup: int = 5) -> dict[str, Any]:
    """Runs on every rank: checks that the contenders agree, then times them in turn. Returns ``seconds``, name -> one number
    per round, and ``collectives``, name -> how many a block makes."""
    with sw.init("tp=-1", device="cpu") as world:
        collectives = _check(world, num_blocks)
        modules = {name: make(_build(num_blocks, torch.float32), world) for name, make in CONTENDERS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        with sw.accumulate(modules[OURS], is_last=False):
            for turn in range(warmup + rounds):
                x = _input(turn, torch.float32)
                for name, module in modules.items():
                    for param in module.parameters():
                        param.grad = None
                    world.barrier()
                    start = time.perf_counter()
                    _run(module, x)
                    if turn >= warmup:
                        seconds[name].append(time.perf_counter() - start)
        return {"seconds": seconds, "collectives": collectives}


def _check(world: sw.World, num_blocks: int) -> dict[str, int]:
    """Output and gradients of each contender in fp64 must be those of the plain module."""
    plain, collectives = _build(num_blocks, torch.float64), {}
    x = _input(0, torch.float64)
    wanted = _run(plain, x)
    for name, make in CONTENDERS.items():
        module = make(_build(num_blocks, torch.float64), world)
        opened = sw.accumulate(module, is_last=False) if name == OURS else contextlib.nullcontext()
        with opened, _Collectives() as counted:
            found = _run(module, x)
        collectives[name] = counted.number // num_blocks  # outside of windows Shardwise compares the model's input once
        _close(found, wanted, f"{name}: the output")
        for key, param in plain.named_parameters():
            if not param.requires_grad:
                continue
            grad, whole = module.get_parameter(key).grad, param.grad
            assert grad is not None and whole is not None, key
            if name.startswith("Shardwise"):
                recipe = sw.recipe_of(module)
                pieces = extents(recipe.params[key], recipe.grid.coord(world.rank))
                grad = grad.as_subclass(Tensor)  # this rank's part, which is compared with that of the whole
                _close(grad, torch.cat([whole[piece.full_index] for piece in pieces]), f"{name}: {key}")
            else:
                _close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, whole, f"{name}: {key}")
    return collectives


def _close(found: Tensor, wanted: Tensor, what: str) -> None:
    error = float((found - wanted).detach().abs().max() / wanted.detach().abs().max())
    if not error <= 1e-12:
        raise SystemExit(f"{what} differs by {error:.1e}, so times mean nothing")


def _build(num_blocks: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = Model(num_blocks).to(dtype)
    for name, param in module.named_parameters():
        if name.endswith("k.bias"):  # whose gradient is mathematically zero
            param.requires_grad_(False)
    return module


def _input(turn: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype).requires_grad_()


# ---- the search ----------------------------------------------------------------------------------------------------


def measure_search(num_layers: int = 80, degree: int = 8, width: int = 8192) -> dict[str, float]:
    """Seconds and memory (MiB more than before) of the search in a Llama of the shapes of 70B, on meta; and how many regions
    it found."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=width // 8 * 28,
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    call = run_on(None)
    small = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    search(LlamaForCausalLM(small), call, 2)  # torch and transformers warm up
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = search(module, call, degree)
    seconds = time.perf_counter() - start
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "mib": more / 1024, "regions": len(found.regions)}


# ---- sequence parallelism ------------------------------------------------------------------------------------------

_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
}
_LONG = 96  # positions


class _Counted(TorchDispatchMode):
    """Within: counts the collectives of layers by kind, and the bytes that a rank sends by them."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks, self.bytes, self.kinds = num_ranks, 0.0, dict.fromkeys(_SENT, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind, times in _SENT.items() if func.namespace == "_c10d_functional" else ():
            if f".{kind}" in str(func):
                self.kinds[kind] += 1
                self.bytes += args[0].numel() * args[0].element_size() * times(self._num_ranks)
        return func(*args, **(kwargs or {}))


class _Kept:
    """Within: bytes of what autograd keeps, each storage once: all of it, and what is between regions, as norms keep it."""

    def __init__(self, module: nn.Module) -> None:
        self._found, self._between = dict[int, Tensor](), set[int]()
        self._is_between = False
        for child in module.modules():
            if isinstance(child, nn.LayerNorm):
                child.register_forward_pre_hook(lambda *_: setattr(self, "_is_between", True))
                child.register_forward_hook(lambda *_: setattr(self, "_is_between", False))

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() > 2 and x.is_floating_point():  # and no weight
            at = x.untyped_storage().data_ptr()
            self._found[at] = x
            self._between |= {at} if self._is_between else set()
        return x

    def bytes(self) -> tuple[int, int]:
        sizes = {at: x.untyped_storage().nbytes() for at, x in self._found.items()}
        return sum(sizes.values()), sum(sizes[at] for at in self._between)


def measure_sequence(is_cut: bool, num_blocks: int = 4) -> dict[str, float]:
    """Of a block and micro-batch: collectives and bytes that a rank sends, bytes that it keeps for backward. Numbers are those of one process."""
    with sw.init("tp=-1", device="cpu") as world:
        x = (
            _input(0, torch.float64)[:, :1].repeat(1, _LONG, 1)
            + torch.linspace(0, 1, _LONG, dtype=torch.float64)[:, None]
        )
        wanted = _build(num_blocks, torch.float64)(x)
        parallel = sw.TensorParallel(sequence_parallel=is_cut)
        module = sw.parallelize(
            _build(num_blocks, torch.float64), world, example={"x": x[:, :24]}, tensor_parallel=parallel
        )
        kept = _Kept(module)
        with sw.accumulate(module, is_last=False), _Counted(world.size) as counted:
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
                y = module(x)
            y.square().sum().backward()
        _close(y.detach(), wanted, "the output")
        total, between = kept.bytes()
        found = {"sent": counted.bytes, "kept": total, "between": between, **counted.kinds}
        return {key: value / num_blocks for key, value in found.items()}


def table_of_sequence(found: dict[tuple[int, bool], dict[str, float]]) -> str:
    """A Markdown table of what :func:`measure_sequence` gave, by number of ranks and whether sequences are cut."""
    lines = [
        f"| a block of width {WIDTH}, {BATCH} samples of {_LONG} positions in float64 | sums | gathers | sums to rows | sent, KiB | kept between "
        "regions, KiB | kept in all, KiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (num, is_cut), of in found.items():
        name = f"`tp={num}`, `sequence_parallel=True`" if is_cut else f"`tp={num}`"
        kinds = " | ".join(f"{of[kind]:.3g}" for kind in _SENT)
        sizes = " | ".join(f"{of[key] / 1024:.0f}" for key in ("sent", "between", "kept"))
        lines.append(f"| {name} | {kinds} | {sizes} |")
    return "\n".join(lines)


def _sequence() -> str:
    path, found = f"{Path(__file__).resolve()}:measure_sequence", {}
    for num in (2, 4):
        for is_cut in (False, True):
            found[num, is_cut] = launch_local(path, nproc=num, args=(is_cut,))[0]
    return table_of_sequence(found)


# ---- the tables ----------------------------------------------------------------------------------------------------


def table(ranks: list[dict[str, Any]], found: dict[str, float]) -> str:
    """Two Markdown tables: medians over the rounds, each also as a ratio to torch's; and the search."""
    times = {
        name: [max(of_ranks) * 1e3 for of_ranks in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["seconds"]
    }
    lines = [
        f"| {NUM_BLOCKS} blocks of width {WIDTH}, forward and backward | median, ms | middle half, ms | ratio | collectives per block |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, of_name in times.items():
        low, middle, high = statistics.quantiles(of_name, n=4)
        ratio = middle / statistics.median(times[REFERENCE])
        lines.append(
            f"| {name} | {middle:.1f} | {low:.1f}-{high:.1f} | {ratio:.2f} | {ranks[0]['collectives'][name]:g} |"
        )
    lines += [
        "",
        "| search in the shapes of Llama 70B for `tp=8`, on meta | |",
        "|---|--:|",
        f"| regions found | {found['regions']:g} |",
        f"| seconds | {found['seconds']:.1f} |",
        f"| memory at most, MiB | {found['mib']:.0f} |",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="timed runs of each contender (40)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--write", type=Path, help="a page whose <!-- tp --> part, or <!-- sp -->, is replaced by the tables"
    )
    parser.add_argument(
        "--sequence", action="store_true", help="count what sequence parallelism sends and keeps, instead"
    )
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    if args.sequence:
        mark, text = "sp", _sequence()
    else:
        found = launch_local(f"{Path(__file__).resolve()}:measure_search", nproc=1)[0]
        ranks = launch_local(f"{Path(__file__).resolve()}:measure", nproc=args.ranks, args=(args.rounds,))
        mark, text = "tp", table(ranks, found)
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"<!-- /{mark} -->")[2]
        args.write.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
