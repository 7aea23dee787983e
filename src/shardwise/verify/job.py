"""What ``shardwise verify`` runs: a named model against one plain process, over local CPU ranks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.anatomy import read_anatomy
from shardwise.config.options import Parallel, Sharding
from shardwise.config.target import load_target
from shardwise.errors import ConfigError
from shardwise.layout import parse_layout
from shardwise.train.loss import call, next_token_loss
from shardwise.verify.compare import Report
from shardwise.verify.draws import drawing_modules
from shardwise.verify.oracle import Task
from shardwise.verify.run import Transformed, verify

__all__ = ["main"]

_LENGTH, _BATCH = 16, 2
_TECHNIQUES = [name for name in Parallel.__struct_fields__ if name not in ("layout", "precision")]


@dataclass(frozen=True)
class _Named:
    """A function known by its name, so that every rank can load it for itself."""

    text: str
    what: str

    def __call__(self, *args: Any) -> Any:
        return load_target(self.text, what=self.what)(*args)


@dataclass(frozen=True)
class _Evaluating:
    """A function of a module, in eval mode."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build().eval()


def main(
    model: str,
    layout: str,
    *,
    batch: str | None = None,
    loss: str | None = None,
    steps: int = 3,
    accumulate: int = 2,
    parallel: Parallel,
    small_units: bool = False,
) -> int:
    """Compares and prints the outcome; 0 if equal. Raises VerifyError, which names the first tensor that differs.

    Args:
        model: "pkg.mod:fn", returns the module.
        layout: without -1.
        batch: "pkg.mod:fn", takes the index of a micro-batch and returns it (``str -> Tensor``); None: random tokens, for
            a module that takes ``input_ids`` and has an embedding.
        loss: "pkg.mod:fn", as TrainStep takes it; None: cross entropy of aligned labels.
        steps: optimizer steps.
        accumulate: micro-batches per rank and step.
        parallel: the techniques; its layout and precision are not used.
        small_units: compare once more with every block a unit of its own, where parameters are cut: more can go wrong there.
    """
    _say("loading the model")
    build: Callable[[], nn.Module] = _Named(model, "MODEL")
    num_ranks = 1
    for degree in parse_layout(layout).values():
        num_ranks *= degree
    make: Callable[[int], dict[str, Tensor]] = _Named(batch, "--batch") if batch else _tokens_for(build())
    windows = [[make(s * 1000 + i) for i in range(num_ranks * accumulate)] for s in range(steps)]
    print(
        f"comparing {num_ranks} ranks ({layout}) with one process: {steps} steps, {accumulate} micro-batches per rank"
    )
    sums = _Named(loss, "--loss") if loss else next_token_loss
    build, why = _without_dropout(build, parallel.transforms, windows, sums)
    if why:
        print(why)
    options = {name: getattr(parallel, name) for name in _TECHNIQUES}
    report = verify(build, layout, batches=windows, loss=sums, say=_say, **options)
    _print(report)
    if small_units and report.engine == "fsdp2" and _has_blocks(build, parallel.transforms):
        _say("once more, with every block a unit")
        options["sharding"] = Sharding(min_unit_bytes=0)
        again = verify(build, layout, batches=windows, loss=sums, say=_say, **options)
        _print(again)
    return 0


def _has_blocks(build: Callable[[], nn.Module], transforms: Any) -> bool:
    with torch.device("meta"):
        return bool(read_anatomy((Transformed(build, transforms) if transforms else build)()).lists)


def _print(report: Report) -> None:
    for kind, worst in report.worst.items():
        where = f" in {worst.name}, step {worst.step}" if worst.err else ""
        print(f"  {kind:<10} largest difference {worst.err:.1e}{where}")
    print(f"equal: {report}")


def _say(text: str) -> None:
    print(f"... {text}", flush=True)


def _without_dropout(
    build: Callable[[], nn.Module], transforms: Any, windows: Any, loss: Any
) -> tuple[Callable[[], nn.Module], str]:
    """``build``, in eval mode where the module draws random numbers in training alone; and what to say of it."""
    evaluating = _Evaluating(build)

    def drawing(make: Callable[[], nn.Module]) -> list[str]:
        make = Transformed(make, transforms) if transforms else make
        return drawing_modules(Task(make, windows, loss, None, call))

    names = drawing(build)
    if not names or drawing(evaluating):
        return build, ""
    told = ", ".join(name or "the model's own forward" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return evaluating, (
        f"in eval mode: in training, random numbers are drawn in {told}{more}, others on each side "
        "(batch norm, if any, uses its running statistics)"
    )


def _tokens_for(module: nn.Module) -> Callable[[int], dict[str, Tensor]]:
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None or "input_ids" not in inspect.signature(module.forward).parameters:
        raise ConfigError(
            f"{type(module).__name__} without --batch",
            why="its forward takes no input_ids, or it has no embedding, so there is nothing to guess a batch from",
            fix="pass --batch pkg.mod:fn, a function of an index that returns a mapping of tensors with labels",
        )
    vocab = embedding.num_embeddings

    def tokens(index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, vocab, (_BATCH, _LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : index % _LENGTH] = -100  # unequal token counts: equal ones hide the commonest faults
        return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}

    return tokens
