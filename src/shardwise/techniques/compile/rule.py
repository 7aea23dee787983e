"""Adds the modules to compile to the recipe, and refuses combinations that would undo the compilation."""

from collections.abc import Sequence

from shardwise.errors import PlanError
from shardwise.recipe import Draft, Edit
from shardwise.techniques.compile.options import Compile
from shardwise.techniques.targets import resolve


def edit(draft: Draft, *, compile: Compile | None) -> None:
    """Adds an edit for each module that is compiled.

    Raises:
        PlanError: a target that matches no module, targets inside each other, one that contains a unit, or one that
            runs again in backward (activation checkpointing) in a way that cannot be compiled.
    """
    if compile is None:
        return
    keys = ("backend", "mode", "dynamic", "fullgraph", "activation_memory_budget")
    args = {key: getattr(compile, key) for key in keys}
    compiled = [
        Edit(module=name, technique="compile", action="compile", args=args, why=f"compiled by {compile.backend}: {why}")
        for name, why in resolve(draft.anatomy, compile.targets, 1, "Compile")
    ]
    _refuse_running_again(compile, [edit for edit in draft.edits if edit.action == "checkpoint"], compiled)
    gathered = [module for unit in draft.units for module in unit.modules if module]
    for edit in compiled:
        inner = next((module for module in gathered if module.startswith(f"{edit.module}.")), None)
        if inner is not None:
            raise PlanError(
                f"Compile(targets=...): {edit.module!r}, which holds the unit {inner!r}",
                why="a unit is gathered by code that runs around it and cannot be compiled, so a compiled parent breaks apart",
                fix=f"compile {inner!r} and its like, or make {edit.module!r} the unit: Sharding(units=({edit.module!r},))",
                name=edit.module,
            )
    draft.edits += compiled


def _refuse_running_again(compile: Compile, again: Sequence[Edit], compiled: Sequence[Edit]) -> None:
    """Raises PlanError where a module is checkpointed and compiled in a combination in which one undoes the other."""
    overlapping = [(a, b) for a in again for b in compiled if _overlap(a.module, b.module)]
    pairs = [(a.module, b.module) for a, b in overlapping]
    keeps = [(a.module, b.module) for a, b in overlapping if a.args.get("save")]
    inside = next((pair for pair in keeps if pair[1].startswith(f"{pair[0]}.")), None)
    budget = compile.activation_memory_budget
    if any(a.args.get("offload") for a, _ in overlapping):
        raise PlanError(
            "Remat(offload=True) with Compile",
            why="a compiled block keeps what backward needs by itself, and nothing of it can be moved to the host",
            fix="leave offload out, or compile other modules",
            name=pairs[0][0],
        )
    if any(a.args.get("budget") for a, _ in overlapping):
        raise PlanError(
            "Remat(budget=) with Compile",
            why="what a block keeps is measured operator by operator, which compiled code does not show",
            fix='Compile(activation_memory_budget=0.5) without remat lets torch.compile choose, or remat="full"',
            name=pairs[0][0],
        )
    if pairs and budget is not None and budget < 1:
        raise PlanError(
            f"Remat with Compile(activation_memory_budget={budget})",
            why="both decide what a block runs again in backward, and what remat marks goes before the budget",
            fix="leave remat out where the budget decides, or leave the budget out",
            name=pairs[0][0],
        )
    if inside is not None:
        raise PlanError(
            f"selective Remat of {inside[0]!r} with Compile of {inside[1]!r} in it",
            why="operators inside compiled code are not seen from outside it, so none of their results would be kept",
            fix="give both the same targets",
            name=inside[0],
        )


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
