"""Parts of a module with their own precision: finds them, and gives the dtypes of parameters and the casts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from shardwise.errors import PlanError
from shardwise.recipe.draft import Dtypes
from shardwise.recipe.dtypes import FLOATING
from shardwise.recipe.records import ROOT, STATISTICS, Anatomy, Edit, TensorFact, Unit
from shardwise.recipe.targets import innermost, modules_named, with_forward
from shardwise.techniques.precision.options import Precision, precision_of


class Regions:
    """The precision of every parameter and module of ``anatomy`` under ``base``.

    The innermost module that a pattern matches decides for what is inside it; of several patterns for one module, the
    last. Batch norms, whose kernels accept only the dtype of their running statistics, are parts of their own.

    Raises:
        PlanError: a pattern that matches no module, or changes nothing, or matches a container whose own parameter is
            used by code around it; a tensor shared by modules of two precisions.
    """

    def __init__(self, anatomy: Anatomy, base: Precision):
        self.anatomy, self.base = anatomy, base
        self._patterns: dict[str, str] = {}  # module -> the pattern that matches it
        for pattern, word in base.parts.items():
            given = f"Precision(parts={{{pattern!r}: {word!r}}})"
            for name in modules_named(anatomy, pattern, given):
                _refuse_loose_parameters(anatomy, name, given)
                for runnable in with_forward(anatomy, name, given):
                    self._patterns[runnable] = pattern
        self._precisions = {name: precision_of(base.parts[pattern]) for name, pattern in self._patterns.items()}
        self._words = {name: (base.parts[pattern], f"named by {pattern!r}") for name, pattern in self._patterns.items()}
        self._add_batch_norms()
        self._refuse_split_ties()
        self._refuse_without_effect()

    def of(self, tensor: str) -> Precision:
        return self._precisions.get(self._home(tensor) or "", self.base)

    def holding(self, module: str) -> Precision | None:
        """The precision of the innermost part that ``module`` is, or is in; None outside of parts."""
        return self._precisions.get(module) or self._precisions.get(self._home(module) or "")

    def dtypes(self, name: str) -> Dtypes:
        """The dtypes in which a parameter is stored, computed with and reduced. Frozen ones keep their stored dtype."""
        return _dtypes(self.anatomy.params[name], self.of(name), bool(self.anatomy.adapted))

    def edits(self) -> tuple[Edit, ...]:
        """The casts at the inputs and outputs of each part, as edits."""
        blocks = [block for blocks in self.anatomy.lists for block in blocks.blocks]
        made = []
        for name in (name for name in self.anatomy.classes if name in self._precisions):
            outer = self._home(name)
            inside = outer is not None or any(f"{name}.".startswith(f"{block}.") for block in blocks)
            made.append(
                Edit(
                    module=name,
                    technique="precision",
                    action="cast",
                    args={
                        "compute": self._precisions[name].compute,
                        "back": self._surrounding(outer),
                        "leaves": not inside and name in self._patterns,
                    },
                    why=", ".join(self._words[name]),
                )
            )
        return tuple(made)

    def casts_of(self, units: Sequence[Unit]) -> tuple[Edit, ...]:
        """The casts of the inputs of ``units``, for ``cast_inputs="units"``; modules that are parts already cast."""
        if self.base.cast_inputs != "units":
            return ()
        modules = [name for unit in units if unit.name != ROOT for name in unit.modules]
        return tuple(
            Edit(
                module=name,
                technique="precision",
                action="cast_inputs",
                args={"compute": self._surrounding(self._home(name)), "back": None, "leaves": False},
                why="the inputs of each unit are cast",
            )
            for name in modules
            if name not in self._precisions
        )

    def _home(self, name: str) -> str | None:
        """The innermost part that contains ``name``, itself not counted."""
        return innermost(name, self._precisions)

    def _add_batch_norms(self) -> None:
        dtypes = {name: fact.dtype for first, fact in self.anatomy.buffers.items() for name in (first, *fact.aliases)}
        for name in self.anatomy.classes:
            if not name or name in self._precisions or not all(f"{name}.{key}" in dtypes for key in STATISTICS):
                continue
            outer, held = self._home(name), dtypes[f"{name}.running_mean"]
            around = self._precisions[outer] if outer else self.base
            if held in ("float32", "float64") and (around.compute or around.storage or held) != held:
                self._precisions[name] = precision_of(held)
                self._words[name] = held, "the dtype of its running statistics, which torch's kernels want of all"

    def _surrounding(self, outer: str | None) -> str | None:
        """The compute dtype around a part; None if there are several."""
        return self._around if outer is None else self._precisions[outer].compute

    @functools.cached_property
    def _around(self) -> str | None:
        facts = self.anatomy.params.items()
        found = {self.dtypes(n)[1] for n, fact in facts if fact.dtype in FLOATING and self._home(n) is None}
        return self.base.compute or (found.pop() if len(found) == 1 else None)

    def _refuse_split_ties(self) -> None:
        for name, fact in self.anatomy.params.items():
            for alias in fact.aliases:
                if _dtypes(fact, self.of(alias), bool(self.anatomy.adapted)) != self.dtypes(name):
                    inside, outside = (name, alias) if self._home(name) is not None else (alias, name)
                    raise PlanError(
                        f"Precision(parts={{{self._patterns.get(self._home(inside) or '')!r}: ...}})",
                        why=f"{inside!r} and {outside!r} are one tensor, which is stored once and gathered in one dtype",
                        fix=f"give {outside.rpartition('.')[0]!r} the same precision in parts, or untie them",
                        name=name,
                    )

    def _refuse_without_effect(self) -> None:
        for pattern, word in self.base.parts.items():
            modules = [name for name, other in self._patterns.items() if other == pattern]
            if not any(self._changes(module) for module in modules):
                raise PlanError(
                    f"Precision(parts={{{pattern!r}: {word!r}}})",
                    why="another pattern means the same modules later" if not modules
                    else f"what is around {modules[0]!r} has that precision too, so it would have no effect",
                    fix="remove it, or name another precision",
                    name=modules[0] if modules else None,
                )  # fmt: skip

    def _changes(self, module: str) -> bool:
        outer = self._home(module)
        around = self._precisions[outer] if outer else self.base
        held = {n: f for n, f in self.anatomy.params.items() if self._home(n) == module and f.dtype in FLOATING}
        if any(_dtypes(fact, around, bool(self.anatomy.adapted)) != self.dtypes(name) for name, fact in held.items()):
            return True
        return self._precisions[module].compute != self._surrounding(outer)


def _refuse_loose_parameters(anatomy: Anatomy, name: str, given: str) -> None:
    """Refuses a container without a forward that has its own parameters: it cannot cast what they are combined with."""
    own = next((param for param in anatomy.params if param.rpartition(".")[0] == name), None)
    if name in anatomy.containers and own is not None:
        raise PlanError(
            f"{given} of a {anatomy.classes[name]} that holds a parameter itself",
            why="it has no forward: code around it uses the parameter, in the dtype around it",
            fix=f"name the modules in it: {name + '.*'!r}, or the module whose forward uses {own!r}",
            name=own,
        )


def stored_as(anatomy: Anatomy, base: Precision) -> dict[str, str]:
    """Name -> storage dtype of the parameters that are to be stored in another dtype than they have."""
    regions = Regions(anatomy, base)
    found = {name: regions.dtypes(name).storage for name in anatomy.params}
    return {name: dtype for name, dtype in found.items() if dtype != anatomy.params[name].dtype}


def _dtypes(fact: TensorFact, precision: Precision, is_base: bool) -> Dtypes:
    """Of a parameter; ``is_base``: those that are not trained are the base of adapters, and stored as they are computed."""
    if fact.dtype not in FLOATING:
        return Dtypes(fact.dtype, fact.dtype, fact.dtype)
    storage = (precision.storage if fact.trainable else precision.compute if is_base else None) or fact.dtype
    compute = precision.compute or storage
    return Dtypes(storage, compute, precision.reduce or compute)
