"""Weights in: each rank reads the bytes of its own pieces, straight into its shards.

In this order: names, shapes and dtypes are matched, on every rank; only when all of them fit on all ranks the first byte
is copied. A read that fails after that leaves a model that refuses to be used until it is loaded whole.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.anatomy import dtype_of
from shardwise.errors import CheckpointError, ShardwiseError, UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.values import scatter_values
from shardwise.state.boxes import Box, blocks
from shardwise.state.extra import extra_names, set_extra_states
from shardwise.state.files import BUFFER, OpenFiles
from shardwise.state.names import Matched, Rename, Wanted, match_names
from shardwise.state.report import LoadReport, shortened
from shardwise.state.source import open_source
from shardwise.state.stored import Source, Stored
from shardwise.state.together import together

__all__ = ["load_weights"]


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Rename = (),
    cast: bool = False,
    shared_files: bool = True,
    check_finite: bool = False,
) -> LoadReport:
    """Loads parameters and persistent buffers of a sharded model, from any layout into any layout. All ranks must call it.

    Each rank reads its own pieces, and no more, from files that every rank can see: no tensor is whole in memory, nothing
    travels. Either everything fits and is loaded, or nothing of the model has changed.

    Args:
        model: from ``parallelize``.
        source: a Hugging Face model directory, a safetensors file, a torch file, a DCP directory, or a state dict of whole
            tensors.
        strict: False: names that are missing, and names that are not the model's, are left out and told.
        rename: ``(regex, replacement)`` pairs, applied in order to the names of the source; a replacement of None leaves
            the tensor out. What wrappers add (``_orig_mod.``, ``module.``) and a prefix that all names share or lack
            (``model.``) are seen to without it.
        cast: True: values of another dtype than the model stores are converted; False: they are refused.
        shared_files: False: only rank 0 sees the source; it sends every rank its pieces.
        check_finite: True: values that are NaN or infinite are refused; everything is read twice.

    Raises:
        CheckpointError: on every rank; what is missing, does not fit, or cannot be read, by name and file.
        ConfigError: a ``rename`` that matches nothing.
        UsageError: ``source`` is neither a path nor a mapping.
        RankError: a rank does not come.

    Example:
        >>> report = load_weights(model, "checkpoints/llama")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        148 tensors from checkpoints/llama: 402.00 MiB on this rank, 0.21 s
    """
    start, runtime = time.perf_counter(), runtime_of(model)
    rules = _Rules(strict=strict, rename=rename, cast=cast, check_finite=check_finite)
    with OpenFiles() as files:
        if shared_files:
            report = _load_own_pieces(runtime, source, rules, files)
        else:
            report = _load_from_rank0(runtime, source, rules, files)
    return replace(report, seconds=time.perf_counter() - start)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    strict: bool
    rename: Rename
    cast: bool
    check_finite: bool


@dataclass(frozen=True)
class _Plan:
    """What will be loaded: everything has been checked."""

    report: LoadReport
    tensors: Mapping[str, Stored]
    extra: Mapping[str, Any]
    folder: Path | None

    @property
    def digest(self) -> str:
        """What has to be the same on every rank."""
        return repr([(name, stored.shape, stored.dtype) for name, stored in self.tensors.items()])


def _load_own_pieces(runtime: Runtime, source: Any, rules: _Rules, files: OpenFiles) -> LoadReport:
    world = runtime.world
    plan = together(
        world,
        "load_weights, matching names",
        lambda: _plan(runtime, source, rules, files, lambda name, tensor: _own_boxes(runtime, name, tensor)),
        same=lambda plan: plan.digest,
        differ=CheckpointError(
            "ranks that see different weights",
            why=f"what rank {world.rank} finds at {source if not isinstance(source, Mapping) else 'its state dict'} is not "
            "what others find",
            fix="put the same files on every node, or pass shared_files=False where rank 0 alone has them",
        ),
    )
    local = runtime.local_tensors()

    def read() -> None:
        for name, stored in plan.tensors.items():
            for piece in runtime.pieces(name, local[name]):
                stored.read(Box(piece.starts, piece.sizes), local[name][piece.local_index], files)

    before = files.num_bytes
    with _Unusable(runtime):
        _write_pending(runtime, plan.tensors)
        together(world, "load_weights, reading", read)
    _after(runtime, plan.extra, plan.folder)
    return replace(plan.report, num_bytes=files.num_bytes - before)


def _load_from_rank0(runtime: Runtime, source: Any, rules: _Rules, files: OpenFiles) -> LoadReport:
    world = runtime.world
    plan = together(
        world,
        "load_weights, matching names on rank 0",
        lambda: _plan(runtime, source, rules, files, _all_of),
        on_main=True,
    )
    told = (plan.report, list(plan.tensors), plan.extra, plan.folder) if plan is not None else None
    report, names, extra, folder = world.broadcast(told)
    pieces = _Pieces(plan.tensors if plan is not None else {}, files)
    local = runtime.local_tensors()

    with _Unusable(runtime):
        _write_pending(runtime, names)
        scatter_values(runtime, pieces, {name: local[name] for name in names})
        together(world, "load_weights, after rank 0 has sent", pieces.check, on_main=True)
    _after(runtime, extra, folder)
    return replace(report, num_bytes=sum(local[name].numel() * local[name].itemsize for name in names))


class _Pieces(Mapping[str, Any]):
    """Stored tensors that are indexed as tensors are; a read that fails gives zeros, so that the ranks that wait for it are
    served, and is told afterwards."""

    def __init__(self, tensors: Mapping[str, Stored], files: OpenFiles):
        self.tensors, self.files = tensors, files
        self.problem: ShardwiseError | None = None

    def __getitem__(self, name: str) -> "_Piece":
        return _Piece(self, self.tensors[name])

    def check(self) -> None:
        """Raises what went wrong, if anything did."""
        if self.problem is not None:
            raise self.problem

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class _Piece:
    pieces: _Pieces
    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def dim(self) -> int:
        return len(self.stored.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        box = Box(tuple(part.start for part in index), tuple(part.stop - part.start for part in index))
        if self.pieces.problem is None:
            try:
                return self.stored.load(self.pieces.files, box)
            except CheckpointError as error:
                self.pieces.problem = error
        return torch.zeros(box.sizes)


# ---- what fits --------------------------------------------------------------------------------------------------

Boxes = Callable[[str, Stored], list[Box]]  # of a tensor: what this rank looks at when values are checked


def _own_boxes(runtime: Runtime, name: str, stored: Stored) -> list[Box]:
    if name not in runtime.recipe.params:
        return _all_of(name, stored)
    return [Box(piece.starts, piece.sizes) for piece in runtime.view.extents(name)]


def _all_of(_: str, stored: Stored) -> list[Box]:
    return [Box((0,) * len(stored.shape), stored.shape)]


def _plan(runtime: Runtime, source: Any, rules: _Rules, files: OpenFiles, boxes: Boxes) -> _Plan:
    """Opens the source and checks everything that can be known before a byte is copied."""
    opened = open_source(source)
    recipe = runtime.recipe
    wanted = {name: Wanted(p.shape, p.storage, p.aliases) for name, p in recipe.params.items()}
    wanted |= {name: Wanted(b.shape, b.dtype, b.aliases) for name, b in recipe.buffers.items() if b.persistent}
    computed = [n for name, b in recipe.buffers.items() if not b.persistent for n in (name, *b.aliases)]
    matched = match_names(runtime.module, wanted, computed, opened, rules.rename)
    if isinstance(source, Mapping):
        states = extra_names(runtime.module)
        matched.missing += tuple(name for name in states if name not in opened.extra)
        matched.unexpected += tuple(name for name in opened.extra if name not in states)
    _refuse_unfit(matched, wanted, opened, rules)
    _refuse_untied(matched, opened, files, boxes)
    if rules.check_finite:
        _refuse_nonfinite(matched, opened, files, boxes)
    cast = {n: (s.dtype, wanted[n].dtype) for n, s in matched.tensors.items() if s.dtype != wanted[n].dtype}
    report = LoadReport(
        place=opened.place,
        num_tensors=len(matched.tensors),
        missing=matched.missing,
        unexpected=matched.unexpected,
        ignored=matched.ignored,
        renamed=tuple(matched.renamed),
        cast=cast,
    )
    ordered = {name: matched.tensors[name] for name in wanted if name in matched.tensors}
    return _Plan(
        report, ordered, {n: value for n, value in opened.extra.items() if n not in matched.unexpected}, opened.folder
    )


def _refuse_unfit(matched: Matched, wanted: Mapping[str, Wanted], source: Source, rules: _Rules) -> None:
    shapes = [n for n, s in matched.tensors.items() if s.shape != wanted[n].shape]
    if shapes:
        name = shapes[0]
        raise CheckpointError(
            f"{source.place}: shape {list(matched.tensors[name].shape)}{_called(matched, name)}",
            why=f"the model has {list(wanted[name].shape)} there{_and_more(len(shapes), 'do not fit')}",
            fix="build the model with the configuration of these weights; or leave tensors out: "
            'strict=False, rename=[("pattern", None)]',
            name=name,
        )
    dtypes = [n for n, s in matched.tensors.items() if not _may_be(s.dtype, wanted[n].dtype, cast=rules.cast)]
    if dtypes:
        name = dtypes[0]
        raise CheckpointError(
            f"{source.place}: dtype {matched.tensors[name].dtype}{_called(matched, name)}",
            why=f"the model stores {wanted[name].dtype}{_and_more(len(dtypes), 'differ')}",
            fix="pass cast=True to convert (between floating dtypes), or build the model in that dtype",
            name=name,
        )
    if rules.strict and (matched.missing or matched.unexpected):
        parts = []
        if matched.missing:
            parts.append(f"{len(matched.missing)} of {len(wanted)} tensors are missing: {shortened(matched.missing)}")
        if matched.unexpected:
            parts.append(f"{len(matched.unexpected)} there are not in the model: {shortened(matched.unexpected)}")
        raise CheckpointError(
            f"weights from {source.place}",
            why="; ".join(parts),
            fix='map names with rename=[("pattern", "replacement")], or pass strict=False to load what fits',
            name=(matched.missing or matched.unexpected)[0],
        )
    if not matched.tensors:
        raise CheckpointError(
            f"weights from {source.place}",
            why=f"none of its {len(source.tensors)} names is one of the model's: {shortened(list(source.tensors))}",
            fix='map names with rename=[("pattern", "replacement")]',
        )


def _may_be(there: str, here: str, *, cast: bool) -> bool:
    """Numbers are rounded where that is asked for; they never become integers, or lose an imaginary part."""
    a, b = dtype_of(there), dtype_of(here)
    both = (a.is_floating_point and b.is_floating_point) or (a.is_complex and b.is_complex)
    return there == here or (cast and both)


def _called(matched: Matched, name: str) -> str:
    return f" (called {matched.names[name]} there)" if matched.names[name] != name else ""


def _and_more(count: int, what: str) -> str:
    return f"; {count} tensors {what}" if count > 1 else ""


def _refuse_untied(matched: Matched, source: Source, files: OpenFiles, boxes: Boxes) -> None:
    """The model ties two names, and the source holds a tensor for each: they must be equal, or one would be lost."""
    for home, others in matched.doubles.items():
        first = matched.tensors[home]
        for name, other in others.items():
            if other.shape == first.shape and all(
                torch.equal(first.load(files, part), other.load(files, part).to(dtype_of(first.dtype)))
                for box in boxes(home, first)
                for part in blocks(box, BUFFER // 8)
            ):
                continue
            raise CheckpointError(
                f"{source.place}: {matched.names[home]} and {name} differ",
                why="the model ties these names: it has one tensor for both",
                fix=f"build the model without that tie, or leave one out: rename=[({'^' + name.replace('.', chr(92) + '.') + '$'!r}, None)]",
                name=home,
            )


def _refuse_nonfinite(matched: Matched, source: Source, files: OpenFiles, boxes: Boxes) -> None:
    for name, stored in matched.tensors.items():
        if not (dtype_of(stored.dtype).is_floating_point or dtype_of(stored.dtype).is_complex):
            continue
        for part in (part for box in boxes(name, stored) for part in blocks(box, BUFFER // 8)):
            values = stored.load(files, part)
            bad = values.numel() - int(torch.isfinite(values if values.itemsize > 1 else values.float()).sum())
            if bad:
                raise CheckpointError(
                    f"{source.place}: {bad} values that are NaN or infinite",
                    why="check_finite=True was asked for",
                    fix="use weights of an earlier step",
                    name=name,
                )


# ---- what happens to the model ----------------------------------------------------------------------------------


def _write_pending(runtime: Runtime, loaded: Any) -> None:
    """Values of a model that was built for loading and that the source does not have: its constructor's."""
    if runtime.pending is not None:
        runtime.pending.write_rest(runtime, [name for name in runtime.local_tensors() if name not in set(loaded)])
        runtime.pending = None


class _Unusable:
    """Within, and afterwards if it ends in an exception, the model refuses to be used: it is neither old nor new."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def __enter__(self) -> None:
        self.runtime.withhold(
            UsageError(
                "a model whose weights were not loaded whole",
                why="load_weights failed after it had begun to write: some tensors are new, others are not",
                fix="load it again; until then it cannot be used",
            )
        )

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        if kind is None:
            self.runtime.release()


def _after(runtime: Runtime, extra: Mapping[str, Any], folder: Path | None) -> None:
    """What comes with weights besides tensors."""
    runtime.loaded_from = folder.resolve() if folder is not None else None
    if extra:
        set_extra_states(runtime.module, extra)
