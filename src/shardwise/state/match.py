"""Matches stored weights to a model's tensors, and checks names, shapes and dtypes before any value is copied."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config.folders import found_in
from shardwise.config.tokenizer import read_json
from shardwise.errors import CheckpointError
from shardwise.parallel import Runtime
from shardwise.recipe.boxes import Box, whole
from shardwise.state.changed_rows import GrownTable, with_added_rows
from shardwise.state.extra_state import extra_names
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.match_names import Matched, Rename, Wanted, match_names
from shardwise.state.meaning import meaning_in, refuse_other_meaning
from shardwise.state.misfit_names import refuse_misfit_names
from shardwise.state.misfits import Boxes, Cast, refuse_none, refuse_nonfinite, refuse_unfit, refuse_untied
from shardwise.state.own_load import OwnLoad, match_own
from shardwise.state.own_values import refuse_own_methods
from shardwise.state.packed import DecodedTensor, as_bytes, packed_of, refuse_parts, with_packed
from shardwise.state.report import LoadReport, shortened
from shardwise.state.source import open_source
from shardwise.state.stored import Source, TensorSource, is_rounded, refuse_changed
from shardwise.techniques import fold
from shardwise.techniques.technique import PackedTensor


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The options of ``load_weights`` that say which names and dtypes are accepted."""

    strict: bool
    rename: Rename
    cast: Cast
    check_finite: bool
    rows: tuple[int, int] | None = None  # of a vocabulary that has grown: as stored, and in the model
    needs_own: bool = False  # parameters that techniques have added must be there too
    left: frozenset[str] = frozenset()  # tensors of the model that are not in the source, and are in place already
    buffers_as_stored: bool = False  # shapes and dtypes of buffers are the source's: a forward may have changed them


@dataclass(frozen=True)
class LoadPlan:
    """The checked plan of a load: which stored tensor goes to which tensor of the model."""

    report: LoadReport
    tensors: Mapping[str, TensorSource]
    to_pack: Mapping[str, TensorSource]  # plain values of weights that the model stores packed
    extra: Mapping[str, Any]
    folder: Path | None
    verified: bool  # checksums are compared when values are read
    own: OwnLoad | None  # what the modules' own methods make of what is stored; None: they have none

    def refuse_changed_files(self) -> None:
        if not self.verified:
            refuse_changed([*self.tensors.values(), *self.to_pack.values()])

    @property
    def digest(self) -> str:
        """A text that must be equal on every rank: names, shapes and dtypes."""
        found = [*self.tensors.items(), *self.to_pack.items()]
        return repr([(name, stored.shape, stored.dtype) for name, stored in found])


def own_boxes(runtime: Runtime, name: str, stored: TensorSource) -> list[Box]:
    if (packed := packed_of(runtime).get(name)) is not None:
        return [piece.box for piece, _ in packed.pieces(runtime.world.rank)]
    if name not in runtime.recipe.params:
        return all_of(name, stored)
    return [piece.box for piece in runtime.view.extents(name)]


def all_of(_: str, stored: TensorSource) -> list[Box]:
    """One box: the full tensor."""
    return [whole(stored.shape)]


def plan_of(
    runtime: Runtime,
    source: Any,
    rules: Rules,
    files: VerifiedFiles,
    boxes: Boxes,
    exact: Mapping[str, TensorSource] | None = None,
) -> LoadPlan:
    """Opens the source, and finds the stored tensor for each tensor of the model.

    Args:
        source: as for ``load_weights``, or already opened.
        rules: which names and dtypes may differ.
        files: reads values where two tensors must be compared.
        boxes: which parts of a tensor this rank compares.
        exact: canonical name -> its values, of tensors that are not stored as they are.
    """
    opened = _opened(source, rules, files)
    weights = {n: packed for n, packed in packed_of(runtime).items() if not rules.left & {*packed.parts.values()}}
    wanted = _wanted_of(runtime, weights, rules.left)
    matched, own = _match(runtime, opened, wanted, rules.rename, files)
    if exact:
        matched.tensors |= exact
        matched.names |= dict.fromkeys(exact, "a tensor of its own")
        matched.missing = tuple(name for name in matched.missing if name not in exact)
    if rules.buffers_as_stored:
        for name in runtime.recipe.buffers.keys() & matched.tensors.keys():
            wanted[name] = replace(wanted[name], shape=matched.tensors[name].shape, dtype=matched.tensors[name].dtype)
    _match_packed(runtime, matched, wanted, weights, opened)
    given = opened.extra if own is None else own.found.extra
    if isinstance(source, Mapping):  # the results of get_extra_state that it lacks, and those that no module takes
        states = extra_names(runtime.module)
        strange = opened.extra.keys() - states.keys() if own is None else own.found.unexpected
        matched.missing += tuple(name for name in states if name not in given)
        matched.unexpected += tuple(name for name in opened.extra if name in strange)
    for name, stored in matched.tensors.items():  # tables of a vocabulary that has grown get the rows of new tokens
        matched.tensors[name] = with_added_rows(stored, wanted[name].shape, rules.rows)
        doubles = matched.doubles.get(name, {})
        doubles |= {other: with_added_rows(each, wanted[name].shape, rules.rows) for other, each in doubles.items()}
    beside = _without_adapters(runtime, matched, opened, rules, files)
    plain = {name: matched.tensors[name] for name in weights if name in matched.tensors}  # packed as they are read
    for name, stored in plain.items():
        if is_rounded(stored.dtype):  # what is packed already is read as it is
            wanted[name] = replace(wanted[name], dtype=stored.dtype)
    # Weights beside which adapters are trained: they are not trained, and so are stored in the dtype that they are computed in.
    frozen = {n: p for n, p in runtime.recipe.params.items() if not p.trainable and fold.own_names(runtime.recipe)}
    rounded = {name for name, p in frozen.items() if p.storage in ("bfloat16", "float16")}
    refuse_unfit(matched, wanted, opened, cast=rules.cast, rounded=rounded)
    refuse_misfit_names(matched, wanted, opened, strict=rules.strict, drawn=_drawn(runtime, matched, weights))
    refuse_none(matched, opened)
    refuse_untied(matched, opened, files, boxes)
    if rules.check_finite:
        refuse_nonfinite(matched, opened, files, boxes)
    report = _report_of(matched, wanted, opened.place, rounded)
    report = replace(report, fresh=runtime.pending is not None, beside=beside, packed=tuple(plain))
    ordered = {name: matched.tensors[name] for name in wanted if name in matched.tensors and name not in weights}
    extra = {name: value for name, value in given.items() if name not in matched.unexpected}
    return LoadPlan(report, ordered, plain, extra, opened.folder, opened.verified is not None, own)


def _report_of(matched: Matched, wanted: Mapping[str, Wanted], place: str, rounded: set[str]) -> LoadReport:
    """What the report says of the tensors that were found. ``rounded``: those that the recipe stores in fewer bits."""
    cast = {n: (s.dtype, wanted[n].dtype) for n, s in matched.tensors.items() if s.dtype != wanted[n].dtype}
    return LoadReport(
        place=place,
        num_tensors=len(matched.tensors),
        missing=matched.missing,
        unexpected=matched.unexpected,
        ignored=matched.ignored,
        renamed=tuple(matched.renamed),
        cast=cast,
        rounded=tuple(sorted({cast[name] for name in rounded & cast.keys()})),
        grown=tuple(name for name, stored in matched.tensors.items() if isinstance(stored, GrownTable)),
        unpacked=tuple(name for name, stored in matched.tensors.items() if isinstance(stored, DecodedTensor)),
    )


def _opened(source: Any, rules: Rules, files: VerifiedFiles) -> Source:
    opened = source if isinstance(source, Source) else open_source(source)
    files.verify_with(opened.verified)
    settings = {} if opened.folder is None else read_json(opened.folder / "config.json").get("quantization_config")
    opened = with_packed(opened, settings if isinstance(settings, dict) and settings else None, files)
    if opened.left_base is not None and rules.strict:
        raise CheckpointError(
            f"weights from {opened.place}, which is without the frozen ones",
            why=f'it was saved with frozen="leave"; they are where the run has loaded them from: {opened.left_base}',
            fix=f"sw.load_weights(model, {opened.left_base!r}), and then sw.load_weights(model, {opened.place!r}, strict=False)",
        )
    return opened


def _wanted_of(runtime: Runtime, weights: Mapping[str, PackedTensor], left: Collection[str]) -> dict[str, Wanted]:
    """What the model's files may hold: its parameters and persistent buffers, and weights that it stores packed in both forms."""
    recipe = runtime.recipe
    wanted = {name: Wanted(p.shape, p.storage, p.aliases) for name, p in recipe.params.items()}
    wanted |= {
        name: Wanted(shape, dtype, recipe.buffers[name].aliases)
        for name, (shape, dtype) in runtime.saved_buffers().items()
    }
    wanted |= {name: Wanted(packed.shape, packed.dtype) for name, packed in weights.items()}
    return {name: want for name, want in wanted.items() if name not in left}


def _match(
    runtime: Runtime, source: Source, wanted: dict[str, Wanted], rename: Rename, files: VerifiedFiles
) -> tuple[Matched, OwnLoad | None]:
    buffers = runtime.recipe.buffers.items()
    computed = [name for home, b in buffers if not b.persistent for name in (home, *b.aliases)]
    if runtime.own_state is None:
        return match_names(runtime.module, wanted, computed, source, rename), None
    return match_own(runtime, wanted, computed, source, rename, files)


def _without_adapters(
    runtime: Runtime, matched: Matched, source: Source, rules: Rules, files: VerifiedFiles
) -> tuple[str, ...]:
    """Parameters that techniques have added and the source has none of, being of the model without them."""
    own_names = fold.own_names(runtime.recipe)
    if own_names and source.folder is not None and found_in(source.folder).keys() == {"adapter"}:
        raise CheckpointError(
            f"weights from {source.place}",
            why="it holds adapters, and not the base beside which they are",
            fix=f"load the base with sw.load_weights, then sw.load_adapter(model, {str(source.folder)!r})",
        )
    if any(name in matched.tensors for name in own_names):
        refuse_other_meaning(runtime.recipe, meaning_in(source, files), Path(source.place))
    lacks = tuple(name for name in own_names if name in matched.missing)
    if rules.needs_own or not lacks:
        return ()
    if len(lacks) == len(own_names):
        matched.missing = tuple(name for name in matched.missing if name not in lacks)
        return lacks
    if rules.strict:
        there = next(name for name in own_names if name in matched.tensors)
        raise CheckpointError(
            f"weights from {source.place}, with {len(own_names) - len(lacks)} of {len(own_names)} tensors of the adapters",
            why=f"{there} is there, and these are not: {shortened(lacks)}",
            fix="load weights with all of them or none; or pass strict=False, which leaves the others as they are",
            name=lacks[0],
            misfit="names",
        )
    return ()


def _drawn(runtime: Runtime, matched: Matched, weights: Mapping[str, PackedTensor]) -> list[str]:
    """Tensors that are missing and would stay as they were drawn, being not trained."""
    names = [
        name
        for name in matched.missing
        for part in (weights[name].parts.values() if name in weights else (name,))
        if part in runtime.frozen_draws and runtime.frozen_draws[part]()
    ]
    return [*dict.fromkeys(names)]


def _match_packed(
    runtime: Runtime, matched: Matched, wanted: dict[str, Wanted], weights: Mapping[str, PackedTensor], source: Source
) -> None:
    """Of each packed weight, leaves wanted and found the form that the source has: its parts, or plain values."""
    if not weights:
        fix = "store this model's weights so too: parallelize(..., quantize=); or write plain values from the model that has them"
        refuse_parts(source, fix=fix)
    other_form: set[str] = set()
    for name, packed in weights.items():
        names = [*packed.parts.values()]
        there, stored = [part for part in names if part in matched.tensors], matched.tensors.get(name)
        if stored is not None and there:
            raise CheckpointError(
                f"{source.place}: {matched.names[name]} and {matched.names[there[0]]}",
                why="they are the values of one weight in two forms, plain and packed",
                fix=f"leave one out: rename=[({'^' + re.escape(matched.names[name]) + '$'!r}, None)]",
                name=name,
                misfit="double",
            )
        if stored is not None and (parts := as_bytes(stored, packed)) is not None:
            matched.names |= dict.fromkeys(parts, matched.names[name])
            matched.tensors |= parts
            del matched.tensors[name]
            there = names
        if stored is None and not there and name not in {*matched.missing, *matched.ignored}:
            matched.missing += (name,)
        for other in [name] if there else names:
            del wanted[other]
            other_form.add(other)
    matched.missing = tuple(name for name in matched.missing if name not in other_form | matched.tensors.keys())
    if runtime.own_state is not None and any(name in matched.missing for name in weights):
        refuse_own_methods(runtime, "plain values loaded into")
