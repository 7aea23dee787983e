"""Refuses cuts of a parameter that are impossible, naming the parameter. Works on plain data."""

from shardwise.errors import PlanError
from shardwise.layout import ALL_AXES, Layout, overlap
from shardwise.recipe.cuts import num_chunks
from shardwise.recipe.records import Cut, Param, Part


def check_param(name: str, param: Param, layout: Layout) -> None:
    """Raises PlanError if a cut of ``param`` is impossible on ``layout``."""
    sizes = list(param.shape)
    seen: list[str] = []
    for cut in param.cuts:
        if cut.axis not in ALL_AXES:
            raise PlanError(
                f"a cut over axis {cut.axis!r}",
                why=f"axes are {', '.join(ALL_AXES)}",
                fix="cut over one of them",
                name=name,
            )
        if any(overlap(cut.axis, other) for other in seen):
            raise PlanError(
                f"two cuts over {cut.axis!r}",
                why="an axis can divide a parameter once: its ranks would hold no piece of their own",
                fix="cut over each mesh axis once",
                name=name,
            )
        seen.append(cut.axis)
        if not 0 <= cut.dim < len(param.shape):
            raise PlanError(
                f"a cut of dim {cut.dim}",
                why=f"the parameter has shape {param.shape}",
                fix=f"cut a dim below {len(param.shape)}",
                name=name,
            )
        if cut.holder is None:
            _check_parts(name, param, cut, sizes, layout.degree(cut.axis))
        elif cut.parts or not 0 <= cut.holder < layout.degree(cut.axis):
            raise PlanError(
                f"a cut that index {cut.holder} of {cut.axis}={layout.degree(cut.axis)} holds"
                + (" in parts" if cut.parts else ""),
                why="one rank along the axis holds all of the dim, and the others none",
                fix="name an index of the axis, and no parts",
                name=name,
            )


def _check_parts(name: str, param: Param, cut: Cut, sizes: list, degree: int) -> None:
    size = sizes[cut.dim]
    if cut.parts and (size is None or sum(part.size for part in cut.parts) != size):
        raise PlanError(
            f"parts of {[part.size for part in cut.parts]} on dim {cut.dim}",
            why=f"they must add up to its size, {size if size is not None else 'which an uneven cut made differ by rank'}",
            fix=f"give parts that sum to {size}, or none for the whole dim",
            name=name,
        )
    shared = any(part.replicas > 1 for part in cut.parts)
    for part in cut.parts:
        if part.replicas < 1 or degree % part.replicas or (shared and part.size % num_chunks(part, degree)):
            raise PlanError(
                f"a part of {part.size} with {part.replicas} replicas over {cut.axis}={degree}",
                why="replicas must divide the degree, and if one part is shared, every part must divide evenly: "
                "neighbours would hold overlapping pieces instead of the same one",
                fix=f"use sizes that are multiples of {degree}, or as many replicas as ranks",
                name=name,
            )
    if size is not None:
        parts = cut.parts or (Part(size=size),)
        even = all(part.size % num_chunks(part, degree) == 0 for part in parts)
        sizes[cut.dim] = sum(part.size // num_chunks(part, degree) for part in parts) if even else None
