"""Plans that are given by name, as other libraries have them: what they ask for, and whether that is what can be cut.

A plan names layers. How these are cut (which rows of a fused layer a rank has, what lies between them) is found in the code
all the same, and proved; so a plan can leave layers whole, and cannot make anything wrong.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.config.target import load_target
from shardwise.errors import ConfigError, PlanError, UnsupportedError, UsageError
from shardwise.model.regions import Found
from shardwise.recipe import Anatomy
from shardwise.recipe.patterns import matches
from shardwise.recipe.targets import modules_named
from shardwise.techniques.tp.options import COLUMN, LLAMA, ROW, TABLE, TensorParallel, refuse_unknown_styles

__all__ = ["Wanted", "differences", "own_plan", "refuse_uncut", "wanted"]

Wanted = dict[str, str]
"""Weight -> "column", "row", "table" or "whole"."""


def wanted(module: nn.Module, anatomy: Anatomy, option: TensorParallel) -> Wanted | None:
    """What a plan asks for, by weight; None: all that can be cut.

    Raises:
        ConfigError: what the plan's name leads to is no plan.
        PlanError: a pattern that matches nothing, a module without a weight, or two styles for one weight.
        UsageError: the model has no plan of its own.
        UnsupportedError: a style of experts or sequences.
    """
    if option.plan == "auto":
        return None
    given = f"TensorParallel(plan={option.plan!r})" if isinstance(option.plan, str) else "TensorParallel(plan=...)"
    if option.plan == "llama":
        return _of_llama(anatomy, given)
    if option.plan == "hf":
        plan: Any = own_plan(module)
        if not plan:
            raise UsageError(
                f"{given} for a {type(module).__name__}",
                why="the model has no tp_plan",
                fix='leave it at "auto": what can be cut is found in the code',
            )
    else:
        plan = load_target(option.plan, what="TensorParallel.plan") if isinstance(option.plan, str) else option.plan
        plan = plan(module) if callable(plan) else plan
    if not isinstance(plan, Mapping):
        raise ConfigError(
            given,
            why=f"it is a {type(plan).__name__}, and no mapping of patterns to styles",
            fix='{"blocks.*.up": "colwise"}',
        )
    refuse_unknown_styles(plan)
    return _resolved(anatomy, plan, given)


def own_plan(module: nn.Module) -> dict[str, str]:
    """The plan that a Hugging Face model has; {}: it has none."""
    plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def _of_llama(anatomy: Anatomy, given: str) -> Wanted:
    known = {(pattern.rpartition(".")[2]): _kind(style) for pattern, style in LLAMA.items()}
    names = _canonical(anatomy)
    found = {
        names[f"{name}.weight"]: known[last]
        for name in anatomy.classes
        if (last := name.rpartition(".")[2]) in known and f"{name}.weight" in names
    }
    if not {"column", "row"} <= set(found.values()):
        raise PlanError(
            given,
            why="the model has no modules of these names (q_proj, o_proj, up_proj, down_proj, ...)",
            fix='leave it at "auto": what can be cut is found in the code',
        )
    return found


def _resolved(anatomy: Anatomy, plan: Mapping[str, str], given: str) -> Wanted:
    found: Wanted = {}
    for pattern, style in plan.items():
        kind = _kind(style)
        direct = _weights(anatomy, pattern)
        if not direct:
            modules = modules_named(anatomy, pattern, f"{given[:-1]}: {pattern!r})")
            direct = [weight for name in modules for weight in _weights(anatomy, f"{name}.*")]
        if not direct and kind != "whole":
            raise PlanError(
                f"{given[:-1]}: {pattern!r} is {style})",
                why="the modules that it matches have no weight of two dims themselves",
                fix="name the linear layers",
            )
        for weight in direct:
            before = found.setdefault(weight, kind)
            if {before, kind} == {"column", "table"}:  # a head that is tied to an embedding
                found[weight] = "table"
            elif before != kind:
                raise PlanError(
                    f"{given[:-1]}: {pattern!r} is {style})",
                    why=f"another pattern makes it {found[weight]}: a weight that is tied to it, or matched by both",
                    fix="let one pattern match it",
                    name=weight,
                )
    return found


def _weights(anatomy: Anatomy, pattern: str) -> list[str]:
    """Parameters of two dims or more whose name, or other name, a pattern matches."""
    return [
        canonical
        for name, canonical in _canonical(anatomy).items()
        if matches(name, "", pattern) and len(anatomy.params[canonical].shape) > 1
    ]


def _canonical(anatomy: Anatomy) -> dict[str, str]:
    """All names of parameters -> the first one."""
    return {other: name for name, fact in anatomy.params.items() for other in (name, *fact.aliases)}


def _kind(style: str) -> str:
    return "column" if style in COLUMN else "row" if style in ROW else "table" if style in TABLE else "whole"


def _cut(found: Found) -> Wanted:
    """What is cut, and how."""
    cut: Wanted = {}
    for region in found.regions:
        cut |= dict.fromkeys((*region.columns, *region.whole), "column") | dict.fromkeys(region.rows, "row")
    for table in found.tables:
        cut[table.weight] = "tied table" if table.heads and table.embeddings else "head" if table.heads else "embedding"
    return cut


_MEANT = {
    "column": ("column", "head", "tied table"),
    "row": ("row", "embedding"),
    "table": ("head", "embedding", "tied table"),
}
"""What a plan says -> how such a layer may be cut: an embedding's rows are its tokens, a head's outputs are."""


def _agrees(kind: str, cut: str | None) -> bool:
    """Whether a layer is cut as a plan says."""
    return cut is None if kind == "whole" else cut in _MEANT[kind]


def refuse_uncut(found: Found, plan: Wanted, degree: int) -> None:
    """Raises UnsupportedError for a layer that a plan cuts, and that cannot be cut so."""
    cut = _cut(found)
    for weight, kind in plan.items():
        if kind != "whole" and not _agrees(kind, cut.get(weight)):
            why = found.left.get(weight, "the example does not call it as a linear layer or an embedding")
            raise UnsupportedError(
                f"a plan in which this is {kind}-parallel over tp={degree}",
                why=_instead(cut[weight]) if weight in cut else why,
                fix='leave it out of the plan; or use plan="auto", which cuts what can be cut',
                name=weight,
            )


def _instead(cut: str) -> str:
    return (
        f"it would be {cut}-parallel"
        if cut in ("column", "row")
        else f"it would be cut as {'an' if cut[0] == 'e' else 'a'} {cut}"
    )


def differences(found: Found, anatomy: Anatomy, plan: Mapping[str, str]) -> list[str]:
    """How a model's own plan differs from what was found: a line for each kind of difference."""
    cut, asked = _cut(found), dict[str, str]()
    for pattern, style in plan.items():
        for weight in _weights(anatomy, pattern) or [
            weight
            for name, cls in anatomy.classes.items()
            if name and matches(name, cls, pattern)
            for weight in _weights(anatomy, f"{name}.*")
        ]:
            asked.setdefault(weight, style)
    more = [name for name, style in asked.items() if _kind(style) != "whole" and name not in cut]
    less = [name for name, kind in cut.items() if kind != "whole" and _kind(asked.get(name, "replicate")) == "whole"]
    other = [name for name in asked if name in cut and name not in less and not _agrees(_kind(asked[name]), cut[name])]
    lines = []
    if more:
        why = found.left.get(more[0], "the example does not call it as a linear layer")
        lines.append(f"it also cuts {_shown(more)}: {why}")
    if less:
        lines.append(f"it leaves {_shown(less)} whole")
    if other:
        lines.append(f"it has {asked[other[0]]} for {_shown(other)}, and here {_instead(cut[other[0]])}")
    return lines


def _shown(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
