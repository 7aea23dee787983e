"""The rule of mixed precision: the dtypes of every parameter, and the casts in forward, for the recipe."""

from collections.abc import Mapping
from typing import Any

from shardwise.recipe import Draft
from shardwise.recipe.dtypes import HALVES
from shardwise.recipe.records import Record
from shardwise.techniques.precision.options import Precision
from shardwise.techniques.precision.regions import Regions


class PrecisionEntry(Record, frozen=True):
    """The recipe's data about precision, other than the dtypes of parameters."""

    compute: str | None = None  # compute dtype outside of parts; None: the dtype in which each parameter is stored
    output: str | None = None  # dtype of floating outputs; None: as computed
    cast_inputs: str = "root"


def rule(draft: Draft, _facts: Mapping[str, Any], *, precision: Precision) -> None:
    """Sets the dtypes of the draft's parameters.

    Raises:
        PlanError: a pattern that matches no module, or changes nothing; a tensor shared by modules of two precisions.
    """
    regions = Regions(draft.anatomy, precision)
    draft.dtypes |= {name: regions.dtypes(name) for name in draft.anatomy.params}
    draft.casting, draft.casting_in, draft.kept["precision"] = precision, regions.holding, regions
    draft.entries["precision"] = PrecisionEntry(
        compute=precision.compute, output=precision.output, cast_inputs=precision.cast_inputs
    )
    casts = _casts(draft, precision)
    if casts is not None:
        draft.needs_units.append(casts)


def edit(draft: Draft, *, precision: Precision) -> None:
    """Adds the casts to the recipe, and notes about the precision they lose."""
    regions: Regions = draft.kept["precision"]
    draft.edits_around += [*regions.edits(), *regions.casts_of(draft.units)]
    if precision.compute is None and precision.cast_inputs != "root":
        draft.note(
            "cast_inputs",
            f"{precision.cast_inputs!r} has no effect here: without compute no input of the model is cast",
            option="precision.cast_inputs",
        )
    _note_what_is_lost(draft, precision)


def _casts(draft: Draft, precision: Precision) -> str | None:
    """A cast that is asked for, as text; None if everything is computed and reduced in the dtype it is stored in."""
    if precision.output:
        return f"an output of {precision.output}"
    for name, fact in draft.anatomy.params.items():
        storage, compute, reduce = draft.dtypes[name]
        if compute != storage:
            return f"{name!r} stored in {storage} and computed in {compute}"
        if fact.trainable and reduce != storage:
            return f"{name!r} stored in {storage} and reduced in {reduce}"
    return None


def _note_what_is_lost(draft: Draft, precision: Precision) -> None:
    """Notes losses of precision that torch's own options ask for, and that nothing else would show."""
    trained = [draft.dtypes[name] for name, fact in draft.anatomy.params.items() if fact.trainable]
    halves = {dtypes.reduce for dtypes in trained if dtypes.reduce in HALVES}
    asked = {precision.reduce} | {dtypes.reduce for dtypes in trained if dtypes.storage not in HALVES}
    for dtype in sorted(halves & asked):
        bits, inf = HALVES[dtype], ", and sums above 65504 are inf" if dtype == "float16" else ""
        draft.note(
            "reduce",
            f"gradients are summed in {dtype}, over the ranks and over micro-batches, which keeps {bits} bits: a summand below "
            f'1/{2 ** (bits + 1)} of the sum is lost{inf}; reduce="fp32" keeps them, at twice the bytes of each reduction',
            option="precision.reduce",
            warns=True,
        )
    if precision.cast_inputs == "units":
        why = (
            f"units: floating inputs of every unit are cast to {precision.compute}, positions and masks among them; the first "
            "forward warns of those that change by it"
            if len(draft.units) > 1
            else "units: the root is the only unit, so it is as root"
        )
        draft.note("cast_inputs", why, option="precision.cast_inputs")
