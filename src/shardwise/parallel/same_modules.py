"""All ranks must build the same module: its classes, tensors and settings are compared before anything is made of it, and
the recipe that each rank made of it afterwards.
"""

import enum
import functools
import numbers
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwise.errors import RankError
from shardwise.model import canonical_modules
from shardwise.model.names import own_attributes
from shardwise.model.tensors import loose_tensors
from shardwise.parallel.init.sources import all_tensors
from shardwise.recipe import Anatomy, Recipe, TensorFact
from shardwise.world import World
from shardwise.world.fingerprint import agree_on, described, difference

__all__ = ["refuse_other_modules", "refuse_other_recipes"]

_WHAT = "the ranks' modules"
_FIX = "build the same module with the same options on every rank"
_OF_A_PROCESS = {"rank", "device", "gpu", "seed", "pid", "hash", "uuid"}
_FROM_ELSEWHERE = {"path", "dir", "file", "url", "time", "timestamp", "created", "at"}
"""Words in names of attributes, and at their end, whose values may differ: where a rank runs, where its module came from."""
_SETTINGS = (
    numbers.Number,
    enum.Enum,
    torch.dtype,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    functools.partial,
)
_MOST_ITEMS = 100  # of a container of settings


def refuse_other_modules(
    module: nn.Module, anatomy: Anatomy, example: Mapping[str, Tensor] | None, world: World
) -> None:
    """Compares the modules of all ranks, which must all call it.

    Settings are attributes of modules: numbers (``eps``, ``num_heads``), functions, classes, containers of them. Each rank
    computes with its own. One that a rank does not have is not compared, as a library may add some when it loads weights,
    which rank 0 alone may have done.

    Warns:
        UserWarning: texts that are attributes of modules, or settings of objects that they have, such as a ``config``,
            differ. Whether the forward reads them is not known.

    Raises:
        RankError: modules or examples that differ, with the first difference.
    """
    facts: dict[str, Any] = {"module class": anatomy.module_class}
    for kind, tensors in {"parameter": anatomy.params, "buffer": anatomy.buffers}.items():
        facts |= _tensor_facts(kind, tensors)
    for name, tensor in loose_tensors(module).items():
        facts[f"tensor {name}"] = [str(tensor.dtype), *tensor.shape]
    facts |= {f"{name or '(root)'}, its class": path for name, path in anatomy.class_paths.items()}
    # Values and gradients are sent in this order. A constructor that iterates over a set differs in each process.
    facts["the order of tensors"] = list(all_tensors(module))
    if example is not None:
        facts["example"] = {
            name: [str(x.dtype), x.dim()] for name, x in sorted(example.items()) if isinstance(x, Tensor)
        }
    agree_on(world.agreement, facts, what=_WHAT, fix=_FIX)
    found = difference(world.agreement, _settings(module), what=_WHAT, absent=False)
    if found is not None:
        raise RankError(
            f"{_WHAT} differ between ranks: {found.names[0]}",
            why=found.told,
            fix=f"{_FIX}; what has to differ can be set after parallelize",
            ranks=found.ranks,
        )
    found = difference(world.agreement, _texts(module), what="what else the ranks' modules have", absent=False)
    if found is not None and world.is_main:
        more = f" (and {len(found.names) - 1} more)" if len(found.names) > 1 else ""
        warnings.warn(
            f"{found.names[0]}{more} differs between ranks: {found.told}. If the forward reads it, ranks compute different "
            f"things. {_FIX.capitalize()}.",
            stacklevel=4,
        )


def refuse_other_recipes(recipe: Recipe, world: World) -> None:
    """Compares the recipes of all ranks, which must all call it.

    Raises:
        RankError: they differ, with the first difference.
    """
    told: dict[str, Any] = msgspec.to_builtins(recipe)
    params, buffers, units, edits, notes = map(told.pop, ("params", "buffers", "units", "edits", "notes"))
    entries = told.pop("techniques").items()
    facts: dict[str, Any] = {"module class": told.pop("module_class"), **told}
    for technique, entry in entries:
        facts |= {key if key not in facts else f"{technique}.{key}": value for key, value in entry.items()}
    for kind, entries in {
        "parameter": params,
        "buffer": buffers,
        "unit": {unit["name"] or "(root)": unit for unit in units},
    }.items():
        facts |= {f"{kind} {name}: {field}": value for name, entry in entries.items() for field, value in entry.items()}
    for edit in edits:
        facts.setdefault(f"{edit['technique']} of {edit['module']}", []).append([edit["action"], edit["args"]])
    facts |= {"notes": notes, "fingerprint": facts.pop("fingerprint")}  # last: it shows only that something differs
    agree_on(world.agreement, facts, what=_WHAT, fix=_FIX)


def _tensor_facts(kind: str, tensors: Mapping[str, TensorFact]) -> dict[str, Any]:
    found = {name: msgspec.to_builtins(fact) for name, fact in tensors.items()}
    return {f"{kind} {name}: {field}": value for name, fact in found.items() for field, value in fact.items()}


def _settings(module: nn.Module) -> dict[str, str]:
    """What the modules compute with, by name. Tensors are not in it: all get the values of one rank."""
    return {
        name: described(value)
        for name, owner, value in _attributes(module)
        if _is_setting(value) or (isinstance(value, str) and type(owner).__module__.startswith("torch."))
    }


def _texts(module: nn.Module) -> dict[str, str]:
    """Texts, and settings of objects that modules have."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, _, value in _attributes(module):
        if isinstance(value, str):
            found[name] = value
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, (nn.Module, Tensor, *_SETTINGS))
            and id(value) not in seen
        ):
            seen.add(id(value))
            for attr, inner in vars(value).items():
                if (
                    not attr.startswith("_")
                    and _may_not_differ(attr)
                    and (_is_setting(inner) or isinstance(inner, str))
                ):
                    found[f"{name}.{attr}"] = described(inner)
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, module and value of each attribute of a module within ``module`` that is not its tensors or modules."""
    for name, child in canonical_modules(module):
        for attr, value in own_attributes(child).items():
            if _may_not_differ(attr):
                yield f"{name}.{attr}".lstrip("."), child, value


def _may_not_differ(attr: str) -> bool:
    words = attr.lower().strip("_").split("_")
    return _OF_A_PROCESS.isdisjoint(words) and words[-1] not in _FROM_ELSEWHERE


def _is_setting(value: Any) -> bool:
    if isinstance(value, dict):
        return 0 < len(value) <= _MOST_ITEMS and all(
            isinstance(k, str | int) and _is_setting(v) for k, v in value.items()
        )
    if isinstance(value, tuple | list):
        return 0 < len(value) <= _MOST_ITEMS and all(map(_is_setting, value))
    return isinstance(value, _SETTINGS)
