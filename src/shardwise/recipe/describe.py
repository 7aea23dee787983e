"""A recipe as text: sharding units with sizes, what every rank holds, and the reason of each choice."""

import math
from collections.abc import Sequence

from shardwise.recipe.recipe import Recipe
from shardwise.recipe.records import DTYPE_BYTES, Edit, Param, human_bytes


def describe_recipe(recipe: Recipe, heading: Sequence[str] = ()) -> str:
    """The ``heading`` of the techniques, a table of units with sizes and reasons, then every note. Stable text."""
    layout = recipe.grid
    held = [recipe.at(rank).num_bytes() for rank in range(min(layout.size, 64))]
    full = sum(_param_bytes(recipe, name) for name in recipe.params)
    lines = [
        f"{recipe.module_class} on layout {layout} ({layout.size} rank{'s' if layout.size > 1 else ''}), "
        f"engine {recipe.engine}",
        f"parameters: {human_bytes(full)} in one process, at most {human_bytes(max(held))} per rank at rest",
        *heading,
        "",
    ]
    rows: list[tuple[str, ...]] = [("unit", "tensors", "size", "stored/computed/reduced", "reshard", "why")]
    for unit in recipe.units:
        names = [name for name, param in recipe.params.items() if param.unit == unit.name]
        dtypes = sorted({_dtypes(recipe.params[name]) for name in names})
        size = human_bytes(sum(_param_bytes(recipe, name) for name in names))
        rows.append((unit.name or "(root)", str(len(names)), size, ", ".join(dtypes), str(unit.reshard), unit.why))
    lines += _table(rows)
    tied = {name: param.aliases for name, param in recipe.params.items() if param.aliases}
    frozen = [name for name, param in recipe.params.items() if not param.trainable]
    lines += ["", *(f"tied: {name} = {' = '.join(aliases)}" for name, aliases in tied.items())]
    if frozen:
        lines.append(
            f"frozen: {len(frozen)} parameter{'s' if len(frozen) > 1 else ''} ({', '.join(frozen[:3])}{', ...' if len(frozen) > 3 else ''})"
        )
    lines += _edits(recipe)
    lines += [f"{note.name or '(root)'}: {'warning: ' if note.warns else ''}{note.why}" for note in recipe.notes]
    return "\n".join(lines).rstrip() + "\n"


def _edits(recipe: Recipe) -> list[str]:
    """One line for each group of modules that one technique changes for the same reason."""
    groups: dict[tuple[str, str], list[Edit]] = {}
    for edit in recipe.edits:
        groups.setdefault((edit.technique, edit.why), []).append(edit)
    lines = []
    for (technique, why), edits in groups.items():
        names = [edit.module for edit in edits]
        shared = {k: v for k, v in edits[0].args.items() if all(edit.args.get(k) == v for edit in edits)}
        told = {
            key: value
            for key, value in shared.items()
            if value not in (None, False, [], {}, *recipe.params) and not _is_nested(value)
        }
        given = ", ".join(f"{key}={value}" for key, value in told.items())
        count = f"{len(names)} module{'s' if len(names) > 1 else ''}"
        shown = ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]])
        lines.append(f"{technique}: {count} ({shown}): {why}" + (f" [{given}]" if given else ""))
    return lines


def _is_nested(value: object) -> bool:
    """Whether a value is made of lists or mappings: places and cuts, which a reader of the text cannot use."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, (list, dict)) for x in value))


def _param_bytes(recipe: Recipe, name: str) -> int:
    param = recipe.params[name]
    numel = 1
    for size in param.shape:
        numel *= size
    return numel * DTYPE_BYTES[param.storage]


def _dtypes(param: Param) -> str:
    if param.storage == param.compute == param.reduce:
        return param.storage
    return f"{param.storage}/{param.compute}/{param.reduce}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def bytes_computed(recipe: Recipe, num: int) -> int:
    """Bytes of so many numbers between layers: in the dtype that the largest parameter is computed with."""
    largest = max(recipe.params.values(), key=lambda param: math.prod(param.shape), default=None)
    return num * (4 if largest is None else DTYPE_BYTES[largest.compute])
