"""Values read outside of forward from a parameter of which a rank has a part as a plain tensor: a norm, a mean, a number.

torch would give those of the part, another one on each rank. So outside of the model's forward such a parameter is of a subclass of
its class, and so are its gradient and what is computed from them element by element. They refuse what mixes the elements along a dim
that is cut; within the forward of the model, in a backward and in an optimizer's step everything has torch's own classes.
"""

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise._torch.autograd import in_backward, without_subclasses
from shardwise._torch.modules import CALLS
from shardwise.config.keywords import public_call
from shardwise.errors import UsageError
from shardwise.model.pytrees import map_leaves
from shardwise.parallel.part_errors import BY_PLACE, PartOf, beside_plain, refusal
from shardwise.parallel.part_functions import Kind, kind_of, whole_sizes
from shardwise.parallel.part_wholes import cut_like, gathered
from shardwise.parallel.runtime import Runtime

MARK = "_shardwise_part"
# Each module of a model with parts -> its :class:`~shardwise.parallel.shown_parts.ShownParts`.
with_parts: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()
# Modules that read no number of a part, or are refused themselves; and one of them that saves what it is given.
OWN_FRAMES = ("shardwise.", "torch.optim.", "torch.amp.", "torch.distributed.", "torch._dynamo.", "torch._subclasses.")
_SAVING = "torch.distributed.checkpoint."
# In a backward: what calls hooks; what runs the model's code, that of a function of its own, or again what was not kept.
_ENGINE, _RUNS_MODEL = "torch.autograd.graph", ("torch.autograd.function", "torch.utils.checkpoint")
_TRANSFORMS = ("torch._functorch.vmap", "torch._functorch.eager_transforms")
_NEW_PARAMETER = nn.Parameter.__new__.__code__


class Part:
    """Mixed into the class of a tensor that is a part."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        with without_subclasses():
            if _is_read_by_us(frame):
                return func(*args, **(kwargs or {}))
            # A transform looks at sizes; what it computes with no one sees.
            if frame.f_globals.get("__name__") in _TRANSFORMS:
                raise refusal("torch.func", next(part for x in _tensors((args, kwargs)) if (part := part_of(x))))
            return _call(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        return _as_torchs(self, lambda plain: plain.__repr__(**options))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (part := part_of(self)) is not None and not _is_read_by_us(sys._getframe(1)):
            raise refusal("torch.save, or a copy by pickle,", part)
        return _as_torchs(self, lambda plain: plain.__reduce_ex__(protocol))

    def __deepcopy__(self, memo: Any) -> Any:
        part = part_of(self)
        copied = _as_torchs(self, lambda plain: plain.__deepcopy__(memo))
        if part is not None:
            mark_part(copied, part)
        return copied

    def full_tensor(self, **options: Any) -> Tensor:
        """The whole value, as of a DTensor; all ranks must call it."""
        with without_subclasses():
            return gathered(self, part_of(self), **options)  # type: ignore[arg-type]

    def to_local(self, **options: Any) -> Tensor:
        """This rank's part, as a plain tensor."""
        with without_subclasses():
            return super().to_local(**options) if isinstance(self, DTensor) else self.as_subclass(Tensor)  # type: ignore[misc,attr-defined]


def in_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of the user's that sees parts of parameters as code outside of forward does."""

    @functools.wraps(hook, updated=())
    def shown_to_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts = with_parts.get(module)
        with contextlib.nullcontext() if parts is None else parts.in_hook():
            return hook(module, *args, **kwargs)

    return shown_to_hook


_IN_HOOK = in_hook(print).__code__


@public_call()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole value of a parameter, its gradient, or what is computed from them element by element, on every rank, under any
    layout. All ranks must call it in the same order.

    Each rank has all of this one tensor for as long as it is kept. What is whole already is returned as it is.

    Args:
        tensor: ``p``, ``p.grad``, ``p.grad * p.abs()``, ...: a shard, a part, or a whole tensor.

    Example:
        >>> norms = {name: sw.full_tensor(p.grad).norm() for name, p in model.named_parameters()}  # doctest: +SKIP
    """
    return tensor.full_tensor() if isinstance(tensor, Part | DTensor) else tensor


@public_call()
def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole and alike, cut as a parameter is: what can be added to the parameter, or
    written into it, under any layout.

    Nothing is sent. It shares no memory with ``whole``.

    Args:
        whole: as ``sw.full_tensor(tensor)`` is, of the same shape; any dtype.
        tensor: ``p``, ``p.grad``, or what an optimizer keeps for it: a shard, a part, or a whole tensor.

    Raises:
        UsageError: ``whole`` has another shape than the whole of ``tensor``.

    Example:
        >>> noise = torch.randn(sw.full_tensor(p).shape, generator=generator)  # doctest: +SKIP
        >>> p.grad.add_(sw.shard_like(noise, p.grad))  # doctest: +SKIP
    """
    with without_subclasses():
        part = part_of(tensor)
        shape = torch.Size(tensor.shape if part is None else whole_sizes(tensor, part.cuts))
        if whole.shape != shape or isinstance(whole, DTensor) or part_of(whole) is not None:
            raise UsageError(
                f"shard_like() of a tensor {list(whole.shape)} for one that is {list(shape)} as a whole",
                why="each rank takes its own elements out of what all ranks have whole",
                fix="give it a plain tensor of the whole shape: sw.full_tensor(p).shape",
                name=None if part is None else part.name,
            )
        whole = whole.detach().to(tensor.device)
        local = whole.clone() if part is None else cut_like(whole, tensor, part)
        if isinstance(tensor, DTensor):  # src_data_rank=None: nothing is sent
            local = distribute_tensor(local, tensor.device_mesh, tensor.placements, src_data_rank=None)
        if part is not None:
            mark_part(local, part)
        return local


def cut_of_part(tensor: Tensor) -> tuple[Runtime | None, str] | None:
    """The model, and the name of the parameter that a part is cut as; no model: it is gone, or the part is cut otherwise, as a
    transposed one is. None: ``tensor`` does not show what it is a part of."""
    part = part_of(tensor)
    if part is None:
        return None
    runtime = part.runtime()
    own = None if runtime is None else getattr(runtime.parameters[part.name], MARK, None)
    return (runtime if own is not None and own.cuts == part.cuts else None), part.name


def marked_as(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, which is cut as ``other`` is and from now on shows it if that does."""
    if (part := part_of(other)) is not None:
        mark_part(tensor, part)
    return tensor


# ---- classes --------------------------------------------------------------------------------------------------


@functools.cache
def with_part(own: type) -> type:
    """A class of tensors that are parts, over torch's ``own``."""
    return type(own)(own.__name__, (Part, own), {"__module__": __name__, "_shardwise_own": own})


def own_class(shown: type) -> type:
    """The class of torch's below one of :func:`with_part`."""
    return getattr(shown, "_shardwise_own", shown)


def _as_torchs(part: Any, call: Any) -> Any:
    """``call`` of a part that has torch's own class meanwhile, and does not know what it is a part of."""
    shown, mark = type(part), part.__dict__.pop(MARK)
    part.__class__ = own_class(shown)
    try:
        return call(part)
    finally:
        part.__class__ = shown
        setattr(part, MARK, mark)


def mark_part(tensor: Tensor, part: PartOf) -> None:
    """From here on ``tensor`` shows what it is a part of."""
    setattr(tensor, MARK, part)
    if not isinstance(tensor, Part):
        tensor.__class__ = with_part(type(tensor))


def part_of(tensor: Any) -> PartOf | None:
    """What ``tensor`` is a part of; None: it does not show it."""
    return getattr(tensor, MARK, None) if isinstance(tensor, Part) else None


# ---- calls ----------------------------------------------------------------------------------------------------


def _is_read_by_us(frame: FrameType | None) -> bool:
    """Whether a function of torch was called by Shardwise or torch's own machinery, within a forward of the model or in a
    backward; a hook of the user's in these is neither."""
    if frame is not None and frame.f_code is _NEW_PARAMETER:  # it refuses a tensor whose detach() is of another class
        return False
    is_backward, is_users = in_backward(), False
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if frame.f_code is _IN_HOOK:
            return False
        if is_backward and name.startswith(_ENGINE):
            break
        if not is_users and name.startswith(OWN_FRAMES) and not name.startswith(_SAVING):
            return True
        if (is_backward and name in _RUNS_MODEL) or (
            frame.f_code in CALLS and frame.f_locals.get("self") in with_parts
        ):
            return True
        is_users = is_users or not name.startswith(("torch.", "shardwise."))
        frame = frame.f_back
    return not is_users


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    parts = [part for x in _tensors((args, kwargs)) if (part := part_of(x)) is not None]
    kind, name = kind_of(func)
    if not parts:
        return func(*args, **kwargs)
    if kind is Kind.REFUSED:
        raise refusal(name, parts[0])
    if kind in (Kind.ALONG, Kind.VIEW):
        return (_along if kind is Kind.ALONG else _viewed)(func, name, args, kwargs, parts[0])
    if kind is Kind.NUMEL:
        return math.prod(whole_sizes(args[0], parts[0].cuts))
    if kind is Kind.WRITE:
        mask = args[1]
        if part_of(mask) is None:
            raise refusal(BY_PLACE, parts[0])
        if (
            isinstance(args[2], Tensor) and args[2].dim() > args[0].dim() - mask.dim()
        ):  # it has a dim of what the mask takes
            raise beside_plain(name, parts[0])
        return func(*args, **kwargs)
    if kind is Kind.UNKNOWN:
        return _unknown(func, name, args, kwargs, parts[0])
    if kind is Kind.ELEMENTWISE or name == "__set__":
        _check_beside(name, args, {key: value for key, value in kwargs.items() if key != "out"})
    result = func(*args, **kwargs)
    if kind is Kind.GRADIENT and result is not None:
        mark_part(result, replace(parts[0], what="gradient"))
    elif kind is Kind.GRADIENTS:
        given = args[1] if len(args) > 1 else kwargs["inputs"]
        given = [given] if isinstance(given, Tensor) else given
        for grad, param in zip(result, given, strict=True):
            if grad is not None and (part := part_of(param)) is not None:
                mark_part(grad, replace(part, what="gradient"))
    elif kind is Kind.ELEMENTWISE:
        _carry(name, result, parts, args)
    return result


def _unknown(func: Any, name: str, args: Any, kwargs: Any, part: PartOf) -> Any:
    """Runs a function that is refused if it computes tensors, or cannot be run on a part."""
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        raise refusal(name, part) from error
    if any(True for _ in _tensors(result)):
        raise refusal(name, part)
    return result


def _check_beside(name: str, args: Any, kwargs: Any) -> None:
    """Raises UsageError if a part meets a tensor that is not cut as it is, and not one element along that dim. Where the part has
    one itself, it does not show whether a tensor is one for all ranks, or was made by the part's shape."""
    values = [*args, *kwargs.values()]
    columns = [value for value in values if isinstance(value, list | tuple)]
    for row in (
        zip(*columns, strict=True) if columns else [values]
    ):  # of _foreach operators: the tensors at the same place
        tensors = [x for x in row if isinstance(x, Tensor)]
        for part in filter(None, map(part_of, tensors)):
            for i, x in enumerate(tensors):
                own = part_of(x)
                for dim, cut in part.cuts.items():
                    if x.dim() < -dim or (own is not None and own.cuts.get(dim) == cut):
                        continue
                    is_replaced = i == 0 and name in ("copy_", "_foreach_copy_") and x.shape[dim] == cut[0]
                    if not is_replaced and (x.shape[dim] > 1 or cut[0] == 1):
                        raise beside_plain(name, part)


def _carry(name: str, result: Any, parts: list[PartOf], args: Any) -> None:
    if isinstance(result, list | tuple):  # of _foreach operators: from the tensors at the same place
        columns = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == len(result)]
        for i, each in enumerate(result):
            own = [part for column in columns if (part := part_of(column[i])) is not None]
            _carry(name, each, own, ())
    elif isinstance(result, Tensor) and parts:
        sizes = dict(zip(range(-result.dim(), 0), result.shape, strict=True))
        cuts = {dim: cut for part in parts for dim, cut in part.cuts.items() if sizes.get(dim) == cut[0]}
        known = part_of(result)
        if cuts and (known is None or known.cuts != cuts):
            mark_part(result, replace(parts[0], what="computed", cuts=cuts))


def _along(func: Any, name: str, args: Any, kwargs: Any, part: PartOf) -> Any:
    """Runs a function that is right for a part if all dims that are cut are dims of its results too, as they show where it is given
    wholes, on meta."""

    def as_whole(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = part_of(x)
        return torch.empty(whole_sizes(x, own.cuts if own else {}), dtype=x.dtype, device="meta")

    try:
        wholes = list(_tensors(func(*map_leaves(as_whole, args), **map_leaves(as_whole, kwargs))))
        result = func(*args, **kwargs)
    except Exception as error:
        raise refusal(name, part) from error
    for each, whole in zip(_tensors(result), wholes, strict=True):
        sizes = enumerate(zip(each.shape, whole.shape, strict=False), -each.dim())
        cuts = {dim: pair for dim, pair in sizes if pair[0] != pair[1]}
        if each.dim() != whole.dim() or sorted(cuts.values()) != sorted(part.cuts.values()):
            raise refusal(name, part)
        mark_part(each, replace(part, what="computed", cuts=cuts))
    return result


def _viewed(func: Any, name: str, args: Any, kwargs: Any, part: PartOf) -> Any:
    """Runs a view by sizes, ``x.view(x.shape[0], -1)``, which is right for a part if the dims up to the last that is cut stay."""
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        raise refusal(name, part) from error
    given = args[0].shape
    stay = len(given) + max(part.cuts) + 1
    if result.shape[:stay] != given[:stay]:
        raise refusal(name, part)
    more = len(given) - result.dim()
    mark_part(result, replace(part, what="computed", cuts={dim + more: sizes for dim, sizes in part.cuts.items()}))
    return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


# ---- the whole ------------------------------------------------------------------------------------------------
