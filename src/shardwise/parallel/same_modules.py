"""All ranks must build the same module: its classes, tensors and settings are compared before anything is made of it, and
the recipe that each rank made of it afterwards.
"""

import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwise.model import canonical_modules
from shardwise.parallel.init.sources import all_tensors
from shardwise.recipe import Anatomy, Recipe, TensorFact
from shardwise.world import World
from shardwise.world.fingerprint import agree_on, described, difference

__all__ = ["refuse_other_modules", "refuse_other_recipes"]

_WHAT = "the ranks' modules"
_FIX = "build the same module with the same options on every rank"
_OF_A_RANK = ("rank", "device", "gpu", "path", "dir", "file", "url", "hash", "uuid")
"""In names of attributes that may differ: where a rank runs, where its module came from, and what differs by process."""
_SETTINGS = (bool, int, float, complex, str, torch.dtype, type, types.FunctionType, types.BuiltinFunctionType)


def refuse_other_modules(
    module: nn.Module, anatomy: Anatomy, example: Mapping[str, Tensor] | None, world: World
) -> None:
    """Compares the modules of all ranks, which must all call it.

    Settings are the numbers, texts, functions and classes that are attributes of modules (``eps``, ``num_heads``): each
    rank computes with its own.

    Warns:
        UserWarning: settings of objects that modules have, such as a ``config``, differ. Whether the forward reads them
            is not known.

    Raises:
        RankError: modules or examples that differ, with the first difference.
    """
    facts: dict[str, Any] = {"module class": anatomy.module_class}
    for kind, tensors in {"parameter": anatomy.params, "buffer": anatomy.buffers}.items():
        facts |= _tensor_facts(kind, tensors)
    facts |= {f"{name or '(root)'}, its class": path for name, path in anatomy.class_paths.items()}
    # Values and gradients are sent in this order. A constructor that iterates over a set differs in each process.
    facts["the order of tensors"] = list(all_tensors(module))
    facts |= dict(_settings(module))
    if example is not None:
        facts["example"] = {
            name: [str(x.dtype), x.dim()] for name, x in sorted(example.items()) if isinstance(x, Tensor)
        }
    agree_on(world.agreement, facts, what=_WHAT, fix=_FIX)
    found = difference(world.agreement, dict(_settings_of_objects(module)), what="the settings of the ranks' modules")
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


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, child in canonical_modules(module):
        for attr, value in vars(child).items():
            # "training" is set by calls, and the step checks it.
            if attr != "training" and _is_setting(attr, value):
                yield f"{name}.{attr}".lstrip("."), described(value)


def _settings_of_objects(module: nn.Module) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    for name, child in canonical_modules(module):
        for attr, value in vars(child).items():
            if (
                isinstance(value, (nn.Module, Tensor, *_SETTINGS))
                or not hasattr(value, "__dict__")
                or id(value) in seen
            ):
                continue
            seen.add(id(value))
            for inner, setting in vars(value).items():
                if not inner.startswith("_") and _is_setting(inner, setting):
                    yield f"{name}.{attr}.{inner}".lstrip("."), described(setting)


def _is_setting(attr: str, value: Any) -> bool:
    return isinstance(value, _SETTINGS) and not any(word in attr.lower() for word in _OF_A_RANK)
