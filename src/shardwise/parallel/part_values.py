"""Values read outside of forward from a parameter of which a rank has a part as a plain tensor: a norm, a mean, a number.

torch would give those of the part, another one on each rank. So outside of the model's forward such a parameter is of a subclass of
its class, and so are its gradient and what is computed from them element by element. They refuse what mixes the elements along a dim
that is cut; within the forward of the model, in a backward and in an optimizer's step everything has torch's own classes.
"""

import contextlib
import enum
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as all_modules

from shardwise._torch.autograd import in_backward, without_subclasses
from shardwise._torch.modules import CALLS, before_fan
from shardwise._torch.patches import patch
from shardwise.config.keywords import public_call
from shardwise.errors import UsageError
from shardwise.model.pytrees import map_leaves
from shardwise.model.tensors import bytes_of
from shardwise.parallel.part_functions import Kind, kind_of, whole_sizes
from shardwise.parallel.runtime import Runtime
from shardwise.recipe import Param, extents, local_shape

_MARK = "_shardwise_part"
# Each module of a model with parts.
_shown: "weakref.WeakKeyDictionary[nn.Module, ShownParts]" = weakref.WeakKeyDictionary()
# Modules that read no number of a part, or are refused themselves; and one of them that saves what it is given.
_OWN_FRAMES = ("shardwise.", "torch.optim.", "torch.amp.", "torch.distributed.", "torch._dynamo.", "torch._subclasses.")
_SAVING = "torch.distributed.checkpoint."
# In a backward: what calls hooks; what runs the model's code, that of a function of its own, or again what was not kept.
_ENGINE, _RUNS_MODEL = "torch.autograd.graph", ("torch.autograd.function", "torch.utils.checkpoint")
_TRANSFORMS = ("torch._functorch.vmap", "torch._functorch.eager_transforms")
_HOOKS = frozenset(
    f"register_{of}{name}"
    for of in ("", "module_")  # of one module, of all
    for name in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook", "backward_hook")
)
_NEW_PARAMETER = nn.Parameter.__new__.__code__


@dataclass(frozen=True)
class _PartOf:
    """What a tensor is a part of.

    Attributes:
        runtime: of the model.
        name: of the parameter.
        axis: over which it is cut.
        what: ``parameter``, ``gradient``, or ``computed``.
        cuts: dim, counted from the end -> its size here and in the whole.
    """

    runtime: "weakref.ref[Runtime]"
    name: str
    axis: str
    what: str
    cuts: dict[int, tuple[int, int]]


class _Part:
    """Mixed into the class of a tensor that is a part."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        with without_subclasses():
            if _is_read_by_us(frame):
                return func(*args, **(kwargs or {}))
            if (
                frame.f_globals.get("__name__") in _TRANSFORMS
            ):  # which looks at sizes; what it computes with no one sees
                raise _refusal("torch.func", next(part for x in _tensors((args, kwargs)) if (part := _part_of(x))))
            return _call(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        return _as_torchs(self, lambda plain: plain.__repr__(**options))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (part := _part_of(self)) is not None and not _is_read_by_us(sys._getframe(1)):
            raise _refusal("torch.save, or a copy by pickle,", part)
        return _as_torchs(self, lambda plain: plain.__reduce_ex__(protocol))

    def __deepcopy__(self, memo: Any) -> Any:
        part = _part_of(self)
        copied = _as_torchs(self, lambda plain: plain.__deepcopy__(memo))
        if part is not None:
            _mark(copied, part)
        return copied

    def full_tensor(self, **options: Any) -> Tensor:
        """The whole value, as of a DTensor; all ranks must call it."""
        with without_subclasses():
            return _gathered(self, **options)  # type: ignore[arg-type]

    def to_local(self, **options: Any) -> Tensor:
        """This rank's part, as a plain tensor."""
        with without_subclasses():
            return super().to_local(**options) if isinstance(self, DTensor) else self.as_subclass(Tensor)  # type: ignore[misc,attr-defined]


class State(enum.Enum):
    """Whose code runs."""

    SHOWN = enum.auto()  # the user's: parts are of classes that refuse
    FORWARD = enum.auto()  # the model's
    STEP = enum.auto()  # an optimizer's, or Shardwise's


class ShownParts:
    """The parameters of one model of which a rank has plain parts, and the classes that they have while the user's code runs."""

    def __init__(self, runtime: Runtime, axes: dict[str, str]):
        self._params, self._gathered = [], runtime.engine.gathered
        for name, axis in axes.items():
            param, whole = runtime.parameters[name], runtime.recipe.params[name].shape
            sizes = zip(param.shape, whole, strict=True)
            cuts = {i - len(whole): (here, all_) for i, (here, all_) in enumerate(sizes) if here != all_}
            if cuts:
                setattr(param, _MARK, _PartOf(weakref.ref(runtime), name, axis, "parameter", cuts))
                self._params.append((param, type(param), _with_part(type(param))))
        self._outer: list[State] = []  # of each running forward: the state that it began in
        self._state = State.STEP
        self._set(State.SHOWN)

    def _set(self, state: State) -> State:
        """Returns the state before."""
        before, self._state = self._state, state
        if (state is State.SHOWN) != (before is State.SHOWN):
            for param, own, shown in self._params:
                param.__class__ = shown if state is State.SHOWN else own
        return before

    @contextlib.contextmanager
    def within(self, state: State) -> Iterator[None]:
        before = self._set(state)
        try:
            yield
        finally:
            self._set(before)

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """A hook of the user's runs in a forward or backward. What modules have gathered over dp is a part too."""
        gathered = [(whole, part) for whole, param in self._gathered() if (part := getattr(param, _MARK, None))]
        with self.within(State.SHOWN):
            for whole, part in gathered:
                _mark(whole, part)
            try:
                yield
            finally:
                for whole, _ in gathered:
                    whole.__class__ = _own_class(type(whole))

    def torchs(self) -> contextlib.AbstractContextManager[None]:
        return self.within(State.STEP)

    def begin_forward(self, *_: Any) -> None:
        self._outer.append(self._set(State.FORWARD))

    def end_forward(self, *_: Any) -> None:
        self._set(self._outer.pop() if self._outer else State.SHOWN)

    @contextlib.contextmanager
    def stepping(self, optim: torch.optim.Optimizer) -> Iterator[None]:
        self._set(State.STEP)
        try:
            with without_subclasses():  # of gradients and state too
                yield
        finally:
            self.mark_state(optim)
            self._outer.clear()  # as after a forward that was interrupted, which calls no hook
            self._set(State.SHOWN)

    def mark_state(self, optim: torch.optim.Optimizer) -> None:
        for param, _, _ in self._params:
            for value in optim.state.get(param, {}).values():
                if isinstance(value, Tensor) and not isinstance(value, _Part) and value.shape == param.shape:
                    _mark(value, replace(getattr(param, _MARK), what="state"))


def show_parts(runtime: Runtime, axes: dict[str, str]) -> None:
    """Makes parameters of ``runtime`` refuse, outside of forward, to give numbers of a part. ``axes``: their names, each with the
    axis over which it is cut."""
    if axes:
        shown = runtime.shown = ShownParts(runtime, axes)
        _shown.update(dict.fromkeys((module for _, module in runtime.modules), shown))
        runtime.module.register_forward_pre_hook(shown.begin_forward, prepend=True)
        runtime.module.register_forward_hook(shown.end_forward, always_call=True)
        before_fan(_refuse_fan)
        for owner in (nn.Module, all_modules):
            for name, register in [*vars(owner).items()]:
                if name in _HOOKS and not hasattr(register, "_shardwise_shows"):
                    patch(
                        owner,
                        name,
                        _showing(register),
                        "a hook sees parts of parameters as code outside of forward does",
                    )


def _showing(register: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that registers hooks of modules; those of a model with parts see them as the user's code does, outside of forward."""

    @functools.wraps(register)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module) and args[0] not in _shown:  # of another model, or not sharded yet
            return register(*args, **kwargs)
        if not (sys._getframe(1).f_globals.get("__name__") or "").startswith(_OWN_FRAMES):
            args = tuple(_in_hook(x) if callable(x) and not isinstance(x, nn.Module) else x for x in args)
            kwargs = {name: _in_hook(x) if name == "hook" else x for name, x in kwargs.items()}
        return register(*args, **kwargs)

    call._shardwise_shows = True  # type: ignore[attr-defined]
    return call


def _in_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook, updated=())
    def shown_to_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts = _shown.get(module)
        with contextlib.nullcontext() if parts is None else parts.in_hook():
            return hook(module, *args, **kwargs)

    return shown_to_hook


_IN_HOOK = _in_hook(print).__code__


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
    return tensor.full_tensor() if isinstance(tensor, _Part | DTensor) else tensor


def cut_of_part(tensor: Tensor) -> tuple[Runtime | None, str] | None:
    """The model, and the name of the parameter that a part is cut as; no model: it is gone, or the part is cut otherwise, as a
    transposed one is. None: ``tensor`` does not show what it is a part of."""
    part = _part_of(tensor)
    if part is None:
        return None
    runtime = part.runtime()
    own = None if runtime is None else getattr(runtime.parameters[part.name], _MARK, None)
    return (runtime if own is not None and own.cuts == part.cuts else None), part.name


def marked_as(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, which is cut as ``other`` is and from now on shows it if that does."""
    if (part := _part_of(other)) is not None:
        _mark(tensor, part)
    return tensor


# ---- classes --------------------------------------------------------------------------------------------------


@functools.cache
def _with_part(own: type) -> type:
    return type(own)(own.__name__, (_Part, own), {"__module__": __name__, "_shardwise_own": own})


def _own_class(shown: type) -> type:
    return getattr(shown, "_shardwise_own", shown)


def _as_torchs(part: Any, call: Any) -> Any:
    """``call`` of a part that has torch's own class meanwhile, and does not know what it is a part of."""
    shown, mark = type(part), part.__dict__.pop(_MARK)
    part.__class__ = _own_class(shown)
    try:
        return call(part)
    finally:
        part.__class__ = shown
        setattr(part, _MARK, mark)


def _mark(tensor: Tensor, part: _PartOf) -> None:
    setattr(tensor, _MARK, part)
    if not isinstance(tensor, _Part):
        tensor.__class__ = _with_part(type(tensor))


def _part_of(tensor: Any) -> _PartOf | None:
    return getattr(tensor, _MARK, None) if isinstance(tensor, _Part) else None


# ---- calls ----------------------------------------------------------------------------------------------------


def _is_read_by_us(frame: FrameType | None) -> bool:
    """Whether a function of torch was called by Shardwise or torch's own machinery, within a forward of the model or in a
    backward; a hook of the user's in these is neither."""
    if (
        frame is not None and frame.f_code is _NEW_PARAMETER
    ):  # which refuses a tensor whose detach() is of another class
        return False
    is_backward, is_users = in_backward(), False
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if frame.f_code is _IN_HOOK:
            return False
        if is_backward and name.startswith(_ENGINE):
            break
        if not is_users and name.startswith(_OWN_FRAMES) and not name.startswith(_SAVING):
            return True
        if (is_backward and name in _RUNS_MODEL) or (frame.f_code in CALLS and frame.f_locals.get("self") in _shown):
            return True
        is_users = is_users or not name.startswith(("torch.", "shardwise."))
        frame = frame.f_back
    return not is_users


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    parts = [part for x in _tensors((args, kwargs)) if (part := _part_of(x)) is not None]
    kind, name = kind_of(func)
    if not parts:
        return func(*args, **kwargs)
    if kind is Kind.REFUSED:
        raise _refusal(name, parts[0])
    if kind in (Kind.ALONG, Kind.VIEW):
        return (_along if kind is Kind.ALONG else _viewed)(func, name, args, kwargs, parts[0])
    if kind is Kind.NUMEL:
        return math.prod(whole_sizes(args[0], parts[0].cuts))
    if kind is Kind.WRITE:
        if _part_of(args[1]) is None:  # not a mask
            raise _refusal(_BY_PLACE, parts[0])
        return func(*args, **kwargs)
    if kind is Kind.UNKNOWN:
        return _unknown(func, name, args, kwargs, parts[0])
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if kind is Kind.ELEMENTWISE and "must match" in str(error):
            raise _beside_whole(name, parts[0]) from error
        raise
    if kind is Kind.GRADIENT and result is not None:
        _mark(result, replace(parts[0], what="gradient"))
    elif kind is Kind.GRADIENTS:
        given = args[1] if len(args) > 1 else kwargs["inputs"]
        given = [given] if isinstance(given, Tensor) else given
        for grad, param in zip(result, given, strict=True):
            if grad is not None and (part := _part_of(param)) is not None:
                _mark(grad, replace(part, what="gradient"))
    elif kind is Kind.ELEMENTWISE:
        _carry(name, result, parts, args)
    return result


def _unknown(func: Any, name: str, args: Any, kwargs: Any, part: _PartOf) -> Any:
    """Runs a function that is refused if it computes tensors, or cannot be run on a part."""
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        raise _refusal(name, part) from error
    if any(True for _ in _tensors(result)):
        raise _refusal(name, part)
    return result


def _carry(name: str, result: Any, parts: list[_PartOf], args: Any) -> None:
    """Marks what was computed from parts element by element."""
    if isinstance(result, list | tuple):  # of _foreach operators: from the tensors at the same place
        columns = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == len(result)]
        for i, each in enumerate(result):
            own = [part for column in columns if (part := _part_of(column[i])) is not None]
            _carry(name, each, own, ())
    elif isinstance(result, Tensor) and parts:
        sizes = dict(zip(range(-result.dim(), 0), result.shape, strict=True))
        for part in parts:
            if any(here == 1 and sizes.get(dim, 1) != 1 for dim, (here, _) in part.cuts.items()):
                raise _beside_whole(name, part)
        cuts = {dim: cut for part in parts for dim, cut in part.cuts.items() if sizes.get(dim) == cut[0]}
        known = _part_of(result)
        if cuts and (known is None or known.cuts != cuts):
            _mark(result, replace(parts[0], what="computed", cuts=cuts))


def _along(func: Any, name: str, args: Any, kwargs: Any, part: _PartOf) -> Any:
    """Runs a function that is right for a part if all dims that are cut are dims of its results too, as they show where it is given
    wholes, on meta."""

    def as_whole(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = _part_of(x)
        return torch.empty(whole_sizes(x, own.cuts if own else {}), dtype=x.dtype, device="meta")

    try:
        wholes = list(_tensors(func(*map_leaves(as_whole, args), **map_leaves(as_whole, kwargs))))
        result = func(*args, **kwargs)
    except Exception as error:
        raise _refusal(name, part) from error
    for each, whole in zip(_tensors(result), wholes, strict=True):
        sizes = enumerate(zip(each.shape, whole.shape, strict=False), -each.dim())
        cuts = {dim: pair for dim, pair in sizes if pair[0] != pair[1]}
        if each.dim() != whole.dim() or sorted(cuts.values()) != sorted(part.cuts.values()):
            raise _refusal(name, part)
        _mark(each, replace(part, what="computed", cuts=cuts))
    return result


def _viewed(func: Any, name: str, args: Any, kwargs: Any, part: _PartOf) -> Any:
    """Runs a view by sizes, ``x.view(x.shape[0], -1)``, which is right for a part if the dims up to the last that is cut stay."""
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        raise _refusal(name, part) from error
    given = args[0].shape
    stay = len(given) + max(part.cuts) + 1
    if result.shape[:stay] != given[:stay]:
        raise _refusal(name, part)
    more = len(given) - result.dim()
    _mark(result, replace(part, what="computed", cuts={dim + more: sizes for dim, sizes in part.cuts.items()}))
    return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


_BY_PLACE = "a write by place"
_PLACES = frozenset({"__getitem__", "select", "narrow", "index_select", "gather", "take", "masked_select"})


def _beside_whole(function: str, part: _PartOf) -> UsageError:
    return UsageError(
        f"{function} of a part of a parameter that is cut over {part.axis}, and of a tensor that is not cut as it is",
        why="each rank has a part of the parameter, and a whole tensor has other elements at the same places",
        fix="in place of the whole tensor take one that is cut alike: start = p.detach().clone(), or the parameter of a second model that was "
        "parallelized in the same way; or compute with wholes, for reading: sw.full_tensor(p)",
        name=part.name,
    )


def _refuse_fan(tensor: Tensor) -> None:
    part = _part_of(tensor)
    if part is not None:
        raise UsageError(
            f"an initialiser that counts the inputs and outputs of a parameter, which is cut over {part.axis}",
            why="each rank has a part of it, with fewer of them, so that its numbers would be too large",
            fix=f"initialise it where the model is made, before parallelize; or later its whole: {_PUT_BACK}",
            name=part.name,
        )


_PUT_BACK = "state = sw.full_state_dict(model); on rank 0 change state[name], on every rank sw.load_full_state_dict(model, state)"


def _refusal(function: str, part: _PartOf) -> UsageError:
    what = {
        "parameter": "a parameter",
        "gradient": "the gradient of a parameter",
        "state": "the optimizer's state of a parameter",
        "computed": "what was computed from a parameter, or its gradient,",
    }
    return UsageError(
        f"{function} of {what[part.what]} that is cut over {part.axis}, outside of the model's forward",
        why="each rank has a part of it, and would compute with its own: a norm, a mean or a number of a part, another one on each rank, by which "
        "what ranks have whole would drift apart",
        fix=f"write the whole: {_PUT_BACK}; a row is also cleared by a mask that is cut alike"
        if function == _BY_PLACE
        else f"read the whole, on every rank: sw.full_tensor(p)[0], or sw.full_tensor(p.grad)[0]; to write there: {_PUT_BACK}"
        if function in _PLACES
        else 'take the whole first, on every rank: sw.full_tensor(p.grad).norm(); or the norm of each: sw.parameter_norms(model, of="gradients"), of '
        "all gradients together, which clips by it: sw.clip_grad_norm_(model, max_norm), or TrainStep(max_grad_norm=). A penalty on weights: weight_decay= of the optimizer, or, after the window, "
        "p.grad.add_(p.detach(), alpha=0.02). This rank's part, if it is meant: p.detach().to_local()",
        name=part.name,
    )


# ---- the whole ------------------------------------------------------------------------------------------------


def _gathered(tensor: Tensor, **options: Any) -> Tensor:
    """The whole of a part."""
    part = _part_of(tensor)
    runtime = None if part is None else part.runtime()
    if part is None or runtime is None:
        raise UsageError(
            "full_tensor() of a part of a model that is no longer there",
            why="which ranks have the other parts is no longer known",
            fix="keep the model for as long as its tensors are used",
        )
    known = runtime.recipe.params[part.name]
    param = msgspec.structs.replace(known, cuts=tuple(cut for cut in known.cuts if cut.axis == part.axis))
    if whole_sizes(tensor, part.cuts) != tuple(param.shape):
        raise UsageError(
            f"full_tensor() of a tensor of another shape than {part.name}",
            why="how parts are put together is known for tensors that have the parameter's shape",
            fix="take the whole of the parameter, or of its gradient, first: sw.full_tensor(p).t()",
            name=part.name,
        )
    local = tensor.detach()
    local = DTensor.full_tensor(local, **options) if isinstance(local, DTensor) else local
    whole = _put_together(runtime, param, part.axis, local.as_subclass(Tensor))
    return _Whole.apply(tensor, whole, part) if torch.is_grad_enabled() and tensor.requires_grad else whole


class _Whole(torch.autograd.Function):
    """The whole of a part, to be read: a gradient of it would count as often as there are ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, _tensor: Tensor, whole: Tensor, part: _PartOf) -> Tensor:
        ctx.part = part
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UsageError(
            "a backward through sw.full_tensor(p)",
            why="it is for reading: each rank would add the gradient of a term that counts once",
            fix="a penalty on weights: weight_decay= of the optimizer, or, after the window, p.grad.add_(p.detach(), alpha=0.02); other code that "
            "computes with a parameter belongs into the model's forward",
            name=ctx.part.name,
        )


def _put_together(runtime: Runtime, param: Param, axis_name: str, local: Tensor) -> Tensor:
    axis = runtime.world.axis(axis_name)
    coords = [runtime.recipe.grid.coord(rank) for rank in axis.ranks]
    shapes = [local_shape(param, coord) for coord in coords]
    most = max(map(math.prod, shapes)) * local.element_size()
    mine = torch.zeros(most, dtype=torch.uint8, device=local.device)
    mine[: local.nbytes] = bytes_of(local)
    found = [torch.empty_like(mine) for _ in coords]
    runtime.world.agreement.carry_out(
        lambda: [dist.all_gather(found, mine, group=axis.group, async_op=True)], f"full_tensor of {axis_name} parts"
    )
    whole = torch.empty(param.shape, dtype=local.dtype, device=local.device)
    for coord, shape, sent in zip(coords, shapes, found, strict=True):
        given = sent[: math.prod(shape) * local.element_size()].view(local.dtype).view(shape)
        for piece in extents(param, coord):
            whole[piece.full_index] = given[piece.local_index]
    return whole
