"""Converts the state that is not model tensors to JSON and back; tensors inside it are stored separately.

The restored values are equal in type and value. Nothing is ever unpickled, so a value that is neither JSON nor a tensor
is refused when it is saved, with its place.
"""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import UnsupportedError
from shardwise.world import described

_TAG = "$"  # first character of the keys that encode types JSON does not have
_MAPPINGS: dict[type, str] = {Counter: "counter", OrderedDict: "ordered", defaultdict: "default"}


@dataclass(frozen=True)
class CutTensor:
    """Stands for a tensor of an ``extra`` object that is written in pieces, since it is cut over the ranks."""

    stored: str
    dtype: str
    shape: tuple[int, ...]


def to_plain(
    value: Any,
    place: str,
    tensors: dict[str, Tensor],
    note: Callable[[str, Tensor], "CutTensor | None"] = lambda place, tensor: None,
) -> Any:
    """Converts ``value`` to JSON types; its tensors are added to ``tensors``, detached and on the CPU, by their places.

    Args:
        value: numbers, texts, None, lists, tuples, mappings, sets of those, bytes, tensors and numpy arrays, dtypes and
            devices.
        place: its name, for the tensors' names and messages ("scheduler").
        tensors: those of the whole checkpoint.
        note: takes a tensor that is written in pieces; None: it is whole.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    cut = note(place, value) if isinstance(value, Tensor) else value
    if isinstance(cut, CutTensor):
        return {"$cut": cut.stored, "dtype": cut.dtype, "shape": list(cut.shape)}
    if isinstance(value, DTensor):
        raise UnsupportedError(
            f"{place}: a tensor that is cut over the ranks",
            why="it is cut as no parameter of a sharded model is, so which piece of it belongs where is not known",
            fix="give sharded models themselves (extra={'ema': model}), and of other tensors the whole: value.full_tensor()",
            name=place,
        )
    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach().to("cpu", copy=True).contiguous(), place, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _put(torch.from_numpy(np.ascontiguousarray(value).copy()), place, tensors)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"$scalar": value.dtype.name, "value": to_plain(value.item(), place, tensors, note)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value)}
    if type(value) in (list, tuple, set, frozenset):
        ordered = sorted(value, key=described) if type(value) in (set, frozenset) else value  # same order on every rank
        items = [to_plain(item, f"{place}/{number}", tensors, note) for number, item in enumerate(ordered)]
        return items if type(value) is list else {f"${type(value).__name__}": items}
    if type(value) is dict and all(type(key) is str and not key.startswith(_TAG) for key in value):
        return {key: to_plain(item, f"{place}/{key}", tensors, note) for key, item in value.items()}
    if type(value) is dict or type(value) in _MAPPINGS:
        pairs = [
            [to_plain(key, f"{place}/key {n}", tensors, note), to_plain(item, f"{place}/{key}", tensors, note)]
            for n, (key, item) in enumerate(value.items())
        ]
        return {f"${_MAPPINGS.get(type(value), 'dict')}": pairs}
    raise UnsupportedError(
        f"{place}: a {type(value).__module__}.{type(value).__qualname__}",
        why="a checkpoint holds JSON and tensors only, so that reading one never runs code",
        fix="let state_dict() give numbers, texts, lists, dicts and tensors, and build the object from them in load_state_dict()",
        name=place,
    )


def _put(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    while place in tensors:  # two keys with the same text: 1 and "1"
        place += "'"
    tensors[place] = tensor
    return place


def from_plain(value: Any, tensors: Callable[[str], Tensor]) -> Any:
    """Converts back what :func:`to_plain` returned; ``tensors`` returns each tensor by its name."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith(_TAG)), None)
    if tag is None:
        return {key: from_plain(item, tensors) for key, item in value.items()}
    return _from_tag(tag[1:], value[tag], value, tensors)


def _from_tag(kind: str, content: Any, whole: Mapping[str, Any], tensors: Callable[[str], Tensor]) -> Any:
    match kind:
        case "float":
            return float(content)
        case "cut":
            return CutTensor(str(content), str(whole["dtype"]), tuple(int(size) for size in whole["shape"]))
        case "tensor":
            return tensors(content)
        case "array":
            return tensors(content).numpy()
        case "scalar":
            kind_of_number = np.dtype(content)
            if kind_of_number.kind not in "biuf":
                raise ValueError(f"a scalar of {content}")
            return kind_of_number.type(from_plain(whole["value"], tensors))
        case "bytes":
            return bytes.fromhex(content)
        case "dtype":
            return getattr(torch, content.removeprefix("torch."))
        case "device":
            return torch.device(content)
        case "tuple" | "set" | "frozenset":
            make = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(from_plain(item, tensors) for item in content)
        case "dict" | "ordered" | "counter" | "default":
            pairs = [(from_plain(key, tensors), from_plain(item, tensors)) for key, item in content]
            make = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "default": dict}[kind]
            return make(dict(pairs))
    raise ValueError(f"${kind} is no kind of value")


def to_text(plain: Any) -> bytes:
    """Encodes as JSON text; floats are exact to the last bit."""
    return (json.dumps(plain, indent=1, allow_nan=False) + "\n").encode()
