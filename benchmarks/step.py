"""Measures the time of a training step, Shardwise against FSDP2 written by hand, on 2 CPU ranks over gloo.

    python benchmarks/step.py                                   # prints a table; some minutes on 2 cores
    python benchmarks/step.py --write docs/benchmarks.md        # and puts it into the page

Both sides train the same model on the same windows, in the same processes, turn by turn, so that whatever else the
machine does hits them alike. A window is two micro-batches with unequal numbers of valid tokens. The raw side is what
torch's tutorial shows, made right for such windows and with nothing left out on either side: ``fully_shard`` on each
block and on the root, tokens counted over the ranks, the loss scaled by (ranks / tokens) because FSDP2 averages,
reduction at the last micro-batch only (``set_requires_gradient_sync``), ``clip_grad_norm_`` on the DTensors, AdamW,
``zero_grad``, and the loss summed over the ranks for the log. Replicas are compared with torch's
``DistributedDataParallel`` in the same way, and with Accelerate and Lightning Fabric where they are installed, which
are given the same loop with their own way of not reducing until the last micro-batch. All of them run over a process group
that torch has made, as their users' loops do.

Before anything is timed: after three steps in fp64 every parameter of each contender equals that of the first one to
1e-9 of its largest element, and in fp32 the first loss and gradient norm to 1e-5 (parameters are not compared in fp32:
AdamW turns rounding of a tiny gradient into a difference of a whole step).
"""

import argparse
import contextlib
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.launch import launch_local
from shardwise.run.reference import ReferenceConfig, ReferenceModel

__all__ = ["CONTENDERS", "MODELS", "PARTS", "measure", "table"]

ROOT = Path(__file__).resolve().parent.parent
IGNORED = -100
MODELS = {
    "24 blocks, d=64": ReferenceConfig(dim=64, num_layers=24, ffn=176),
    "12 blocks, d=256": ReferenceConfig(dim=256, num_layers=12, num_heads=8, num_kv_heads=4, ffn=704),
    "4 blocks, d=512": ReferenceConfig(dim=512, num_layers=4, num_heads=8, num_kv_heads=4, ffn=1408),
    "tiny": ReferenceConfig(dim=32, num_layers=3, ffn=64),
}
MEASURED = ("24 blocks, d=64", "12 blocks, d=256", "4 blocks, d=512")  # tiny only tries the script out
BATCH, SEQ, MICRO = 4, 64, 2
LR, CLIP = 1e-3, 1.0

Step = Callable[[list[dict[str, Tensor]]], tuple[float, float]]


# ---- the contenders ------------------------------------------------------------------------------------------------


def _by_hand(
    model: nn.Module,
    world: sw.World,
    fused: bool,
    sync: Callable[[bool], Any],
    *,
    optim: Any = None,
    backward: Callable[[Tensor], Any] = torch.autograd.backward,
) -> Step:
    """A step that returns loss and gradient norm. ``sync(is_last)`` is a context in which the engine reduces or does not."""
    if optim is None:
        optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=fused)

    def step(window: list[dict[str, Tensor]]) -> tuple[float, float]:
        tokens = torch.stack([(batch["labels"] != IGNORED).sum() for batch in window]).sum()
        dist.all_reduce(tokens)
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(window):
            with sync(i == len(window) - 1):
                logits = model(batch["input_ids"])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
                )
                backward(loss * (world.size / tokens))
            total += loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optim.step()
        optim.zero_grad()
        dist.all_reduce(total)
        return float(total / tokens), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    return step


def _fsdp2(module: nn.Module, world: sw.World, fused: bool, by_block: bool = True) -> Step:
    """``fully_shard`` on each block, or on none, and on the root, over torch's own group."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in module.blocks if by_block else ():  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)

    def sync(is_last: bool) -> Any:
        module.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return contextlib.nullcontext()

    return _by_hand(module, world, fused, sync)


def _ddp(module: nn.Module, world: sw.World, fused: bool) -> Step:
    """torch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return _by_hand(model, world, fused, lambda is_last: contextlib.nullcontext() if is_last else model.no_sync())


def _accelerate(module: nn.Module, world: sw.World, fused: bool) -> Step:
    """Hugging Face Accelerate: DDP by ``Accelerator.prepare``, with ``no_sync`` until the last micro-batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=world.device.type == "cpu")
    optim = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1, fused=fused)
    model, optim = accelerator.prepare(module, optim)
    null = contextlib.nullcontext
    return _by_hand(
        model,
        world,
        fused,
        lambda is_last: null() if is_last else accelerator.no_sync(model),
        optim=optim,
        backward=accelerator.backward,
    )


def _fabric(module: nn.Module, world: sw.World, fused: bool) -> Step:
    """Lightning Fabric: DDP by ``Fabric.setup``, with ``no_backward_sync`` until the last micro-batch."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=world.device.type, devices=world.size, strategy="ddp")
    fabric.launch()
    optim = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1, fused=fused)
    model, optim = fabric.setup(module, optim)
    return _by_hand(
        model,
        world,
        fused,
        lambda is_last: fabric.no_backward_sync(model, enabled=not is_last),
        optim=optim,
        backward=fabric.backward,
    )


def _ours(module: nn.Module, world: sw.World, fused: bool, sharding: sw.Sharding | None = None) -> Step:
    """Shardwise: the same step in its own words."""
    model = sw.parallelize(module, world, sharding=sharding)
    optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=fused)
    train_step = sw.TrainStep(model, optim, max_grad_norm=CLIP)

    def step(window: list[dict[str, Tensor]]) -> tuple[float, float]:
        out = train_step(window)
        return out.loss, out.grad_norm

    return step


CONTENDERS: dict[str, Callable[[nn.Module, sw.World], Step]] = {
    "FSDP2 by hand, AdamW": lambda module, world: _fsdp2(module, world, False),
    "FSDP2 by hand, AdamW(fused=True)": lambda module, world: _fsdp2(module, world, True),
    "FSDP2 by hand, fused, one unit": lambda module, world: _fsdp2(module, world, True, by_block=False),
    "Shardwise, AdamW": lambda module, world: _ours(module, world, False),
    "Shardwise, AdamW(fused=True)": lambda module, world: _ours(module, world, True),
    "Shardwise, fused, a unit for each block": lambda module, world: _ours(
        module, world, True, sw.Sharding(min_unit_bytes=0)
    ),
}
REFERENCE = "FSDP2 by hand, AdamW(fused=True)"
REPLICAS: dict[str, Callable[[nn.Module, sw.World], Step]] = {
    "DDP by hand, AdamW(fused=True)": lambda module, world: _ddp(module, world, True),
    "Shardwise, AdamW(fused=True)": lambda module, world: _ours(module, world, True),
}
PEERS = {
    "accelerate": ("Accelerate, AdamW(fused=True)", _accelerate),
    "lightning_fabric": ("Fabric, AdamW(fused=True)", _fabric),
}
for _package, (_name, _make) in PEERS.items():
    if importlib.util.find_spec(_package) is not None:  # pip install 'shardwise[peers]'
        REPLICAS[_name] = functools.partial(_make, fused=True)
PARTS = {  # part of the page -> (layout, contenders, the one that counts as 1)
    "step": ("dp_shard=-1", CONTENDERS, REFERENCE),
    "replicas": ("dp_replicate=-1", REPLICAS, "DDP by hand, AdamW(fused=True)"),
}


# ---- one rank ------------------------------------------------------------------------------------------------------


def measure(model: str, rounds: int, warmup: int = 3, part: str = "step") -> dict[str, Any]:
    """Runs on every rank: checks that the contenders agree, then times them in turn.

    Args:
        model: a key of ``MODELS``.
        rounds: timed steps of each contender.
        warmup: steps of each before that.
        part: a key of ``PARTS``: which contenders, under which layout.

    Returns:
        ``seconds`` and ``cpu`` (this process's own time on the cores), name -> one number per step, and ``num_params``.
    """
    layout, contenders, _ = PARTS[part]
    names = tuple(contenders)
    with _torchs_own_group(), sw.init(layout, device="cpu") as world:
        config = MODELS[model]
        _check(config, world, contenders)
        steps = {name: make(_build(config, torch.float32), world) for name, make in contenders.items()}
        windows = _windows(config, world.rank)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        first: dict[str, tuple[float, float]] = {}
        for turn in range(warmup + rounds):
            window = next(windows)
            first_now = turn % len(names)  # each contender takes each place in turn
            for name in (*names[first_now:], *names[:first_now]):
                step = steps[name]
                world.barrier()
                start, busy = time.perf_counter(), time.process_time()
                figures = step(window)
                if turn >= warmup:
                    seconds[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - busy)
                first.setdefault(name, figures)
        for name, figures in first.items():
            _close(figures, first[names[0]], 1e-5, f"loss and gradient norm of {name!r} in fp32")
        num_params = sum(p.numel() for p in _build(config, torch.float32).parameters())
        return {"seconds": seconds, "cpu": cpu, "num_params": num_params}


@contextlib.contextmanager
def _torchs_own_group() -> Iterator[None]:
    """Within: torch's default process group is one that torch has made, over which all contenders but Shardwise run.

    Shardwise gathers parameters and reduces gradients in groups of its own; its two small exchanges a step run over this one.
    A group of torch's has two threads, which in rare cases write into freed memory (``shardwise/_torch/groups.py``): a run that
    ends in a size of many digits has met that.
    """
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check(config: ReferenceConfig, world: sw.World, contenders: dict[str, Callable[..., Step]]) -> None:
    """Three steps in fp64 by each contender: the parameters must agree."""
    wanted: dict[str, Tensor] = {}
    for name, make in contenders.items():
        module = _build(config, torch.float64)
        step = make(module, world)
        windows = _windows(config, world.rank)
        for _ in range(3):
            step(next(windows))
        params: Any = module.named_parameters()
        found = {key: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for key, p in params}
        wanted = wanted or found
        for key, value in found.items():
            err = float((value - wanted[key]).abs().max() / wanted[key].abs().max())
            if not err <= 1e-9:
                raise SystemExit(f"{name!r}: {key} differs by {err:.1e} after 3 steps in fp64, so times mean nothing")


def _close(found: tuple[float, ...], wanted: tuple[float, ...], gate: float, what: str) -> None:
    for a, b in zip(found, wanted, strict=True):
        if not abs(a - b) <= gate * abs(b):
            raise SystemExit(f"{what}: {a} against {b}, so times mean nothing")


def _build(config: ReferenceConfig, dtype: torch.dtype) -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(config).to(dtype)


def _windows(config: ReferenceConfig, rank: int) -> Iterator[list[dict[str, Tensor]]]:
    """Endless windows of this rank, the same for every contender; part of the labels do not count."""
    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        window = []
        for i in range(MICRO):
            ids = torch.randint(config.vocab, (BATCH, SEQ + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, SEQ - 8 * (rank + i) - 1 :] = IGNORED
            window.append({"input_ids": ids[:, :-1].contiguous(), "labels": labels})
        yield window


# ---- the table -----------------------------------------------------------------------------------------------------


def table(results: dict[str, list[dict[str, Any]]], reference: str = REFERENCE) -> str:
    """A Markdown table of medians over the rounds, and each as a ratio to the contender ``reference``.

    A step is over when the slowest rank is done; its time on the cores is that of the busiest rank.
    """
    lines = [
        "| model | step | median, ms | middle half, ms | ratio | core time, ms | ratio |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for model, ranks in results.items():
        size = f"{model} ({ranks[0]['num_params'] / 1e6:.1f} M)"
        wall, busy = ({n: _slowest(ranks, kind, n) for n in ranks[0][kind]} for kind in ("seconds", "cpu"))
        for name, times in wall.items():
            low, _, high = statistics.quantiles(times, n=4)
            ratios = [statistics.median(t[name]) / statistics.median(t[reference]) for t in (wall, busy)]
            lines.append(
                f"| {size} | {name} | {statistics.median(times):.1f} | {low:.1f}-{high:.1f} | {ratios[0]:.2f} "
                f"| {statistics.median(busy[name]):.1f} | {ratios[1]:.2f} |"
            )
    return "\n".join(lines)


def _slowest(ranks: list[dict[str, Any]], kind: str, name: str) -> list[float]:
    """Milliseconds of each round on the rank that took longest."""
    return [max(times) * 1e3 for times in zip(*(rank[kind][name] for rank in ranks), strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each contender (40)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="only this one; may be repeated")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this table; may be repeated")
    parser.add_argument(
        "--write", type=Path, help="a page whose <!-- step --> and <!-- replicas --> parts are replaced"
    )
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    for part, (layout, _, reference) in PARTS.items():
        if args.part and part not in args.part:
            continue
        results = {}
        for model in args.model or MEASURED:
            print(
                f"measuring {model} on {args.ranks} ranks of {layout}, {args.rounds} rounds",
                file=sys.stderr,
                flush=True,
            )
            results[model] = launch_local(
                f"{Path(__file__).resolve()}:measure", nproc=args.ranks, args=(model, args.rounds, 3, part)
            )
        text = table(results, reference)
        print(text)
        if args.write:
            before, _, rest = args.write.read_text(encoding="utf-8").partition(f"<!-- {part} -->\n")
            after = rest.partition(f"<!-- /{part} -->")[2]
            page = f"{before}<!-- {part} -->\n{text}\n<!-- /{part} -->{after}"
            args.write.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
