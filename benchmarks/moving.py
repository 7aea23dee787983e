"""Runs the scripts of examples/from, written for another library and for Shardwise, and compares their numbers.

Each script runs on two ranks (the plain one also on one), in float64, and leaves ``losses`` (one for each step), ``weights`` and
perhaps ``val_losses``. On samples with equally many labels the two must agree. Samples with 1 to 12 labels show which average a script
takes: they are also trained by a loop over whole batches of 16 in one process, which has no average to take::

    python benchmarks/moving.py                           # the tables of docs/moving.md
    python benchmarks/moving.py --write docs/moving.md
    python benchmarks/moving.py --trl --write docs/adapters.md     # losses beside TRL's, which the tests do without: needs trl 1.16
"""

import argparse
import contextlib
import importlib
import io
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "from"
NAMES = {
    "accelerate": "accelerate",
    "fabric": "Fabric",
    "fsdp2": "FSDP2 by hand",
    "trainer": "Trainer of transformers",
}
BATCH, EPOCHS, LR = 16, 2, 1e-2
Result = tuple[list[float], dict[str, torch.Tensor]]


@contextlib.contextmanager
def _prepared(uneven: bool) -> Iterator[Any]:
    """Within, numbers are float64, and the scripts' modules are those of their folder; ``uneven``: 1 to 12 labels a sample.
    Gives the module ``tiny``."""
    before, others = (
        torch.get_default_dtype(),
        {
            name: sys.modules.pop(name, None)
            for name in ("tiny", "tiny_llama", "tiny_adapter", "tiny_qlora", "tiny_trl")
        },
    )
    sys.path.insert(0, str(FOLDER))
    torch.set_default_dtype(torch.float64)
    try:
        tiny = importlib.import_module("tiny")
        if uneven:
            whole = tiny.samples()
            tiny.samples = lambda: [{**row, "labels": _fewer(row["labels"], i)} for i, row in enumerate(whole)]  # type: ignore[attr-defined]
        yield tiny
    finally:
        torch.set_default_dtype(before)
        sys.path.remove(str(FOLDER))
        for name, module in others.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def run_script(name: str, uneven: bool = False, changes: tuple[tuple[str, str], ...] = ()) -> Result:
    """On a rank: runs examples/from/NAME.py, with ``changes`` of its text. Returns the losses of its steps and its weights."""
    with _prepared(uneven), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of the libraries
        _reset_accelerate()
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            for old, new in changes:
                if old not in text:
                    raise ValueError(f"{name}.py has no {old!r}")
                text = text.replace(old, new)
            Path(f"{name}.py").write_text(text, encoding="utf-8")
            left = runpy.run_path(f"{name}.py", run_name="__main__")
        if "world" in left:
            left["world"].close()
        _reset_accelerate()
        losses = [*left["losses"], *left.get("val_losses", ())]
        return losses, {key: _full(value) for key, value in left["weights"].items()}


def run_whole(name: str) -> Result:
    """In one process, without micro-batches: the model of that script, on the samples with unequal numbers of labels."""
    with _prepared(uneven=True) as tiny:
        has_schedule = name in ("accelerate", "trainer")
        home: Any = importlib.import_module("tiny_llama") if name == "trainer" else None
        rows = home.conversations() if home else tiny.samples()
        torch.manual_seed(0)
        model = home.build() if home else tiny.Model()
        optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0 if home else 0.01)
        losses: list[float] = []
        num_steps = EPOCHS * len(rows) // BATCH
        for step in range(num_steps):
            part = rows[step * BATCH % len(rows) :][:BATCH]
            logits = model(torch.stack([row["input_ids"] for row in part]))
            labels = torch.stack([row["labels"] for row in part])
            if home:  # its labels are not shifted
                logits, labels = logits.logits[:, :-1], labels[:, 1:]
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optim.param_groups:
                group["lr"] = LR * (1 - step / num_steps if has_schedule else 1)
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses, {key: _full(value) for key, value in model.state_dict().items()}


def count_samples(kind: str, num: int = 45) -> list[int]:
    """On a rank: the samples of an epoch of ``num`` that this rank is given, in micro-batches of 4."""
    data = [{"input_ids": torch.tensor([i, i])} for i in range(num)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    if kind == "accelerate":
        from accelerate import Accelerator

        _reset_accelerate()
        batches: Any = list(Accelerator(cpu=True).prepare(loader))
        _reset_accelerate()
    elif kind == "fabric":
        from lightning_fabric import Fabric

        with contextlib.redirect_stdout(io.StringIO()):
            fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
            fabric.launch()
            batches = list(fabric.setup_dataloaders(loader))
    elif kind == "fsdp2":
        rank = int(os.environ["RANK"])
        sampler = torch.utils.data.DistributedSampler(data, 2, rank, shuffle=False)  # type: ignore[arg-type]
        batches = list(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    else:
        import shardwise as sw

        with sw.init("dp_shard=-1", device="cpu") as world:
            loader = sw.Loader(data, world, global_batch=16, micro_batch=4, shuffle=False, prepare=None)  # type: ignore[assignment]
            batches = [batch for window in loader for batch in window if not batch.padding]
    return [int(row[0]) for batch in batches for row in batch["input_ids"]]


def distance(first: Result, second: Result) -> float:
    """The largest difference of a weight."""
    if first[1].keys() != second[1].keys():
        raise ValueError(f"weights with other names: {sorted(first[1].keys() ^ second[1].keys())}")
    return max(float((first[1][key] - second[1][key]).abs().max()) for key in first[1])


UNCAST = (
    ("trainer = SFT", "kept = {id(param): param.data for param in model.parameters()}\ntrainer = SFT"),
    ("trainer.train()", "for param in model.parameters():\n    param.data = kept[id(param)]\ntrainer.train()"),
)
NOT_NESTED = ("double_quant=True", "double_quant=False")
TRL: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "LoRA: TRL": ("trl_before", ()),
    "LoRA: Shardwise, 2 ranks": ("peft_after", ()),
    "QLoRA: TRL, its adapters as they were, in float32": ("trlqlora_before", UNCAST),
    "QLoRA: Shardwise, 2 ranks": ("qlora_after", ()),
    "QLoRA: TRL as it is, which casts adapters to bfloat16": ("trlqlora_before", ()),
    "QLoRA: TRL, `bnb_4bit_use_double_quant=False`, its default": ("trlqlora_before", (*UNCAST, NOT_NESTED)),
}


def trl_table(run: Callable[..., list[Any]]) -> str:
    """The losses of TRL's SFTTrainer and of Shardwise, from the same adapters on the same samples."""
    lines = []
    for label, (name, changes) in TRL.items():
        losses = run(run_script, 2 if name.endswith("_after") else 1, name, False, changes)[0][0]
        lines.append(f"| {label} | {' | '.join(f'{loss:.6f}' for loss in losses)} |")
    steps = lines[0].count("|") - 2
    head = [f"| loss of step | {' | '.join(str(i + 1) for i in range(steps))} |", f"|---|{'--:|' * steps}"]
    return "\n".join(head + lines)


def uneven_rows(run: Callable[..., list[Any]], names: dict[str, str] = NAMES) -> dict[str, tuple[str, float, float]]:
    """Label -> (loss of the first step as text, distance of the losses, of the weights) from one process, for each script
    on two ranks. ``run(fn, ranks, *args)`` is that of a RankPool."""
    rows = {}
    for name, label in names.items():
        whole = run(run_whole, 1, name)[0]
        rows[f"{label}: one process, whole batches"] = (f"{whole[0][0]:.4f}", 0.0, 0.0)
        for part, who in (("before", f"{label}, 2 ranks"), ("after", "Shardwise, 2 ranks")):
            found = run(run_script, 2, f"{name}_{part}", True)[0]
            apart = max(abs(a - b) for a, b in zip(found[0], whole[0], strict=True))
            rows[f"{label}: {who}"] = (f"{found[0][0]:.4f}", apart, distance(found, whole))
    return rows


def uneven_table(rows: dict[str, tuple[str, float, float]]) -> str:
    lines = ["| scripts of | run | loss of step 1 | weights after 6 steps differ by |", "|---|---|--:|--:|"]
    for name, (loss, _, apart) in rows.items():
        label, _, who = name.partition(": ")
        below = next((bound for bound in ("1e-9", "1e-5") if apart < float(bound)), None)
        exact = "" if "whole" in who else f"less than {below}" if below else f"{apart:.4f}"
        lines.append(f"| {label} | {who} | {loss} | {exact} |")
    return "\n".join(lines)


def sample_table(run: Callable[..., list[Any]]) -> str:
    lines = ["| an epoch of 45 samples on 2 ranks | samples trained on | twice |", "|---|--:|---|"]
    for kind, label in {
        "accelerate": "accelerate, `prepare(loader)`",
        "fabric": "Fabric, `setup_dataloaders(loader)`",
        "fsdp2": "`DistributedSampler`",
        "ours": "`sw.Loader`",
    }.items():
        seen = sorted(index for part in run(count_samples, 2, kind) for index in part)
        twice = sorted({index for index in seen if seen.count(index) > 1})
        lines.append(f"| {label} | {len(seen)} | {', '.join(map(str, twice)) or 'none'} |")
    return "\n".join(lines)


def written(text: str, tables: dict[str, str]) -> str:
    """The page with these tables between their marks."""
    for name, table in tables.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not (begin and end):
            raise ValueError(f"the page has no place for the table {name!r}")
        text = head + begin + table + "\n" + end + tail
    return text


def main() -> None:
    import moving  # under its name, so that ranks find its functions

    from shardwise.testing import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="store_true", help="only the table of TRL, which must be installed")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    args = parser.parse_args()
    with RankPool(preload=["torch", "accelerate", "transformers"]) as pool:
        if args.trl:
            tables = {"trl": moving.trl_table(pool.run)}
        else:
            tables = {"uneven": uneven_table(moving.uneven_rows(pool.run)), "samples": moving.sample_table(pool.run)}
    print("\n\n".join(tables.values()))
    if args.write:
        args.write.write_text(written(args.write.read_text(encoding="utf-8"), tables), encoding="utf-8")


def _reset_accelerate() -> None:
    """Its state is one of the process, and would say in the next script that a process group is there."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def _fewer(labels: torch.Tensor, index: int) -> torch.Tensor:
    labels = labels.clone()
    labels[: index * 5 % 12] = -100
    return labels


def _full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()


if __name__ == "__main__":
    main()
