"""What changes in the code of a module, as data: from options to one :class:`Edit` per module changed, with its reason.

Each technique has its rule here and its act in ``parallel``. Targets are resolved to names of modules now, so that a
target that means nothing is an error before anything happens, and the recipe says what will.
"""

from collections.abc import Sequence
from typing import Any

from shardwise.config.options import Compile, Remat
from shardwise.errors import PlanError
from shardwise.recipe.records import Anatomy, Edit, Unit
from shardwise.recipe.targets import modules_named, refuse_nested, with_forward

__all__ = ["make_edits"]


def make_edits(
    anatomy: Anatomy, *, remat: Remat | None, compile: Compile | None, units: Sequence[Unit]
) -> tuple[Edit, ...]:
    """The edits of the techniques asked for, in the order in which they are carried out.

    Raises:
        PlanError: a target that means no module, targets inside each other, or techniques that undo each other.
    """
    rematted, compiled = _remat_edits(anatomy, remat), _compile_edits(anatomy, compile)
    if remat is not None and compile is not None:
        _refuse_together(remat, compile, rematted, compiled)
    gathered = [module for unit in units for module in unit.modules if module]
    for edit in compiled:
        inner = next((module for module in gathered if module.startswith(f"{edit.module}.")), None)
        if inner is not None:
            raise PlanError(
                f"Compile(targets=...): {edit.module!r}, which holds the unit {inner!r}",
                why="a unit is gathered by code that runs around it and cannot be compiled, so a compiled parent breaks apart",
                fix=f"compile {inner!r} and its like, or make {edit.module!r} the unit: Sharding(units=({edit.module!r},))",
                name=edit.module,
            )
    return (*rematted, *compiled)


def _remat_edits(anatomy: Anatomy, remat: Remat | None) -> tuple[Edit, ...]:
    if remat is None:
        return ()
    args: dict[str, Any] = {"mode": remat.mode}
    if remat.mode == "selective":
        args["save"] = list(remat.save)
        what = f"run again in backward, but for {', '.join(remat.save)}"
    else:
        args["offload"] = remat.offload
        what = "run again in backward" + (", its inputs kept in host memory" if remat.offload else "")
    targets = _resolve(anatomy, remat.targets, remat.every, "Remat")
    each = f"; the first of every {remat.every}" if remat.every > 1 else ""
    return tuple(
        Edit(module=name, technique="remat", action="checkpoint", args=args, why=f"{what}: {why}{each}")
        for name, why in targets
    )


def _compile_edits(anatomy: Anatomy, compile: Compile | None) -> tuple[Edit, ...]:
    if compile is None:
        return ()
    keys = ("backend", "mode", "dynamic", "fullgraph", "activation_memory_budget")
    args = {key: getattr(compile, key) for key in keys}
    return tuple(
        Edit(module=name, technique="compile", action="compile", args=args, why=f"compiled by {compile.backend}: {why}")
        for name, why in _resolve(anatomy, compile.targets, 1, "Compile")
    )


def _refuse_together(remat: Remat, compile: Compile, rematted: Sequence[Edit], compiled: Sequence[Edit]) -> None:
    """Raises where a module is changed in two ways of which one would undo the other."""
    pairs = [(a.module, b.module) for a in rematted for b in compiled if _overlap(a.module, b.module)]
    inside = next((pair for pair in pairs if pair[1].startswith(f"{pair[0]}.")), None)
    budget = compile.activation_memory_budget
    if pairs and remat.offload:
        raise PlanError(
            "Remat(offload=True) with Compile",
            why="a compiled block keeps what backward needs by itself, and nothing of it can be moved to the host",
            fix="leave offload out, or compile other modules",
            name=pairs[0][0],
        )
    if pairs and budget is not None and budget < 1:
        raise PlanError(
            f"Remat with Compile(activation_memory_budget={budget})",
            why="both decide what a block runs again in backward, and what remat marks goes before the budget",
            fix="leave remat out where the budget decides, or leave the budget out",
            name=pairs[0][0],
        )
    if inside is not None and remat.mode == "selective":
        raise PlanError(
            f"selective Remat of {inside[0]!r} with Compile of {inside[1]!r} in it",
            why="operators inside compiled code are not seen from outside it, so none of their results would be kept",
            fix="give both the same targets",
            name=inside[0],
        )


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


# ---- targets ---------------------------------------------------------------------------------------------------------


def _resolve(anatomy: Anatomy, targets: str | tuple[str, ...], every: int, record: str) -> list[tuple[str, str]]:
    """``(module, why)`` of what ``targets`` mean, in the order of the module, of each list the first of ``every``."""
    if isinstance(targets, str):
        found = {block: "a block of an outermost list" for blocks in anatomy.lists for block in blocks.blocks}
        if not found:
            raise PlanError(
                f"{record} of the blocks of {anatomy.module_class}",
                why="no list of blocks was found in it",
                fix=f"name the modules: {record}(targets={_some_class(anatomy)!r})",
            )
    else:
        found = {
            name: f"named by {pattern!r}"
            for pattern in targets
            for name in modules_named(anatomy, pattern, f"{record}(targets=({pattern!r},))")
        }
    runnable = {name: why for given, why in found.items() for name in with_forward(anatomy, given, record)}
    order = [name for name in anatomy.classes if name in runnable]
    refuse_nested(order, f"{record}(targets={targets!r})", "one is inside the other, and would be changed twice")
    seen: dict[str, int] = {}
    chosen = []
    for name in order:
        home = name.rpartition(".")[0]
        if seen.setdefault(home, 0) % every == 0:
            chosen.append((name, runnable[name]))
        seen[home] += 1
    return chosen


def _some_class(anatomy: Anatomy) -> tuple[str, ...]:
    classes = [cls for name, cls in anatomy.classes.items() if name and name not in anatomy.containers]
    return (max(sorted(set(classes)), key=classes.count),) if classes else ("Block",)
