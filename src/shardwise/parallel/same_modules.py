"""All ranks must build the same module: its classes, tensors and settings are compared before anything is made of it, and
the recipe that each rank made of it afterwards.
"""

import contextlib
import enum
import functools
import numbers
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.errors import RankError
from shardwise.model import canonical_modules
from shardwise.model.names import own_attributes
from shardwise.model.tensors import loose_tensors
from shardwise.parallel.init.sources import all_tensors
from shardwise.recipe import Anatomy, Recipe, TensorFact
from shardwise.world import World
from shardwise.world.fingerprint import Facts, agree_on, described, differences

_WHAT = "the ranks' modules"
_FIX = "build the same module with the same options on every rank"
_OF_A_PROCESS = {
    "rank", "device", "devices", "dev", "gpu", "cuda", "seed", "pid", "uuid", "uid", "main", "master", "node",
    "process", "worker", "port", "verbose",
}  # fmt: skip
_FROM_ELSEWHERE = {"path", "dir", "file", "url", "hash", "time", "timestamp", "created"}
"""Words in names of attributes, and at their end, whose values may differ: where a rank runs, where its module came from."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_PLAIN = (numbers.Number, np.bool_, enum.Enum, torch.dtype, type, type(None), *_FUNCTIONS)
_MOST_ITEMS = 1000  # of a container
_DEPTH = 3  # of objects within objects


def refuse_other_modules(module: nn.Module, anatomy: Anatomy, example: Mapping[str, Any] | None, world: World) -> None:
    """Compares the modules of all ranks, which must all call it.

    Settings are attributes of modules: numbers (``eps``, ``num_heads``), functions, classes, containers of them. Each rank
    computes with its own. One that a rank does not have is not compared, as a library may add some when it loads weights,
    which rank 0 alone may have done.

    Warns:
        UserWarning: texts that are attributes of modules, or settings of objects that they have, such as a ``config``,
            differ. Whether the forward reads them is not known.
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
    build, settings, texts = differences(
        world.agreement,
        Facts(facts, _WHAT),
        Facts(_settings(module), _WHAT, absent=False),
        Facts(_texts(module), "what else the ranks' modules have", absent=False),
    )
    found = build or settings
    if found is not None:
        raise RankError(
            f"{_WHAT} differ between ranks: {found.names[0] if found.names else '?'}",
            why=found.told,
            fix=_FIX if build else f"{_FIX}; what has to differ can be set after parallelize",
            ranks=found.ranks,
        )
    if texts is not None and world.is_main:
        more = f" (and {len(texts.names) - 1} more)" if len(texts.names) > 1 else ""
        warnings.warn(
            f"{texts.names[0]}{more} differs between ranks: {texts.told}. If the forward reads it, ranks compute different "
            f"things. {_FIX.capitalize()}.",
            stacklevel=level_of_caller(),
        )


def refuse_other_recipes(recipe: Recipe, world: World) -> None:
    """Compares the recipes of all ranks, which must all call it."""
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
    found = {}
    for name, owner, value in _attributes(module):
        is_of_torch = type(owner).__module__.startswith("torch.")
        if _is_setting(value) and (is_of_torch or not isinstance(value, str)):
            found[name] = _told(value)
    for name, child in canonical_modules(module):
        hooks = [hook for kind in ("_forward_hooks", "_forward_pre_hooks") for hook in vars(child)[kind].values()]
        found[f"{name or '(root)'}, its hooks"] = _told(hooks)
        found[f"{name or '(root)'}, its own forward"] = _told(vars(child).get("forward"))
    return found


def _texts(module: nn.Module) -> dict[str, str]:
    """Texts, and settings of objects that modules have, to some depth. None is what a library leaves out in one way to make them."""
    found: dict[str, str] = {}
    seen: set[int] = set()

    def add(name: str, value: Any, depth: int) -> None:
        if isinstance(value, str) or (depth < _DEPTH and value is not None and _is_setting(value)):
            found[name] = _told(value)
        elif (
            depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor) and id(value) not in seen
        ):
            seen.add(id(value))
            for attr, inner in vars(value).items():
                if not attr.startswith("_") and _may_not_differ(attr):
                    add(f"{name}.{attr}", inner, depth - 1)

    for name, _, value in _attributes(module):
        if not isinstance(value, _PLAIN):
            add(name, value, _DEPTH)
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, module and value of each attribute of a module within ``module`` that is not its tensors or modules."""
    for name, child in canonical_modules(module):
        for attr, value in own_attributes(child).items():
            if attr != "forward" and _may_not_differ(attr):
                yield f"{name}.{attr}".lstrip("."), child, value


def _may_not_differ(attr: str) -> bool:
    words = attr.lower().strip("_").split("_")
    return _OF_A_PROCESS.isdisjoint(words) and words[-1] not in _FROM_ELSEWHERE


def _is_setting(value: Any) -> bool:
    """Whether a value is a number, a text, a function or the like, or a container of them."""
    if isinstance(value, dict):
        return len(value) <= _MOST_ITEMS and all(isinstance(k, str | int) and _is_setting(v) for k, v in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return len(value) <= _MOST_ITEMS and all(map(_is_setting, value))
    return isinstance(value, (str, *_PLAIN)) or (isinstance(value, np.ndarray) and value.dtype != object)


def _told(value: Any) -> str:
    """A setting as a text, the same for values that are equal: 1, 1.0 and True, a tuple and a list."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_told(inner)}" for key, inner in sorted(value.items(), key=str)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_told, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_told, value)) + ")"
    if isinstance(value, np.ndarray):
        return (
            f"array {value.shape} {value.dtype} with the checksum {zlib.crc32(np.ascontiguousarray(value).tobytes())}"
        )
    if isinstance(value, functools.partial):
        return f"partial({_told(value.func)}, {_told(value.args)}, {_told(value.keywords)})"
    if isinstance(value, types.MethodType):
        return _told(value.__func__)
    # Its name says little: a lambda, or one made by a call.
    if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
        return f"{described(value)} with the checksum {zlib.crc32(value.__code__.co_code + _kept(value).encode())}"
    if isinstance(value, (numbers.Number, np.bool_)) and not isinstance(value, enum.Enum):
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, bool | float) and number == number and abs(number) < 2**53 and number == int(number):
            number = int(number)
        return repr(number)
    return described(value)


def _kept(function: types.FunctionType) -> str:
    """The numbers and texts in the code of a function, and in the variables that it keeps."""
    kept = list(function.__code__.co_consts)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            kept.append(cell.cell_contents)
    return repr([value for value in kept if isinstance(value, (str, numbers.Number))])
