"""What the act is to do, in the recipe."""

from shardwise.recipe.records import Record


class PositionsEntry(Record, frozen=True):
    """Whether two forwards run before their backwards."""

    in_pairs: bool = False


def rule(draft, _facts, *, positions):
    draft.entries["positions"] = PositionsEntry(in_pairs=positions)
