"""Measures context parallelism: what blocks keep for backward on a rank, what attention sends, and the time of a step.

    python benchmarks/context.py                                       # prints four tables; some minutes on 2 cores
    python benchmarks/context.py --write docs/context-parallel.md      # and puts them into the page
    python benchmarks/context.py --proof --write docs/context-parallel.md      # the proof, of a model of 70B parameters

Before anything is counted or timed, losses and gradients of each contender are those of one process. *Kept* are the bytes of storages
that autograd keeps in the blocks of a rank, parameters left out. *Peak* is resident memory, as the system counts it. *Sent* are the bytes that a rank sends in the calls of attention of
a micro-batch, forward and backward, beside the formula. *Times* are of a forward and a backward on all ranks, beside one rank, and beside
plain torch with keys and values gathered by hand.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.launch import launch_local
from shardwise.techniques import row_exchanges as exchanges

__all__ = ["measure_kept", "measure_peak", "measure_proof", "measure_sent", "measure_times", "proof_table", "table"]

VOCAB, HEADS = 64, 4
METHODS = ("gather", "ulysses")


class Attention(nn.Module):
    """Causal attention with ``kv`` heads of keys; ``gathers``: by hand, over all ranks, of contiguous rows."""

    def __init__(self, width: int, kv: int):
        super().__init__()
        self.kv, self.size, self.gathers = kv, width // HEADS, False
        self.qkv, self.out = nn.Linear(width, width + 2 * kv * self.size), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, num, width = x.shape
        q, k, v = self.qkv(x).split([width, self.kv * self.size, self.kv * self.size], -1)
        q, k, v = (part.view(batch, num, -1, self.size).transpose(1, 2) for part in (q, k, v))
        mask = None
        if self.gathers:
            k, v = (torch.cat(dist_nn.all_gather(part.contiguous()), 2) for part in (k, v))
            rows = torch.arange(num) + dist.get_rank() * num
            mask = rows[:, None] >= torch.arange(k.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.kv < HEADS)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, kv: int):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, kv), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Words(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 32, kv: int = HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(Block(width, kv) for _ in range(num_blocks))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batch(length: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def _micro_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forward and backward of a micro-batch on every rank. Returns this rank's loss."""
    with sw.accumulate(model, is_last=False):
        loss = _loss(model(batch["input_ids"]), {"labels": sw.cut_sequence(model, batch["labels"])})
        (loss / batch["labels"].numel()).backward()
    return loss.detach()


def _refuse_wrong(world: sw.World, build: Callable[[], nn.Module], method: str, batch: dict[str, Tensor]) -> None:
    """Raises AssertionError unless a step in float64 gives what one process computes."""
    plain = build().double()
    (_loss(plain(batch["input_ids"]), batch) / batch["labels"].numel()).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    model = _parallel(world, build().double(), method, batch)
    sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=_loss)([batch])
    state = sw.full_state_dict(model)
    for name, value in plain.named_parameters() if world.is_main else ():
        apart = float((state[name] - value.detach()).abs().max())
        if not apart < 1e-12:
            raise AssertionError(f"{method}: {name} is off by {apart:.1e} from one process")


def _parallel(world: sw.World, module: nn.Module, method: str, batch: dict[str, Tensor]) -> nn.Module:
    options = {"context_parallel": method} if world.layout.cp > 1 else {}
    example = {"input_ids": batch["input_ids"][:, :24]}
    return sw.parallelize(module, world, example=example, sharding=sw.Sharding(engine="ddp"), **options)


# ---- kept -------------------------------------------------------------------------------------------------------------


class _Kept:
    """Counts what autograd keeps, each storage once, but for those of parameters."""

    def __init__(self, model: nn.Module):
        self._parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self._found: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self._found.append(x)
        return x

    @property
    def num_bytes(self) -> int:
        tensors = [x if isinstance(x, Tensor) else x.part for x in self._found]  # what is made again is kept as a part
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.is_floating_point()}
        return sum(each.nbytes() for place, each in storages.items() if place not in self._parameters)


def measure_kept(layout: str, method: str, length: int = 512) -> int:
    """Bytes that the blocks of this rank keep for the backward of one micro-batch."""
    with sw.init(layout, device="cpu") as world:
        batch = _batch(length)
        _refuse_wrong(world, Words, method, _batch(24))
        model = _parallel(world, Words(), method, batch)
        kept, inner = _Kept(model), exchanges.saved_tensors_hooks
        first, last = model.blocks[0], model.blocks[-1]
        within: list[Any] = []
        first.register_forward_pre_hook(lambda *_: within.append(saved_tensors_hooks(kept, lambda x: x).__enter__()))
        last.register_forward_hook(lambda *_: torch._C._autograd._pop_saved_tensors_default_hooks())
        exchanges.saved_tensors_hooks = lambda pack, unpack: inner(lambda x: kept(pack(x)), unpack)
        try:
            _micro_batch(model, batch)
        finally:
            exchanges.saved_tensors_hooks = inner
        return kept.num_bytes


def measure_peak(layout: str, method: str, length: int, num_blocks: int = 8, width: int = 256) -> float:
    """MiB by which the resident memory of this rank grows at most within a forward and backward."""
    with sw.init(layout, device="cpu") as world:
        batch = _batch(length)
        model = _parallel(world, Words(num_blocks, width), method, batch)
        _micro_batch(model, {key: value[:, :512] for key, value in batch.items()})  # what is made once
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is counted from here
        _micro_batch(model, batch)
        return _resident("VmHWM") - before


def _resident(what: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


# ---- sent -------------------------------------------------------------------------------------------------------------


class _Sent(TorchDispatchMode):
    """Within: counts the bytes that this rank sends to others along cp."""

    def __init__(self, size: int):
        super().__init__()
        self.num_bytes, self._size = 0, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        times = {"all_gather_into_tensor": self._size - 1, "reduce_scatter_tensor": (self._size - 1) / self._size}
        times["all_to_all_single"] = times["reduce_scatter_tensor"]
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name in times:
            self.num_bytes += int(args[0].numel() * args[0].element_size() * times[name])
        return func(*args, **(kwargs or {}))


def measure_sent(layout: str, method: str, kv: int = HEADS, length: int = 64) -> tuple[int, int]:
    """Bytes that attention sends from this rank in one micro-batch, and what the formula says."""
    with sw.init(layout, device="cpu") as world:
        size, batch = world.axis("cp").size, _batch(length)
        model = _parallel(world, Words(kv=kv), method, batch)
        _micro_batch(model, batch)
        with _Sent(size) as sent:
            _micro_batch(model, batch)
        queries = 4 * length // size * 32
        keys = 2 * queries * kv // HEADS
        blocks = len(model.blocks)
        each = 3 * (size - 1) * keys if method == "gather" else 4 * (size - 1) * (queries + keys // 2) // size
        return sent.num_bytes, blocks * each


# ---- times ------------------------------------------------------------------------------------------------------------


def measure_times(
    layout: str, method: str, length: int, rounds: int, num_blocks: int = 8, width: int = 128
) -> list[float]:
    """Seconds of forwards and backwards of one micro-batch. ``method`` ``"by hand"``: plain torch on the same ranks."""
    with sw.init(layout, device="cpu") as world:
        batch = _batch(length)
        build = lambda: Words(num_blocks, width)  # noqa: E731
        if method == "by hand":
            run = _by_hand(build(), world, batch)
        else:
            if method != "one rank":
                _refuse_wrong(world, Words, method, _batch(24))
            model = _parallel(world, build(), method, batch)
            run = lambda: _micro_batch(model, batch)  # noqa: E731
        seconds = []
        for turn in range(rounds + 1):
            world.barrier()
            start = time.perf_counter()
            run()
            if turn:
                seconds.append(time.perf_counter() - start)
        return seconds


def _by_hand(model: nn.Module, world: sw.World, batch: dict[str, Tensor]) -> Callable[[], Any]:
    warnings.simplefilter("ignore", FutureWarning)  # of torch's gather with gradients, which has no other public name
    for block in model.blocks:
        block.attention.gathers = True
    part = {key: value.chunk(world.size, 1)[world.rank] for key, value in batch.items()}

    def run() -> None:
        (_loss(model(part["input_ids"]), part) / batch["labels"].numel()).backward()
        model.zero_grad()

    return run


# ---- proof -----------------------------------------------------------------------------------------------------------


def measure_proof(length: int) -> tuple[float, float]:
    """Seconds of the processor, and GiB of resident memory beside what torch and transformers take, of the proof in the shapes of Llama 70B on
    meta, for ``cp=8`` and an example of so many positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.techniques.row_search import Search
    from shardwise.techniques.sequences import sequences_in

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=64, num_key_value_heads=8, **sizes))
    example = next(sequences_in(((), {"input_ids": torch.zeros(1, length, dtype=torch.long)})))
    before, start = _resident("VmRSS"), time.process_time()
    facts = Search(model, example, 8, "zigzag").run()
    assert facts.output == "rows" and len(facts.cut) == 80
    return time.process_time() - start, (_resident("VmHWM") - before) / 1024


def proof_table() -> str:
    """Its figures as a Markdown table."""
    lines = ["| proof in the shapes of Llama 70B, `cp=8`, on meta | s of the processor | GiB |", "|---|--:|--:|"]
    for length in (64, 4096):
        seconds, size = launch_local(f"{Path(__file__).resolve()}:measure_proof", nproc=1, args=(length,))[0]
        lines.append(f"| an example of {length:,} positions | {seconds:.0f} | {size:.1f} |")
    return "\n".join(lines)


# ---- tables -----------------------------------------------------------------------------------------------------------


def table(
    kept: Mapping[str, int],
    peak: Mapping[str, float],
    sent: Mapping[str, tuple[int, int]],
    times: Mapping[str, list[float]],
) -> str:
    """Four Markdown tables."""
    first = next(iter(kept.values()))
    lines = ["| kept for backward in blocks, on a rank | KiB | of one process |", "|---|--:|--:|"]
    lines += [f"| {name} | {num / 1024:,.0f} | {num / first:.3f} |" for name, num in kept.items()]
    lines += [
        "",
        "| peak of a forward and backward, beside what was there | MiB a rank | of one process |",
        "|---|--:|--:|",
    ]
    lines += [f"| {name} | {num:,.0f} | {num / next(iter(peak.values())):.2f} |" for name, num in peak.items()]
    lines += ["", "| sent by attention from a rank, in a micro-batch | bytes | formula |", "|---|--:|--:|"]
    lines += [f"| {name} | {num:,} | {told:,} |" for name, (num, told) in sent.items()]
    lines += ["", "| forward and backward | median, ms | middle half, ms | of one rank |", "|---|--:|--:|--:|"]
    one = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        low, middle, high = (each * 1e3 for each in statistics.quantiles(found, n=4))
        lines.append(f"| {name} | {middle:.0f} | {low:.0f}-{high:.0f} | {middle / 1e3 / one:.2f} |")
    return "\n".join(lines)


def _measured(length: int, longest: int, rounds: int) -> Iterator[tuple[str, str, Any]]:
    here = str(Path(__file__).resolve())

    def on(num: int, what: str, *args: Any) -> Any:
        layout = f"cp={num}" if num > 1 else "dp_shard=1"
        return launch_local(f"{here}:{what}", nproc=num, args=(layout, *args))

    for num in (1, 2, 4):
        for method in METHODS[: 1 + (num > 1)]:
            name = f"`cp={num}`, {method}" if num > 1 else "one process"
            yield "kept", name, max(on(num, "measure_kept", method))
            yield "peak", name, max(on(num, "measure_peak", method, longest))
    for num in (2, 4):
        for method in METHODS:
            for kv in (HEADS, 2) if method == "gather" or num == 2 else (HEADS,):
                yield (
                    "sent",
                    f"`cp={num}`, {method}, {kv} of {HEADS} heads of keys",
                    on(num, "measure_sent", method, kv)[0],
                )
    yield "times", "one rank", on(1, "measure_times", "one rank", length, rounds)[0]
    for num in (2, 4):
        for method in (*METHODS, "by hand"):
            found = on(num, "measure_times", method, length, rounds)
            name = f"{num} ranks, " + (
                "plain torch, gathered by hand" if method == "by hand" else f"`cp={num}`, {method}"
            )
            yield "times", name, [max(each) for each in zip(*found, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed micro-batches of each contender (5)")
    parser.add_argument("--length", type=int, default=4096, help="positions of a sequence that is timed (4096)")
    parser.add_argument(
        "--longest", type=int, default=8192, help="positions of a sequence of which the peak is taken (8192)"
    )
    parser.add_argument(
        "--proof", action="store_true", help="measure the proof alone, in the shapes of a model of 70B parameters"
    )
    parser.add_argument("--write", type=Path, help="a page whose <!-- context --> part is replaced by the tables")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    if args.proof:
        part, text = "proof", proof_table()
    else:
        found: dict[str, dict[str, Any]] = {"kept": {}, "peak": {}, "sent": {}, "times": {}}
        for kind, name, value in _measured(args.length, args.longest, args.rounds):
            found[kind][name] = value
        part, text = "context", table(**found)
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition(f"<!-- {part} -->\n")
        after = rest.partition(f"<!-- /{part} -->")[2]
        args.write.write_text(f"{before}<!-- {part} -->\n{text}\n<!-- /{part} -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
