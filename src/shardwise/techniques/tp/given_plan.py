"""Plans that are given by name, as other libraries have them: what they ask for, and whether that is what can be cut.

A plan names layers. How these are cut (which rows of a fused layer a rank has, what lies between them) is found in the code
all the same, and proved; so a plan can leave layers whole, and cannot make anything wrong.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from shardwise.config.target import load_target
from shardwise.errors import PlanError, UnsupportedError, UsageError
from shardwise.recipe import Anatomy
from shardwise.recipe.patterns import matches
from shardwise.recipe.targets import modules_named
from shardwise.techniques.tp.options import (
    COLUMN,
    LLAMA,
    REGISTERED,
    ROW,
    TABLE,
    TensorParallel,
    check_plan,
)
from shardwise.techniques.tp.search.region_records import Found

_PARAMETRIZED = re.compile(r"\.parametrizations(\.\w+)\..+$")
"""The end of a name of what torch.nn.utils.parametrize computes a tensor from; its group: the name of that tensor."""

Kinds = dict[str, str]
"""Weight -> "column", "row", "table" or "whole"."""


class Plan(NamedTuple):
    """A plan for a module.

    Attributes:
        source: where it is from, for ``describe``.
        kinds: what it asks for, by weight.
    """

    source: str
    kinds: Kinds

    @property
    def cut(self) -> frozenset[str]:
        return frozenset(name for name, kind in self.kinds.items() if kind != "whole")


def plan_for(module: nn.Module, anatomy: Anatomy, option: TensorParallel) -> Plan | None:
    """The plan of an option, or one that is registered for the class of a module; None: all that can be cut.

    Raises:
        ConfigError: what the plan's name leads to is no plan.
        PlanError: a pattern that matches nothing, a module without a weight, or two styles for one weight.
        UsageError: the model has no plan of its own.
        UnsupportedError: a style of experts or sequences.
    """
    if option.plan == "all":
        return None
    if option.plan == "auto":
        found = _registered(module)
        if not found:
            return None
        names = ", ".join(sorted({name for name, _ in found.values()}))
        plan: Any = {
            _within(prefix, pattern): style for prefix, (_, of) in found.items() for pattern, style in of.items()
        }
        return Plan(f"the one registered for {names}", _resolved(anatomy, plan, f"register_tp_plan({names}, ...)"))
    given = f"TensorParallel(plan={option.plan!r})" if isinstance(option.plan, str) else "TensorParallel(plan=...)"
    call = f"TensorParallel(plan={option.plan!r}: " if isinstance(option.plan, str) else "TensorParallel(plan="
    source = option.plan if isinstance(option.plan, str) else "the one that was given"
    if option.plan == "llama":
        return Plan(source, _of_llama(anatomy, given))
    if option.plan == "hf":
        plan = own_plan(module)
        if not plan:
            raise UsageError(
                f"{given} for a {type(module).__name__}",
                why="the model has no tp_plan",
                fix='leave it at "auto": what can be cut is found in the code',
            )
    else:
        plan = load_target(option.plan, what="TensorParallel.plan") if isinstance(option.plan, str) else option.plan
        plan = plan(module) if callable(plan) else plan
    check_plan(plan, call)
    return Plan(source, _resolved(anatomy, plan, given))


def _registered(module: nn.Module) -> dict[str, tuple[str, dict[str, str]]]:
    """Module -> the class for which a plan is registered, and the plan: of the outermost modules that have one."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    if REGISTERED:
        for name, child in module.named_modules():
            if not any(outer == "" or name.startswith(f"{outer}.") for outer in found):
                keys = (f"{cls.__module__}:{cls.__qualname__}" for cls in type(child).__mro__)
                if (key := next((key for key in keys if key in REGISTERED), None)) is not None:
                    found[name] = key, REGISTERED[key]
    return found


def _within(prefix: str, pattern: str) -> str:
    return f"{prefix}.{pattern}" if prefix else pattern


def own_plan(module: nn.Module) -> dict[str, str]:
    """The plan that a Hugging Face model has; {}: it has none."""
    plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def own_kinds(module: nn.Module, anatomy: Anatomy) -> Kinds:
    """What the plan that a Hugging Face model has says of the weights that it has; {}: it has none."""
    found: Kinds = {}
    for pattern, style in own_plan(module).items():
        for weight in _weights(anatomy, pattern) or [
            weight
            for name, cls in anatomy.classes.items()
            if name and matches(name, cls, pattern)
            for weight in _weights(anatomy, f"{name}.*")
        ]:
            found.setdefault(weight, _kind(style))
    return found


def _of_llama(anatomy: Anatomy, given: str) -> Kinds:
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


def _resolved(anatomy: Anatomy, plan: Mapping[str, str], given: str) -> Kinds:
    found: Kinds = {}
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
    """Parameters of two dims or more whose name, or other name, a pattern matches; a computed weight in place of what it is
    computed from."""
    found = [
        _PARAMETRIZED.sub(r"\1", canonical)
        for name, canonical in _canonical(anatomy).items()
        if matches(_PARAMETRIZED.sub(r"\1", name), "", pattern) and len(anatomy.params[canonical].shape) > 1
    ]
    return list(dict.fromkeys(found))


def _canonical(anatomy: Anatomy) -> dict[str, str]:
    """All names of parameters -> the first one."""
    return {other: name for name, fact in anatomy.params.items() for other in (name, *fact.aliases)}


def _kind(style: str) -> str:
    return "column" if style in COLUMN else "row" if style in ROW else "table" if style in TABLE else "whole"


def _cut(found: Found) -> Kinds:
    cut: Kinds = {}
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
    return cut is None if kind == "whole" else cut in _MEANT[kind]


def refuse_uncut(found: Found, plan: Plan, degree: int) -> None:
    """Raises UnsupportedError for a layer that a plan cuts, and that cannot be cut so."""
    cut = _cut(found)
    for weight, kind in plan.kinds.items():
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


def is_met(found: Found, plan: Plan) -> bool:
    """Whether just the layers of a plan are cut, as it says."""
    cut = _cut(found)
    return cut.keys() == plan.cut and all(_agrees(kind, cut.get(weight)) for weight, kind in plan.kinds.items())


def differences(found: Found, kinds: Kinds) -> list[str]:
    """How a plan differs from what was found: a line for each kind of difference."""
    cut = _cut(found)
    more = [name for name, kind in kinds.items() if kind != "whole" and name not in cut]
    less = [name for name in cut if kinds.get(name, "whole") == "whole"]
    other = [name for name in kinds if name in cut and name not in less and not _agrees(kinds[name], cut[name])]
    lines = []
    if more:
        why = found.left.get(more[0], "the example does not call it as a linear layer")
        lines.append(f"it also cuts {_shown(more)}: {why}")
    if less:
        lines.append(f"it leaves {_shown(less)} whole")
    if other:
        lines.append(f"it makes {_shown(other)} {kinds[other[0]]}-parallel, and here {_instead(cut[other[0]])}")
    return lines


def _shown(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
