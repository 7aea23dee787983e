"""Runs of a model whole, and on some rows of its sequences: see :mod:`shardwise.model.positions`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.model.attend import now
from shardwise.model.names import canonical_modules
from shardwise.model.positions import Rows
from shardwise.model.row_facts import Differs, Facts, Plan, Whole
from shardwise.model.row_gradients import Gradients
from shardwise.model.trial import Trial
from shardwise.model.unseen_calls import seen_by


def whole_run(
    trial: Trial,
    length: int,
    only: frozenset[str] | None = None,
    products_of: frozenset[str] = frozenset(),
    heads_over: int = 1,
    kind: "type[Rows] | None" = None,
    gradients: Gradients | None = None,
    plan: Plan | None = None,
) -> Whole:
    """Runs the model of a trial on all positions of its sequences, of ``length``. ``only``: the modules of which is kept what they have;
    None: all. ``products_of``: others of which factors are kept. ``heads_over``, ``kind``: as rows will be run."""
    whole = Whole(only, products_of)
    mode = (kind or Rows)(trial, whole, plan or Plan(), length, None, None, heads_over)
    mode.gradients = gradients
    _run(trial, mode)
    return whole


def run_on_rows(
    trial: Trial,
    whole: Whole,
    plan: Plan,
    length: int,
    rows: Tensor,
    known: Facts | None = None,
    heads_over: int = 1,
    kind: "type[Rows] | None" = None,
    gradients: Gradients | None = None,
) -> Facts:
    """Runs the model as the rank with these rows would. ``known``: facts that are followed; else they are looked for. ``heads_over``:
    attention is computed in so many parts of its heads, for all positions each. ``kind``: of the run, for other exchanges than those of
    attention."""
    mode = (kind or Rows)(trial, whole, plan, length, rows, known, heads_over)
    mode.gradients = gradients
    run_mode(trial, mode)
    return mode.facts


def run_mode(trial: Trial, mode: Rows) -> None:
    """Runs the model as a mode says; see :func:`run_on_rows`."""
    try:
        _run(trial, mode)
    except (Differs, ShardwiseError):
        raise
    except Exception as error:
        name = mode.frames[-1].name if mode.frames else ""
        raise Differs(name, f"it does not run on rows: {type(error).__name__}: {first_line(error)[:120]}") from error


def _run(trial: Trial, mode: Rows) -> None:
    """Runs the model within a mode, and compares its output, and what it keeps, with those of the whole run."""
    before = now.attends, now.rows
    if mode.gradients is not None:
        mode.gradients.begin(mode)
    mode.facts.masks_of_rows = mode._plan.masks_of_rows
    with _watched(trial.module, mode):
        try:
            now.attends, now.rows = mode, mode.rows_of_masks
            has_graph = mode.gradients is not None or not mode._whole.is_of_some
            with contextlib.nullcontext() if has_graph else _without_graph(), seen_by(mode):
                _, seen = trial.run_within(mode, has_gradients=trial.module.training, then=mode.run_backward)
        finally:
            now.attends, now.rows = before
            if mode.gradients is not None:
                mode.gradients.end()
    if mode.has_threads:
        raise UnsupportedError(
            "a model under cp that runs its modules in threads of its own",
            why="in which order they run, and where, is not the same on all ranks",
            fix="run them one after the other; or leave cp out for this model",
        )
    whole = mode._whole
    if mode._rows is None:
        whole.ends, whole.kept = seen.output, seen.kept
        whole.note_rewritten()
        return
    if len(seen.output) != len(whole.ends) or [n for n, _ in seen.kept] != [n for n, _ in whole.kept]:
        raise Differs("", "it returns, or keeps, other tensors")
    found = set[str]()
    ends = [("its output", x, y) for x, y in zip(seen.output, whole.ends, strict=True)]
    names = {name for name, _ in first_names(trial.module)}
    for (name, mine), (_, full) in zip(seen.kept, whole.kept, strict=True):
        if mine.is_floating_point() and mine.shape != full.shape:
            home = next((name[:end] for end in range(len(name), 0, -1) if name[:end] in names), "")
            raise Differs(home, f"{name or 'the model'} keeps a tensor of this rank's positions", is_kept=True)
        ends.append((f"what is kept in {name or 'the model'}", mine, full))
    for number, (what, mine, full) in enumerate(ends):
        mode._compare("", what, mine, full)
        # A table that is kept, without a gradient, says nothing of what is returned.
        if mine.is_floating_point() and (number < len(seen.output) or full.requires_grad):
            found.add("rows" if mine.shape != full.shape else "whole")
    if len(found) > 1:
        raise Differs("", "a part of what it returns or keeps is of rows, and another of all positions")
    mode.facts.output = next(iter(found), "")


def _without_graph() -> saved_tensors_hooks:
    """Within: nothing is kept for a backward, which would be the activations of all blocks. Code that takes gradients itself differs."""

    def refuse(_: Any) -> Any:
        raise Differs("", "its forward takes gradients, which is not tried where many blocks are run at once")

    return saved_tensors_hooks(lambda _: None, refuse)


def first_names(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each module once, under its first canonical name."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, child in canonical_modules(module):
        found.setdefault(id(child), (name, child))
    return list(found.values())


@contextlib.contextmanager
def _watched(module: nn.Module, mode: Rows) -> Iterator[None]:
    """Within: ``mode`` sees the calls of all modules."""
    handles = []

    def before(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if mode.is_elsewhere():
                return None
            with mode.noting():
                return mode.before(name, args, kwargs)

        return hook

    def after(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if mode.is_elsewhere():
                return None
            with mode.noting():
                output = mode.after(name, output)
                mode.refuse_backward_hooks(name, (args, kwargs), output)
                return output

        return hook

    def in_hooks(begins: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not mode.is_elsewhere():
                mode.in_hooks(begins=begins)

        return hook

    try:
        for name, child in first_names(module):
            child_handles = (
                child.register_forward_pre_hook(in_hooks(True), prepend=True),
                child.register_forward_pre_hook(before(name), with_kwargs=True),
                child.register_forward_hook(in_hooks(False), prepend=True),
                child.register_forward_hook(after(name), with_kwargs=True),
            )
            handles += child_handles
        yield
    finally:
        for handle in handles:
            handle.remove()
