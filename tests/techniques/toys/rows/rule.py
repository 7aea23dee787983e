"""Which parameters are cut, in the recipe."""

from shardwise.recipe import Cut, Edit
from shardwise.recipe.records import Record


class RowsEntry(Record, frozen=True):
    """Pairs of a norm and the layer behind it, whose rows are cut."""

    regions: tuple[tuple[str, str], ...] = ()


def rule(draft, facts, *, rows):
    if not rows:
        return
    regions = tuple(map(tuple, facts["regions"])) if draft.layout.pp > 1 else ()
    for _, linear in regions:
        for name in (f"{linear}.weight", f"{linear}.bias"):
            if name in draft.anatomy.params:
                draft.cut(name, Cut(axis="pp", dim=0))
    draft.entries["rows"] = RowsEntry(regions=regions)
    draft.note("rows", f"{len(regions)} layers are cut over pp={draft.layout.pp}", option="rows")


def edit(draft, *, rows):
    for norm, linear in draft.entries["rows"].regions if rows else ():
        why = "its rows are cut over pp"
        draft.edits.append(Edit(module=linear, technique="rows", action="cut", args={"norm": norm}, why=why))
