"""Measures LoRA adapters beside PEFT's: sums over tp, bytes that a rank holds, and the time of a step.

    python benchmarks/lora.py                                # prints three tables; some minutes on 2 cores, needs peft
    python benchmarks/lora.py --write docs/adapters.md       # and puts them into the page
    python benchmarks/lora.py --only compiled --write docs/adapters.md    # compiled blocks: three minutes, needs a C++ compiler
    python benchmarks/lora.py --only bf16 --write docs/adapters.md        # a model of 56 million parameters beside float64

Before anything is counted or timed, one step of each contender in fp64 has the adapters of one of PEFT in one process, to 1e-12.
*Sums* are all-reduces of activations over the two ranks of ``tp=2`` in the forward and backward of a micro-batch. *Bytes* are those of
parameters, gradients and optimizer state (AdamW) after a step. *Times* are of one process: a forward, a backward and AdamW. Times of
*compiled* blocks are those of the processor, compilers that it starts included, with inductor's caches off.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.launch import launch_local
from shardwise.run.memory import state_bytes
from shardwise.techniques.tp import act, exchanges

__all__ = [
    "BYTES", "COMPILED", "SUMS", "bf16_table", "compiled_table", "measure_bf16", "measure_bytes", "measure_compiled", "measure_sums",
    "measure_times", "table",
]  # fmt: skip

VOCAB, RANK, ALPHA = 64, 4, 8.0
SUMS = (
    "without adapters, norms trained",
    "`lora=sw.LoRA(...)`",
    "`sw.LoRA(dora=True)`",
    "PEFT's modules, then `parallelize`",
)
LAYOUTS = ("dp_shard=1", "dp_shard=2", "dp_shard=4", "tp=2", "dp_shard=2,tp=2")
BYTES: Mapping[str, dict[str, Any]] = {
    "all parameters trained": {},
    'all parameters, `precision="bf16"`': {"precision": "bf16"},
    "`lora=sw.LoRA(rank=8)`": {"lora": sw.LoRA(rank=8)},
    '`lora=sw.LoRA(rank=8)`, `precision="bf16"`': {"lora": sw.LoRA(rank=8), "precision": "bf16"},
    'and `quantize="nf4"`': {"lora": sw.LoRA(rank=8), "precision": "bf16", "quantize": "nf4"},
}
COMPILED = [*BYTES][:1] + [*BYTES][2:]
LARGE = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 10, "num_attention_heads": 10,
         "num_key_value_heads": 5, "vocab_size": 8192, "use_cache": False}  # 56 million parameters  # fmt: skip
ROUNDED = ("dp_shard=1", "dp_shard=2", "tp=2")


def _build(kind: str, width: int = 32, num_layers: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "GPT-2":
        sizes = {"n_embd": width, "n_layer": num_layers or 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False, **sizes))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "use_cache": False}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": num_layers or 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _with_peft(module: nn.Module, *, dora: bool = False, rank: int = RANK) -> nn.Module:
    """PEFT's model, its adapters drawn."""
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that Conv1D is turned
        made = peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    return made


def _batch(num: int, length: int = 16) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (num, length + 1), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(input_ids=batch["input_ids"])


def _ours(name: str) -> str:
    """A name of PEFT's model as the model's own."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _step_of_peft(kind: str, dora: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Names and values, of the model's own names, before and after a step of SGD in one process, in float64."""
    model = _with_peft(_build(kind).double(), dora=dora)
    before = {_ours(name): value.clone() for name, value in model.state_dict().items()}
    batch = _batch(4)
    (_loss(_forward(model, batch), batch) / batch["labels"].numel()).backward()
    torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1.0).step()
    return before, {_ours(name): value for name, value in model.state_dict().items()}


# ---- sums over tp -----------------------------------------------------------------------------------------------------


class _Sums:
    """Within: counts sums of activations over tp, and of what DoRA's norms are made of. A module that is sharded within is counted."""

    def __enter__(self) -> "_Sums":
        self.number, self._inner = 0, exchanges.sum_over
        exchanges.sum_over = act.sum_over = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        exchanges.sum_over = act.sum_over = self._inner

    def _counted(self, tensor: Tensor, group: str) -> Tensor:
        self.number += 1
        return self._inner(tensor, group)


def measure_sums(kind: str) -> dict[str, int]:
    """On two ranks: contender -> sums over tp of a micro-batch."""
    found, batch = {}, _batch(4)
    for name in SUMS:
        dora = "dora" in name
        before, after = _step_of_peft(kind, dora)
        module, options = _build(kind).double(), {}
        if "lora=" in name or dora:
            options["lora"] = sw.LoRA(rank=RANK, alpha=ALPHA, dora=dora)
        elif "PEFT" in name:
            module = _with_peft(module)
        else:
            for key, param in module.named_parameters():
                param.requires_grad_("norm" in key or "ln_" in key)
        with sw.init("tp=2", device="cpu") as world, _Sums() as counted:
            model = sw.parallelize(module, world, example={"input_ids": batch["input_ids"]}, **options)
            if options:
                sw.load_full_state_dict(model, before)
            optim = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1.0)
            sw.TrainStep(model, optim, loss=_loss, forward=_forward)([batch])
            state = sw.full_state_dict(model)
            if world.is_main and "without" not in name:
                _close({_ours(key): value for key, value in state.items()}, after, f"{kind}: {name}")
            counted.number = 0
            with sw.accumulate(model, is_last=False):
                (_loss(_forward(model, batch), batch) / batch["labels"].numel()).backward()
            found[name] = counted.number
    return found


def _close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    for name, value in wanted.items():
        apart = float((found[name] - value).abs().max())
        if not apart < 1e-12:
            raise AssertionError(f"{what}: {name} is off by {apart:.1e} from PEFT in one process")


# ---- bytes ------------------------------------------------------------------------------------------------------------


def measure_bytes(layout: str, width: int = 128) -> dict[str, int]:
    """On the ranks of a layout: contender -> bytes of this rank after a step."""
    found = {}
    with sw.init(layout, device="cpu") as world:
        for name, options in BYTES.items():
            batch = _batch(2)
            build: Callable[[], nn.Module] = lambda: _build("Llama", width, 4)  # noqa: E731
            model = sw.parallelize(build, world, example={"input_ids": batch["input_ids"]}, **options)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
            sw.TrainStep(model, optim, loss=_loss, forward=_forward)([batch])
            found[name] = state_bytes(model, optim)[0]
    return found


# ---- the time of a step -----------------------------------------------------------------------------------------------


def measure_times(rounds: int, width: int = 256, warmup: int = 3) -> dict[str, list[float]]:
    """In one process: contender -> seconds of a step, turn by turn."""
    seconds: dict[str, list[float]] = {}
    batch = _batch(8, 64)
    with sw.init(device="cpu") as world:
        example = {"input_ids": batch["input_ids"]}
        steps: dict[str, Callable[[], Any]] = {
            "PEFT, a plain loop": _plain_step(_with_peft(_build("Llama", width, 4), rank=8), batch)
        }
        for name, options in (("`lora=sw.LoRA(rank=8)`", {"lora": sw.LoRA(rank=8)}), ("all parameters trained", {})):
            model = sw.parallelize(_build("Llama", width, 4), world, example=example, **options)
            optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
            step = sw.TrainStep(model, optim, loss=_loss, forward=_forward)
            steps[name] = lambda step=step: step([batch])
        for turn in range(warmup + rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= warmup:
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return seconds


def _plain_step(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)

    def step() -> None:
        (_loss(_forward(model, batch), batch) / batch["labels"].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

    return step


# ---- compiled blocks --------------------------------------------------------------------------------------------------


def measure_compiled(rounds: int, width: int = 256) -> dict[str, dict[str, float]]:
    """In one process, for each of ``COMPILED``: ``compile``, seconds of the first compiled step; ``plain`` and ``compiled``, those of a
    later one, the median; ``graphs``, ``breaks``."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    config.compile_threads, config.force_disable_caches = 1, True
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with sw.init(device="cpu") as world:
        for name in (COMPILED[0], *COMPILED):  # the first has what is compiled once: twice
            torch._dynamo.reset()
            counters.clear()
            steps = {
                how: _step_of(world, width, BYTES[name], {} if how == "plain" else {"compile": "blocks"})
                for how in ("plain", "compiled")
            }
            start = _processor()
            steps["compiled"]()
            seconds: dict[str, list[float]] = {"compile": [_processor() - start]}
            for _ in range(rounds):
                for how, step in steps.items():
                    start = time.process_time()
                    step()
                    seconds.setdefault(how, []).append(time.process_time() - start)
            breaks = sum(counters["graph_break"].values())
            found[name] = {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}
            found[name] |= {how: statistics.median(each) for how, each in seconds.items()}
    return found


def _step_of(world: sw.World, width: int, *options: Mapping[str, Any]) -> Callable[[], Any]:
    batch = _batch(8, 64)
    given = {key: value for each in options for key, value in each.items()}
    model = sw.parallelize(_build("Llama", width, 4), world, example={"input_ids": batch["input_ids"]}, **given)
    optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    step = sw.TrainStep(model, optim, loss=_loss, forward=_forward)
    return lambda: step([batch])


def _processor() -> float:
    """Seconds of the processor that this process and those it has waited for have taken, to a hundredth."""
    return sum(os.times()[:4])


def compiled_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """What was measured, as a table."""
    first = found[COMPILED[0]]
    lines = [
        "| blocks compiled, one process | first step, s | ratio | graph breaks | a step, ms | not compiled, ms | ratio of these |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, of in found.items():
        lines.append(
            f"| {name} | {of['compile']:.1f} | {of['compile'] / first['compile']:.2f} | {of['breaks']:.0f} | {of['compiled'] * 1e3:.0f} | "
            f"{of['plain'] * 1e3:.0f} | {of['compiled'] / of['plain']:.2f} |"
        )
    return "\n".join(lines)


# ---- bf16 beside float64 ----------------------------------------------------------------------------------------------


def measure_bf16(layout: str, has_adapters: bool, exact: bool, sizes: Mapping[str, Any] = LARGE) -> list[list[float]]:
    """On the ranks of a layout: loss and norm of six steps in bf16, or (``exact``) in float64; two samples each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    tokens = torch.randint(sizes["vocab_size"], (12, 33), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {} if exact else {"precision": "bf16"}
    options |= {"lora": sw.LoRA(rank=16)} if has_adapters else {}
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        module, example = LlamaForCausalLM(LlamaConfig(**sizes)), {"input_ids": tokens[:1, :-1]}
        model = sw.parallelize(module.double() if exact else module, world, example=example, **options)
        drawn = {
            name: torch.randn(param.shape, generator=torch.Generator().manual_seed(i)) * 0.03
            for i, (name, param) in enumerate(sw.recipe_of(model).params.items())
            if ".lora_" in name
        }
        if drawn:
            sw.load_full_state_dict(model, drawn, strict=False, cast=True)
        optim = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        step, dp = sw.TrainStep(model, optim, loss=_loss, forward=_forward, max_grad_norm=1.0), world.axis("dp")
        found = []
        for i in range(0, len(tokens), 2):
            rows = [{"input_ids": row[None, :-1], "labels": row[None, 1:]} for row in tokens[i : i + 2]]
            out = step(rows[dp.rank :: dp.size])
            found.append([float(out.loss), float(out.grad_norm)])
    return found


def bf16_table(run: Callable[..., list[Any]], sizes: Mapping[str, Any] = LARGE) -> str:
    """How far losses and norms in bf16 are from those in float64: the mean of six steps. ``run(function, ranks, *args)``."""
    lines = [f'| `precision="bf16"`, off from float64 | {" | ".join(f"`{layout}`" for layout in ROUNDED)} |']
    lines.append(f"|---|{'--:|' * len(ROUNDED)}")
    for has_adapters, label in ((False, "all parameters trained"), (True, "`lora=sw.LoRA(rank=16)`")):
        exact = run("measure_bf16", 1, "dp_shard=1", has_adapters, True, sizes)[0]
        rows: dict[str, list[str]] = {"loss": [], "norm": []}
        for layout in ROUNDED:
            found = run("measure_bf16", 1 if layout == "dp_shard=1" else 2, layout, has_adapters, False, sizes)[0]
            for place, cells in enumerate(rows.values()):
                off = [abs(a[place] - b[place]) / b[place] for a, b in zip(found, exact, strict=True)]
                cells.append(f"{statistics.mean(off):.1e}")
        lines += [f"| {what}: {label} | {' | '.join(cells)} |" for what, cells in rows.items()]
    return "\n".join(lines)


# ---- tables -----------------------------------------------------------------------------------------------------------


def table(
    sums: Mapping[str, dict[str, int]], sizes: Mapping[str, dict[str, int]], times: Mapping[str, list[float]]
) -> str:
    """Three Markdown tables."""
    lines = [f"| sums over `tp=2` for a micro-batch | {' | '.join(sums)} |", f"|---|{'--:|' * len(sums)}"]
    lines += [f"| {name} | {' | '.join(str(found[name]) for found in sums.values())} |" for name in SUMS]
    lines += ["", f"| KiB on a rank: parameters, gradients, AdamW | {' | '.join(f'`{layout}`' for layout in sizes)} |"]
    lines.append(f"|---|{'--:|' * len(sizes)}")
    lines += [f"| {name} | {' | '.join(f'{found[name] / 1024:,.0f}' for found in sizes.values())} |" for name in BYTES]
    lines += ["", "| a step in one process | median, ms | middle half, ms | ratio |", "|---|--:|--:|--:|"]
    first = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        low, middle, high = (each * 1e3 for each in statistics.quantiles(found, n=4))
        lines.append(f"| {name} | {middle:.1f} | {low:.1f}-{high:.1f} | {middle / 1e3 / first:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each contender (30)")
    parser.add_argument("--only", choices=("lora", "compiled", "bf16"), default="lora", help="which tables (lora)")
    parser.add_argument(
        "--write", type=Path, help="a page whose part <!-- lora -->, or the like, is replaced by the tables"
    )
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds={args.rounds}: a median and a spread need at least 2")
    text = {"lora": _tables, "compiled": _compiled, "bf16": _bf16}[args.only](args.rounds)
    print(text)
    if args.write:
        mark, page = args.only, args.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"<!-- /{mark} -->")[2]
        args.write.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->{after}", encoding="utf-8")
    return 0


def _launched(function: str, nproc: int, *args: Any) -> list[Any]:
    return launch_local(f"{Path(__file__).resolve()}:{function}", nproc=nproc, args=args)


def _compiled(rounds: int) -> str:
    return compiled_table(_launched("measure_compiled", 1, rounds)[0])


def _bf16(_rounds: int) -> str:
    return bf16_table(_launched)


def _tables(rounds: int) -> str:
    sums = {
        label: _launched("measure_sums", 2, kind)[0]
        for label, kind in (("Llama, 3 blocks", "Llama"), ("GPT-2, 2 blocks", "GPT-2"))
    }
    sizes = {}
    for layout in LAYOUTS:
        nproc = torch.tensor([int(part.partition("=")[2]) for part in layout.split(",")]).prod().item()
        found = _launched("measure_bytes", int(nproc), layout)
        sizes[layout] = {name: max(rank[name] for rank in found) for name in BYTES}
    return table(sums, sizes, _launched("measure_times", 1, rounds)[0])


if __name__ == "__main__":
    sys.exit(main())
