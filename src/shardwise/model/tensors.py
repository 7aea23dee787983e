"""A module's tensors by canonical name: reading them, moving them to meta, replacing them; ties are always kept."""

import contextlib
import ctypes
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import share_hooks
from shardwise._torch.dtensor import cut_like, local_tensor
from shardwise.model.names import canonical_modules, canonical_tensors, own_attributes

_IS_CPU = attrgetter("is_cpu")
_SMALL = 1 << 16  # bytes of a tensor whose checksum is computed together with others'


def tensors_of(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Canonical name -> parameter (kind ``"_parameters"``) or buffer (``"_buffers"``); each under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, owner, attr in canonical_tensors(module, kind):
        tensor = getattr(owner, kind)[attr]
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


@dataclass(frozen=True)
class Hidden:
    """A tensor that a module uses but has not registered as parameter or buffer: an attribute, or an element of a list,
    dict or plain object that is an attribute. ``put`` replaces it."""

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None]


def hidden_tensors(module: nn.Module, kind: type = Tensor) -> Iterator[Hidden]:
    """All of them in ``module``, named like ``blocks.0.tables.cos``; one that is also registered is included. ``kind``: what is looked for."""
    seen: set[int] = set()
    for prefix, owner in canonical_modules(module):
        for attr in [attr for attr in own_attributes(owner) if not attr.startswith("_shardwise")]:
            put = functools.partial(object.__setattr__, owner, attr)
            yield from _hidden_in(f"{prefix}.{attr}" if prefix else attr, vars(owner)[attr], put, seen, kind)


def _hidden_in(
    name: str, value: Any, put: Callable[[Any], None], seen: set[int], kind: type, depth: int = 4
) -> Iterator[Hidden]:
    if isinstance(value, kind):
        yield Hidden(name, value, put)
        return
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for i, (key, item) in enumerate(list(value.items())):
            text = str(i) if " at 0x" in str(key) else key  # an address is no name: it differs in each process
            yield from _hidden_in(
                f"{name}.{text}", item, functools.partial(value.__setitem__, key), seen, kind, depth - 1
            )
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _hidden_in(f"{name}.{i}", item, functools.partial(value.__setitem__, i), seen, kind, depth - 1)
    elif isinstance(value, tuple):
        parts = list(value)  # shared by the elements' put functions, so that each keeps what the others have put
        for i, item in enumerate(value):
            put_part = functools.partial(_put_in_tuple, type(value), parts, put, i)
            yield from _hidden_in(f"{name}.{i}", item, put_part, seen, kind, depth - 1)
    elif _is_users(value):
        for attr, item in list(vars(value).items()):
            yield from _hidden_in(
                f"{name}.{attr}", item, functools.partial(object.__setattr__, value, attr), seen, kind, depth - 1
            )


def _put_in_tuple(kind: type, parts: list[Any], put: Callable[[Any], None], index: int, item: Any) -> None:
    parts[index] = item
    put(kind(*parts) if hasattr(kind, "_fields") else kind(parts))


def _is_users(value: Any) -> bool:
    """Whether ``value`` is a plain object of the user's own class that may hold tensors."""
    if isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in {
        "torch",
        "shardwise",
        "builtins",
    }


def loose_tensors(module: nn.Module, registered: Iterable[Tensor] | None = None) -> dict[str, Tensor]:
    """Name -> tensor of the hidden tensors that are registered nowhere, each under its first name.

    Args:
        module: where to search.
        registered: its parameters and buffers, if they are known; None: they are searched too.
    """
    if registered is None:
        registered = [t for kind in ("_parameters", "_buffers") for t in tensors_of(module, kind).values()]
    known = {id(tensor) for tensor in registered}
    found: dict[int, tuple[str, Tensor]] = {}
    for hidden in hidden_tensors(module):
        if id(hidden.tensor) not in known:
            found.setdefault(id(hidden.tensor), (hidden.name, hidden.tensor))
    return dict(found.values())


def unregistered_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> trainable parameter in a list, tuple or dict of a module, directly or inside a module there, which
    ``parameters()`` therefore does not return. Parameters hidden in any other attribute are hidden on purpose."""
    known = {id(param) for param in tensors_of(module, "_parameters").values()}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, owner in canonical_modules(module):
        for attr in [attr for attr in own_attributes(owner) if not attr.startswith("_shardwise")]:
            for name, param in _parameters_in(f"{prefix}.{attr}" if prefix else attr, vars(owner)[attr]):
                if param.requires_grad and id(param) not in known:
                    found.setdefault(id(param), (name, param))
    return dict(found.values())


def _parameters_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, nn.Parameter]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in list(items) if depth else ():
        if isinstance(item, nn.Parameter):
            yield f"{name}.{key}", item
        elif isinstance(item, nn.Module):
            yield from ((f"{name}.{key}.{inner}", param) for inner, param in item.named_parameters())
        else:
            yield from _parameters_in(f"{name}.{key}", item, depth - 1)


def follow_parameters(module: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replaces parameters of ``before`` by those of ``after`` where the user's lists or attributes still hold them."""
    moved = {id(tensor): after[name] for name, tensor in before.items() if after[name] is not tensor}
    for hidden in list(hidden_tensors(module)):
        if id(hidden.tensor) in moved:
            hidden.put(moved[id(hidden.tensor)])


def give_memory(module: nn.Module, device: torch.device, *, without: Collection[Tensor] = ()) -> None:
    """Allocates memory on ``device`` for every meta tensor, except those in ``without``; moves real ones there. Ties
    are kept, and so are tensor objects where possible."""
    skipped = {id(tensor) for tensor in without}

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) in skipped:
            return tensor
        if _is_expanded(tensor):
            tensor = tensor.contiguous()  # it cannot be written in place
        if tensor.device == device:
            return tensor
        return torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor.to(device)

    replace_tensors(module, make)


def replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter, buffer and plain tensor attribute by ``make(tensor)``, unless that is the same object.
    ``make`` runs once for tied tensors, which stay tied."""
    made: dict[int, Any] = {}
    kept: list[Tensor] = []  # alive until the end, so that no id() is used twice

    def new(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            value = make(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                value = parameter_like(tensor, value.detach(), tensor.requires_grad)
                share_hooks(tensor, value)
            # A module with two names is visited twice. What was put into it the first time is not made again, or the
            # tensors tied to it would keep the old one.
            made[id(tensor)] = made[id(value)] = value
            kept.extend((tensor, value))
        return made[id(tensor)]

    for kind in ("_parameters", "_buffers"):
        for _, owner, attr in list(canonical_tensors(module, kind)):
            getattr(owner, kind)[attr] = new(getattr(owner, kind)[attr])
    for hidden in list(hidden_tensors(module)):
        hidden.put(new(hidden.tensor))


def parameter_like(param: nn.Parameter, value: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter with another value and the attributes that were set on ``param``, such as "no weight decay"."""
    made = nn.Parameter(value, requires_grad)
    vars(made).update(vars(param))
    return made


def like_parameter(value: Any, param: nn.Parameter) -> Any:
    """``value`` as a DTensor like ``param``, over the same memory, if it has the shape of its shard; else ``value``."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != local_tensor(param).shape:
        return value
    if value.dim() == 0:
        return value
    return cut_like(value, param)


def map_contained(call: Callable[[str, Any], Any], value: Any, place: str) -> Any:
    """``value``, or the list, tuple or dict that it is with others in it, with what ``call`` makes of each place (``place/0/key``) and value
    that is none of them."""
    if type(value) in (list, tuple):
        return type(value)(map_contained(call, item, f"{place}/{number}") for number, item in enumerate(value))
    if type(value) is dict:
        return {key: map_contained(call, item, f"{place}/{key}") for key, item in value.items()}
    return call(place, value)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a plain tensor with elements lies in memory that was freed: to read it would end the process."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == 0


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; -1: made under ``torch.inference_mode()``, where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


@torch.no_grad()
def write_values(tensor: Tensor, values: Tensor) -> None:
    """Gives a buffer, the same object, these values, with their shape and dtype. It may have been made in any way: under
    ``torch.inference_mode()``; or by ``expand``, which torch does not write: then it gets memory of its own."""
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        if tensor.shape != values.shape or tensor.dtype != values.dtype or _is_expanded(tensor):
            tensor.data = values.clone(memory_format=torch.contiguous_format)
        else:
            tensor.detach().copy_(values)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, so that torch refuses to write it."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype on the CPU have equal bytes: of every dtype, and NaN equals itself."""
    return torch.equal(bytes_of(a), bytes_of(b))


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A :func:`checksum` of each, int64 [len(tensors)], on the device of the first. Small ones are computed together: a model
    may have two buffers for each block, and a checksum is six operators."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    home = tensors[0].device
    small = [i for i, t in enumerate(tensors) if t.device == home and 0 < t.nbytes <= _SMALL and t.nbytes % 4 == 0]
    found = dict(zip(small, _together([tensors[i] for i in small]).unbind(), strict=True)) if small else {}
    return torch.stack([found[i] if i in found else checksum(t).to(home) for i, t in enumerate(tensors)])


def change_marks(tensors: Sequence[Tensor]) -> Tensor:
    """Numbers, int64 [len(tensors)], on the device of the first: other ones than before where values of a tensor have changed.
    On the CPU they are made without operators, of which one takes longer than a small buffer's checksum."""
    if not (set(map(type, tensors)) <= {Tensor} and all(map(_IS_CPU, tensors))):
        return checksums(tensors)
    return torch.tensor(
        [_crc32c(tensor.resolve_conj().resolve_neg().contiguous()) for tensor in tensors], dtype=torch.int64
    )


def light_marks(tensors: Sequence[Tensor]) -> Tensor:
    """Like :func:`change_marks`, for parameters: on a device each is read once, and nothing of its size is made; a change of order shows in none."""
    if all(map(_IS_CPU, tensors)):
        return change_marks(tensors)
    return torch.stack([_words(tensor).sum(dtype=torch.int64) for tensor in tensors])


def combined(marks: Tensor) -> Tensor:
    """Checksums, or marks of changes, of several tensors as one, which their order changes: 0-dim int64, not read."""
    return _mixed(marks).sum()


def _crc32c(tensor: Tensor) -> int:
    size = tensor.nbytes
    return crc32c((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else 0


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Checksums of tensors of whole words, each over its own part of all their words in a row."""
    parts = [bytes_of(tensor.detach()).view(torch.int32) for tensor in tensors]
    words = torch.cat(parts).long()
    lengths = torch.tensor([part.numel() for part in parts]).to(words.device, non_blocking=True)
    ends = lengths.cumsum(0)
    starts = torch.repeat_interleave(ends - lengths, lengths, output_size=words.numel())
    totals = _mixed(words, starts).cumsum(0)[ends - 1]  # int64 wraps around: differences are exact
    return torch.cat([totals[:1], totals[1:] - totals[:-1]])


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of the bytes of a tensor and their order, as a 0-dim int64 tensor on its device; equal bytes give equal
    ones on every device."""
    return _mixed(_words(tensor).long()).sum()


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as integers as wide as its size allows."""
    flat = bytes_of(tensor.detach())
    width = next(width for width in (4, 2, 1) if flat.numel() % width == 0)
    return flat.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])


def _mixed(words: Tensor, start: Tensor | int = 0) -> Tensor:
    """Each word multiplied by its place, counted from ``start``, and its bits spread."""
    places = (torch.arange(words.numel(), device=words.device) - start) * 2 + 1
    mixed = (words + 0x9E3779B9) * places  # int64 wraps around, in every order of summation alike
    return mixed ^ (mixed >> 29)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, flat: a view if the tensor is contiguous, else of a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a view of one element keeps a stride above 1, and torch cannot view that as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_meta(module: nn.Module) -> None:
    """Moves ``module`` to meta: drops all values, keeps shapes, dtypes, ties and attributes of parameters."""
    replace_tensors(module, lambda tensor: torch.empty_like(tensor, device="meta"))
