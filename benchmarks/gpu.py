"""Measures training steps on one CUDA device beside plain torch and peers: time, memory, how long the device is busy.

    python benchmarks/gpu.py                           # prints a table; five minutes on an H100
    python benchmarks/gpu.py --write PAGE       # and puts it into the page
    python benchmarks/gpu.py --device cpu --small      # whether it runs, without a device

A Llama of 1.1 B parameters (transformers' code) in bf16 with float32 weights: windows of two micro-batches of 4 x 2048 tokens, clipping
by norm, fused AdamW. Every contender starts from the same weights and takes the same batches, one after another in one process; the
losses of its first windows must be those of plain torch within bf16's rounding. Time is the median of windows that are timed one
by one, each up to the end of its kernels. The device is busy while a kernel runs, seen by a profiler in a window of its own.
"""

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import shardwise as sw

__all__ = ["CONTENDERS", "main", "measure", "table"]

LR, NORM = 1e-4, 1.0
Step = Callable[[list[dict[str, Tensor]]], float]


class Size(NamedTuple):
    """Of the model, and of a window."""

    hidden: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    ffn: int = 5632
    vocab: int = 32000
    batch: int = 4
    length: int = 2048
    micro: int = 2

    def build(self, device: torch.device) -> nn.Module:
        """The same weights each time, drawn on the device: a second instead of ten."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            use_cache=False,
        )
        with device:
            return LlamaForCausalLM(config)

    def windows(self, device: torch.device) -> Iterator[list[Any]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            window = []
            for _ in range(self.micro):
                ids = torch.randint(0, self.vocab, (self.batch, self.length + 1), generator=generator)
                host = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
                # As a Loader gives it: labels are counted on the host.
                window.append(sw.MicroBatch({name: value.to(device) for name, value in host.items()}, host=host))
            yield window


class Result(NamedTuple):
    """Seconds of each timed window, seconds that the device was busy in one, bytes at the peak, losses of the first windows."""

    seconds: list[float]
    busy: float
    peak: int
    losses: list[float]


# ---- plain torch ---------------------------------------------------------------------------------------------------


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")


def _plain_step(module: nn.Module, optim: torch.optim.Optimizer, cast: Callable[[], Any]) -> Step:
    def step(window: list[dict[str, Tensor]]) -> float:
        tokens = sum(batch["labels"].numel() for batch in window)
        total = torch.zeros((), device=window[0]["labels"].device)
        for number, batch in enumerate(window):
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(number == len(window) - 1)  # type: ignore[operator]
            with cast():
                loss = _loss(module(input_ids=batch["input_ids"]).logits, batch["labels"]) / tokens
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), NORM)
        optim.step()
        optim.zero_grad()
        return float(total)

    return step


@contextlib.contextmanager
def plain(size: Size, device: torch.device, *, compiled: bool = False, checkpointed: bool = False) -> Iterator[Step]:
    module = size.build(device)
    if checkpointed:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    _compile_blocks(module, compiled)
    yield _plain_step(module, _adamw(module, device), lambda: torch.autocast(device.type, torch.bfloat16))


@contextlib.contextmanager
def fsdp2(size: Size, device: torch.device, *, compiled: bool = False) -> Iterator[Step]:
    with sw.init("dp_shard=1", device=device.type) as world:
        module = size.build(device)
        _compile_blocks(module, compiled)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = world.mesh["dp_shard"] if world.mesh.ndim > 1 else world.mesh
        for block in module.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        yield _plain_step(module, _adamw(module, device), contextlib.nullcontext)


def _compile_blocks(module: nn.Module, compiled: bool) -> None:
    for block in module.model.layers if compiled else ():  # type: ignore[union-attr]
        block.compile()


def _adamw(module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, fused=device.type == "cuda")


# ---- peers, and ours -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def accelerated(size: Size, device: torch.device) -> Iterator[Step]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu", gradient_accumulation_steps=size.micro)
    module = size.build(device)
    module, optim = accelerator.prepare(module, _adamw(module, device))

    def step(window: list[dict[str, Tensor]]) -> float:
        tokens, total = sum(batch["labels"].numel() for batch in window), 0.0
        for batch in window:
            with accelerator.accumulate(module):
                loss = _loss(module(input_ids=batch["input_ids"]).logits, batch["labels"]) / tokens
                accelerator.backward(loss * size.micro)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), NORM)
                optim.step()
                optim.zero_grad()
                total = total + loss.detach()
        return float(total)

    yield step
    accelerator.free_memory()


@contextlib.contextmanager
def fabric(size: Size, device: torch.device) -> Iterator[Step]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    module = size.build(device)
    module, optim = fabric.setup(module, _adamw(module, device))

    def step(window: list[dict[str, Tensor]]) -> float:
        tokens, total = sum(batch["labels"].numel() for batch in window), 0.0
        for number, batch in enumerate(window):
            with fabric.no_backward_sync(module, enabled=number < len(window) - 1):
                loss = _loss(module(input_ids=batch["input_ids"]).logits, batch["labels"]) / tokens
                fabric.backward(loss)
            total = total + loss.detach()
        fabric.clip_gradients(module, optim, max_norm=NORM)
        optim.step()
        optim.zero_grad()
        return float(total)

    yield step


@contextlib.contextmanager
def trainer(size: Size, device: torch.device, *, compiled: bool = False) -> Iterator[Step]:
    """The Trainer's own loop, in a thread: it waits before each step until it is asked for one."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    go, done, losses = threading.Semaphore(0), threading.Semaphore(0), []
    stopped = threading.Event()

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for window in size.windows(torch.device("cpu")):
                for batch in window:
                    labels = batch["labels"]
                    yield {"input_ids": batch["input_ids"], "labels": labels, "shift_labels": labels}

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            go.acquire()
            losses.clear()
            control.should_training_stop = stopped.is_set()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            losses[:] = [float(sum(losses))]
            done.release()
            control.should_training_stop = stopped.is_set()

    class Kept(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=10**6,
            gradient_accumulation_steps=size.micro,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=NORM,
            bf16=True,
            use_cpu=device.type == "cpu",
            torch_compile=compiled,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            # The batches are whole already.
            per_device_train_batch_size=1,
        )
        run = Kept(
            size.build(device),
            options,
            train_dataset=Batches(),
            data_collator=lambda rows: rows[0],
            callbacks=[Turns()],
        )
        run.remove_callback(PrinterCallback)
        failures: list[BaseException] = []

        def train() -> None:
            try:
                run.train()
            except BaseException as error:  # shown by the thread that waits for the step
                failures.append(error)
            finally:
                done.release()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()

        def step(window: list[dict[str, Tensor]]) -> float:
            go.release()
            done.acquire()
            if failures:
                raise failures[0]
            return losses[0]

        yield step
        stopped.set()
        go.release()
        thread.join(timeout=60)


@contextlib.contextmanager
def ours(size: Size, device: torch.device, *, fused: bool = False, **options: Any) -> Iterator[Step]:
    with sw.init("dp_shard=1", device=device.type) as world:
        module = sw.parallelize(size.build(device), world, precision="bf16", **options)
        step = sw.TrainStep(module, _adamw(module, device), loss=sw.next_token_loss, max_grad_norm=NORM, fused=fused)
        yield lambda window: step(window).loss


def _no_options(**options: Any) -> Callable[[Size, torch.device], Any]:
    return lambda size, device: ours(size, device, **options)


CONTENDERS: dict[str, Callable[[Size, torch.device], Any]] = {
    "plain torch: autocast": plain,
    "plain torch: autocast, blocks compiled": lambda size, device: plain(size, device, compiled=True),
    "plain torch: FSDP2 per block": fsdp2,
    "plain torch: FSDP2 per block, compiled": lambda size, device: fsdp2(size, device, compiled=True),
    "accelerate in bf16": accelerated,
    "Fabric in bf16-mixed": fabric,
    "transformers Trainer in bf16": trainer,
    "transformers Trainer with `torch_compile` in bf16": lambda size, device: trainer(size, device, compiled=True),
    "Shardwise": _no_options(),
    'Shardwise, `compile="blocks"`': _no_options(compile="blocks"),
    'Shardwise, `compile="blocks"`, `fused=True`': _no_options(compile="blocks", fused=True),
    "plain torch: autocast, Hugging Face's gradient checkpointing": lambda size, device: plain(
        size, device, checkpointed=True
    ),
    'Shardwise, `remat="full"`': _no_options(remat="full"),
}
REFERENCE = next(iter(CONTENDERS))


# ---- the measurement -----------------------------------------------------------------------------------------------


def measure(name: str, size: Size, device: torch.device, rounds: int, warmup: int = 3) -> Result:
    """One contender, alone on the device, after ``warmup`` windows."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    windows, seconds = size.windows(device), []
    with CONTENDERS[name](size, device) as step:
        losses = [step(window) for window in itertools.islice(windows, warmup)]  # the first ones compile
        for window in itertools.islice(windows, rounds):
            _wait(device)
            start = time.perf_counter()
            step(window)
            _wait(device)
            seconds.append(time.perf_counter() - start)
        busy = _busy(lambda: step(next(windows)), device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Result(seconds, busy, peak, losses)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _busy(run: Callable[[], object], device: torch.device) -> float:
    """Seconds in which at least one kernel ran."""
    if device.type != "cuda":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9


def table(found: dict[str, Result | str], size: Size) -> str:
    """A Markdown table: medians over the windows, also as a ratio to plain torch."""
    tokens = size.batch * size.length * size.micro
    lines = [
        "| | window, ms | ratio | device busy, ms | tokens/s | peak, GiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    first = found[REFERENCE]
    for name, result in found.items():
        if isinstance(result, str):
            lines.append(f"| {name} | {result} | | | | |")
            continue
        middle = statistics.median(result.seconds)
        ratio = "" if isinstance(first, str) else f"{middle / statistics.median(first.seconds):.2f}"
        lines.append(
            f"| {name} | {1000 * middle:.0f} | {ratio} | {1000 * result.busy:.0f} | {tokens / middle:,.0f} | {result.peak / 2**30:.1f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns 1 if a contender's losses are not those of plain torch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the command (cuda)")
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--rounds", type=int, default=8, help="timed windows of each contender (8)")
    parser.add_argument("--warmup", type=int, default=3, help="windows of each contender before them (3)")
    parser.add_argument("--only", help="words of the names of contenders, with commas; plain torch is always run")
    parser.add_argument("--write", type=Path, help="a page whose <!-- gpu --> part is replaced by the table")
    args = parser.parse_args(argv)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    size = Size(64, 2, 4, 2, 96, 128, 2, 16) if args.small else Size()
    torch.set_float32_matmul_precision("high")
    words = (args.only or "").split(",")
    found: dict[str, Result | str] = {}
    for name in CONTENDERS:
        if name != REFERENCE and not any(word in name for word in words):
            continue
        try:
            found[name] = measure(name, size, device, args.rounds, args.warmup)
        except ImportError as error:
            found[name] = f"not installed: {error.name}"
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    wanted = found[REFERENCE]
    assert isinstance(wanted, Result)
    for name, result in found.items():
        for mine, want in zip(result.losses if isinstance(result, Result) else (), wanted.losses, strict=False):
            if not abs(mine - want) <= 0.01 * abs(want):
                print(f"{name}: its losses are {result.losses}, not {wanted.losses}", file=sys.stderr)  # type: ignore[union-attr]
                return 1
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    text = f"{where}, PyTorch {torch.__version__}\n\n{table(found, size)}"
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- gpu -->\n")
        after = rest.partition("<!-- /gpu -->")[2]
        args.write.write_text(f"{before}<!-- gpu -->\n{text}\n<!-- /gpu -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
