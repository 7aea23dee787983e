"""The job of ``shardwise verify``: a named model, sharded over local CPU ranks, compared with one plain process."""

import functools
import inspect
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.layout import parse_layout
from shardwise.model import read_anatomy
from shardwise.model.calling import call
from shardwise.run.train_config import MODEL_LOSS
from shardwise.step.loss import count_of, next_token_loss, with_count
from shardwise.step.model_loss import model_loss
from shardwise.techniques.fold import Prepared
from shardwise.verify.compare import Report, counted
from shardwise.verify.draws import drawing_modules, places_of
from shardwise.verify.named import CountOfLoss, Function, named_model, user_errors
from shardwise.verify.oracle import Task, cast_batches
from shardwise.verify.run import Reference, in_fresh_processes
from shardwise.verify.sharded import RankRecord, run_sharded, run_with_both_units

_LENGTHS, _BATCH = (16, 12, 8, 4), 2
_FIX_BATCH = "pass --batch pkg.mod:fn, a function of an index that returns a mapping of tensors with labels"
_KINDS = {"grad": "gradients", "param": "parameters", "loss": "loss", "grad_norm": "gradient norm", "buffer": "buffers"}


@dataclass(frozen=True)
class _Evaluating:
    """A function that builds a module and puts it in eval mode."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build().eval()


def main(
    model: str,
    layout: str,
    *,
    batch: str | None = None,
    loss: str | None = None,
    count: str | None = None,
    forward: str | None = None,
    steps: int = 3,
    accumulate: int = 2,
    fused: bool | str = False,
    parallel: Any,
    small_units: bool = False,
) -> int:
    """Compares the two runs and prints the result; returns 0 if they are equal.

    Args:
        model: "pkg.mod:fn", a function that returns the module; or a Hugging Face model directory.
        layout: a layout without -1.
        batch: "pkg.mod:fn", takes the index of a micro-batch and returns it (``str -> Tensor``); None: random tokens,
            for a module that takes ``input_ids`` and has an embedding.
        loss: "pkg.mod:fn", as TrainStep takes it; "model": the loss that the model returns; None: cross entropy of aligned labels.
        count: "pkg.mod:fn", as TrainStep takes it; None: the loss's own ``count``, else labels that are not -100.
        forward: "pkg.mod:fn", as TrainStep takes it; None: keys of the batch that the model's forward names.
        steps: optimizer steps.
        accumulate: micro-batches per rank and step.
        fused: as in ``TrainStep``, on the ranks.
        parallel: a ``Parallel``; its layout is not used.
        small_units: compare once more with every block as a separate unit, if parameters are sharded: more can go wrong
            there.

    Raises:
        VerifyError: with the name of the first tensor that differs.
        ConfigError: one of the names cannot be used; with the place where it failed.
    """
    _say("loading the model")
    build = named_model(model)
    num_ranks = math.prod(int(degree) for degree in parse_layout(layout).values())
    windows = _windows(build(), batch, [num_ranks * accumulate] * steps)
    sums: Any = model_loss if loss == MODEL_LOSS else Function(loss, "--loss") if loss else next_token_loss
    runs: Any = Function(forward, "--forward") if forward else call
    counts = _counts(sums, count, batch, windows[0][0])
    sums = with_count(sums, counts)
    _print(
        f"{counted(num_ranks, 'rank')} ({layout}) against one process: {counted(steps, 'step')}, "
        f"{accumulate} micro-batch{'' if accumulate == 1 else 'es'} per rank"
    )
    alone = "run it on one batch by itself until it works"
    fix = alone if batch else f"correct it, or give the batches it takes: {_FIX_BATCH}"
    with user_errors(
        f"MODEL={model!r}" + (f" with --batch {batch}" if batch else ""), "its forward, or the loss,", fix
    ):
        build = _without_dropout(build, parallel, windows, sums, runs)
    task = Task(Prepared(build, parallel), windows, sums, count_of(sums, counts), runs, fused=fused)
    reference = Reference(task, _say)
    _say(f"sharded: the same steps on {counted(num_ranks, 'rank')} (each loads torch, a few seconds)")
    is_twice = small_units and _has_blocks(build, parallel)
    for turn, records in enumerate(_turns(task, num_ranks, layout, parallel, is_twice=is_twice)):
        if turn:
            _say("the ranks ran them once more, with every block a unit")
        _print_report(reference.compared(records))
    return 0


def _turns(task: Task, num_ranks: int, layout: str, parallel: Any, *, is_twice: bool) -> list[list[RankRecord]]:
    """What the ranks have computed, by rank; ``is_twice``: and once more with every block a unit."""
    if is_twice:
        ranks = in_fresh_processes(run_with_both_units, num_ranks, task, layout, parallel)
        return [list(records) for records in zip(*ranks, strict=True)]
    return [in_fresh_processes(run_sharded, num_ranks, task, layout, parallel)]


def _windows(module: nn.Module, batch: str | None, sizes: list[int]) -> list[list[Mapping[str, Tensor]]]:
    """The micro-batches of each step, cast to the dtype of the comparison."""
    make: Callable[[int], Any] = Function(batch, "--batch") if batch else _tokens_for(module)
    windows = []
    with user_errors(f"--batch={batch!r}", "calling it with the index of a micro-batch", _FIX_BATCH):
        for step, size in enumerate(sizes):
            windows.append([make(step * 1000 + i) for i in range(size)])
    first = windows[0][0]
    if not isinstance(first, Mapping) or not all(isinstance(value, Tensor) for value in first.values()):
        raise ConfigError(
            f"--batch={batch!r}",
            why=f"it returned {type(first).__name__}, and a micro-batch maps names to tensors",
            fix=_FIX_BATCH,
        )
    return cast_batches(windows, torch.float64)


def _counts(sums: Any, count: str | None, batch: str | None, first: Mapping[str, Tensor]) -> Any:
    """The function that counts a micro-batch: the named one, or that of the loss; None: count its labels."""
    if count is not None:
        found: Any = Function(count, "--count")
    elif isinstance(sums, Function) and callable(getattr(sums.load(), "count", None)):
        found = CountOfLoss(sums)
    elif "labels" in first:
        return None
    else:
        raise ConfigError(
            f"--batch={batch!r}: a batch with the keys {sorted(first)} and no --count",
            why="the loss is divided by a number of tokens or samples, and nothing says how many this batch has",
            fix="pass --count pkg.mod:fn, a function of the batch (or a loss with .count), or let the batch have labels",
        )
    with user_errors(
        f"--count={count!r}" if count else f"--loss={sums.text!r}, its count", "calling it", "correct that line"
    ):
        float(torch.as_tensor(found(first)))
    return found


def _has_blocks(build: Callable[[], nn.Module], parallel: Any) -> bool:
    with torch.device("meta"):
        return bool(read_anatomy(Prepared(build, parallel)()).lists)


def _print_report(report: Report) -> None:
    _print("largest difference of the two runs, relative to the largest element:")
    for kind, worst in report.worst.items():
        where = f"  {worst.place}" if worst.err else ""
        print(f"  {_KINDS.get(kind, kind):<14} {worst.err:.1e}{where}")
    for line in str(report).splitlines():
        _print(line)


def _print(text: str) -> None:
    """Prints a text, wrapped to the width of the terminal."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    print(
        "\n".join(
            textwrap.wrap(
                text,
                width,
                subsequent_indent=" " * (len(text) - len(text.lstrip()) or 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    )


def _say(text: str) -> None:
    print(f"... {text}", flush=True)


def _without_dropout(
    build: Callable[[], nn.Module], parallel: Any, windows: Any, loss: Any, forward: Any
) -> Callable[[], nn.Module]:
    """``build``, in eval mode if the module draws random numbers only in train mode, which is said then."""
    evaluating = _Evaluating(build)

    def drawing(make: Callable[[], nn.Module]) -> list[str]:
        return drawing_modules(Task(Prepared(make, parallel), windows, loss, None, forward))

    names = drawing(build)
    if not names or drawing(evaluating):
        return build
    _print(
        f"in eval mode: in training, random numbers are drawn in {places_of(names)} (dropout?), and the ranks would draw other ones than the "
        "one process, so nothing could be equal; batch norm, if any, uses its running statistics"
    )
    return evaluating


def _tokens_for(module: nn.Module) -> Callable[[int], dict[str, Tensor]]:
    """Ids of tokens, as ``input_ids`` or as what the forward calls its first argument, at a length that the model takes."""
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    names = [*inspect.signature(module.forward).parameters]
    name = "input_ids" if "input_ids" in names or not names else names[0]
    makes = [functools.partial(_tokens, name, embedding.num_embeddings, n) for n in _LENGTHS] if embedding else []
    found = next((make for make in makes if _runs(module, make(0))), None)
    if found is None and (embedding is None or name != "input_ids"):
        raise ConfigError(
            f"{type(module).__name__} without --batch",
            why="it has no embedding of tokens, so there is nothing to guess a batch from"
            if embedding is None
            else f"random tokens were tried as {name}, what its forward takes first, and it does not run with them",
            fix=_FIX_BATCH,
        )
    return found or makes[0]  # whose error is shown where it is raised


def _tokens(name: str, vocab: int, length: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, vocab, (_BATCH, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : index % length] = -100  # unequal token counts: equal ones hide the most common faults
    return {name: ids[:, :-1].contiguous(), "labels": labels}


def _runs(module: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Whether a model takes a batch of this length: it may have fewer positions."""
    try:
        with torch.no_grad():
            call(module, batch)
    except Exception:  # for any reason: the run that follows raises it with its place
        return False
    return True
