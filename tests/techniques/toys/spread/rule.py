"""Which parameters are spread, in the recipe."""

from shardwise.recipe import Cut
from shardwise.recipe.records import Record


class SpreadEntry(Record, frozen=True):
    """The layers whose rows are spread."""

    layers: tuple[str, ...] = ()


def rule(draft, facts, *, spread):
    if not spread or draft.layout.ep == 1:
        return
    layers = tuple(name for name, kind in draft.anatomy.classes.items() if kind == "Linear")
    for layer in layers:
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if name in draft.anatomy.params:
                draft.cut(name, Cut(axis="ep", dim=0))
    draft.entries["spread"] = SpreadEntry(layers=layers)
    draft.note("spread", f"{len(layers)} layers are spread over ep={draft.layout.ep}", option="spread")
