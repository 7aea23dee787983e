"""DTensors: the local piece of a rank, Python numbers read from a DTensor, writes that would be lost, DTensors over existing memory."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from shardwise._torch.patches import patch
from shardwise._torch.pytrees import tree_flatten


def cut_like(local: Tensor, other: DTensor) -> DTensor:
    """A DTensor with the mesh and placements of ``other``, whose local piece is ``local``: same memory, same device.

    ``DTensor.from_local`` would move ``local`` to the device of the mesh. For an offloaded parameter, optimizer state
    would then be on the accelerator, where the optimizer does not step.
    """
    meta = TensorMeta(other.shape, other.stride(), local.dtype)
    return DTensor(
        local.detach(), DTensorSpec(other.device_mesh, other.placements, tensor_meta=meta), requires_grad=False
    )


def forget_meshes() -> None:
    """Clears torch's cache of sharding results of DTensor operators. Its keys take meshes over the same ranks as equal,
    so results in a new world would be on a mesh of the previous world, whose process groups no longer exist."""
    # torch.distributed.tensor.debug does this too, but importing it imports the compiler: a second of each rank's start
    with suppress(AttributeError):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's local piece of a DTensor, without the autograd work of ``to_local``; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


_on_scalar_read = WeakIdKeyDictionary()  # root of a mesh -> the function to call


def on_scalar_read(mesh: DeviceMesh, call: Callable[[DTensor], None]) -> None:
    """Calls ``call`` with a DTensor before a Python number is taken from it, if it is over ``mesh`` or a part of it.

    Covers ``item()``, ``float()``, ``bool()`` and a scalar argument of an operator, which torch reads from this rank's
    piece; also formatting, ``tolist()`` and ``numpy()``, whose own errors do not say what to do. DTensors over other
    meshes are read as before.
    """
    handlers, read = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default
    if not _on_scalar_read:
        handlers[read] = _scalar_reader(handlers.get(read))
        for name in ("__format__", "tolist", "numpy"):
            _call_before(name)
    _on_scalar_read[mesh._get_root_mesh()] = call


def _scalar_reader(before: Callable[..., Any] | None) -> Callable[..., Any]:
    if getattr(before, "is_ours", False):
        return before  # type: ignore[return-value]

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None:
            call(tensor)
        if before is not None:
            return before(op, args, kwargs)
        return op(tensor._local_tensor) if tensor.device_mesh.get_coordinate() is not None else None

    read.is_ours = True  # type: ignore[attr-defined]
    return read


def _call_before(name: str) -> None:
    method = getattr(DTensor, name)

    @functools.wraps(method)
    def read(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None and args != ("",):  # f"{x}" is printing
            call(tensor)
        return method(tensor, *args, **kwargs)

    read.is_ours = True  # type: ignore[attr-defined]
    if not getattr(method, "is_ours", False):
        patch(DTensor, name, read, "refuses to read numbers of this rank's piece of a parameter")


# ---- writes -------------------------------------------------------------------------------------------------------

Origin = tuple[int, int]
"""Where a local piece is: its address, and its memory, which an empty piece has too."""
Kind = Literal["write", "view", "draw"]
Refuse = Callable[[str, Origin, Kind], None]
_on_lost_write = WeakIdKeyDictionary()  # root of a mesh -> the function to call
_aten = torch.ops.aten
# Views for which torch gathers: along a dim that is cut, or of one that the ranks do not divide.
_VIEWS = (
    *("select", "slice", "split", "split_with_sizes", "unsafe_split", "diagonal", "view_as_complex", "view_as_real"),
    *(
        "view",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
    ),  # which some versions of torch make of what they gather
)
# Writes by place, and of plain tensors: torch refuses most of them, in words about strategies and meshes.
_PLACED = (
    *("copy_", "index_put_", "_index_put_impl_", "index_fill_", "index_copy_", "index_add_", "index_reduce_", "put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_fill_", "masked_scatter_", "triu_", "tril_"),
)
# Writes into lists of tensors: of plain ones torch refuses them, in words about mixed tensors.
_LISTS = tuple(f"_foreach_{name}_" for name in ("copy", "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"))
# On the CPU each rank draws what is its own: other numbers than one process, and other ones in each replica.
_DRAWS = ("normal_", "uniform_", "exponential_", "bernoulli_", "geometric_", "cauchy_", "log_normal_", "random_")
# With out=, each rank would write the whole, or its own sum, in place of its piece of the whole.
_REDUCTIONS = (
    "mean",
    "sum",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "norm",
    "linalg_vector_norm",
    "logsumexp",
    "all",
    "any",
)
_NEVER = [
    getattr(packet, kind)
    for packet in (getattr(_aten, name) for name in (*_REDUCTIONS, "mm", "addmm", "cat", "stack", "eye"))
    for kind in packet.overloads()
    if kind.endswith("out")
]
# Losses with reduction="mean": torch's rules divide by the elements that this rank has, forward or backward.
_LOSSES = [
    getattr(_aten, f"{name}{which}").default
    for name in (
        *("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"),
        "binary_cross_entropy_with_logits",
    )
    for which in ("", "_backward")
    if hasattr(_aten, f"{name}{which}")
]
_MEAN = 1  # as an operator gets the reduction
# dim=[], as amax() and norm(inf) have it in their backward, means all dims: torch's rules take it for none.
_BY_DIMS = [
    getattr(getattr(_aten, name), kind)
    for name in ({*_REDUCTIONS, "nansum", "var_mean", "std_mean", "count_nonzero"} - {"all", "any"})
    for kind in getattr(_aten, name).overloads()
    if any(
        each.name == "dim" and "List[int]" in str(each.type)
        for each in getattr(getattr(_aten, name), kind)._schema.arguments
    )
    and not kind.endswith("out")
]
_WORDS = (
    "sharding strateg",
    "got mixed torch.Tensor and DTensor",
    "placement",
    "shard",
    "redistribut",
    "mesh",
)  # of torch's errors
_WRITE = re.compile(r"(?!__).*_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|__setitem__")
_NO_OPERATORS = ("apply_", "map_", "map2_", "set_")  # on a DTensor they end the process by a signal
_NOT_AT_ALL = ("fill_diagonal_",)  # torch speaks of as_strided


def on_lost_write(mesh: DeviceMesh, call: Refuse) -> None:
    """Calls ``call``, which raises, for a write into a DTensor over ``mesh``, or a part of it, that torch would lose or cannot do.

    For a view along the dim that is cut (``w[0]``) torch gathers the tensor: the view is a copy. It can be read; an in-place operator
    on it, or on a view of it, calls. So does an in-place operator for which torch gathers what it writes, or that it has no rule for, a
    view that it cannot make, and an assignment to ``.data``, which a DTensor does not follow. ``call`` gets the operator's name, the place
    of the local piece that the tensor is, or was viewed from, and what the operator does; of a draw of random numbers, which is
    other numbers on each rank, it may return.
    """
    if not getattr(DTensor, "shardwise_refuses", False):
        DTensor.shardwise_refuses = True  # type: ignore[attr-defined]
        dispatcher: Any = DTensor._op_dispatcher
        handlers = dispatcher._custom_op_handlers
        for names, run in ((_VIEWS, _viewed), (_PLACED + _LISTS, _placed), (_DRAWS, _drawn)):
            packets = [getattr(_aten, name) for name in names]
            handlers |= {getattr(packet, kind): run for packet in packets for kind in packet.overloads()}
        handlers |= {_aten.fill_.Tensor: _filled, _aten.fill_.Scalar: _filled, **dict.fromkeys(_NEVER, _never)}
        handlers |= dict.fromkeys(_LOSSES, _averaged) | dict.fromkeys(_BY_DIMS, _over_all_dims)
        dispatcher.redistribute_local_args = _before_redistribution
        dispatcher._propagate_op_sharding_dispatch_slow_path = _with_reasons(
            dispatcher._propagate_op_sharding_dispatch_slow_path
        )
        handlers[_aten.as_strided.default] = functools.partial(_strided, handlers.get(_aten.as_strided.default))
        for name in _NO_OPERATORS:
            patch(DTensor, name, _refusing(name), "refuses what ends the process by a signal")
        for name in _NOT_AT_ALL:
            patch(DTensor, name, _refusing(name), "refuses a write that torch has no rule for")
        data = property(Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]
        patch(DTensor, "data", data, "refuses an assignment that would be lost")
    _on_lost_write[mesh._get_root_mesh()] = call


class _Gathered(DTensor):
    """A view for which torch has gathered a DTensor: a copy, which is read as any DTensor and refuses to be written.

    Attributes:
        origin: the local piece that it was viewed from.
    """

    origin: Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not __torch_dispatch__: before torch 2.13 that of a subclass of DTensor is not called.
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, _Gathered)]
        with torch._C.DisableTorchFunctionSubclass():
            out = kwargs.get("out")
            written = out if out is not None or not args or not _WRITE.fullmatch(name) else args[0]
            written = written[0] if isinstance(written, list | tuple) and written else written
            home = origin_of(written)[1] if isinstance(written, DTensor) else None
            for each in given:  # the second: what is read, a copy, is of what is written
                if each is out or (each is not written and each.origin[1] == home):
                    _refuse(each, name, origin=each.origin)
            versions = [x._version for x in given]
            result = func(*args, **kwargs)
            for each, version in zip(given, versions, strict=True):
                if each._version != version or (
                    name[:1] == "_" and name.endswith("_") and name[-2:] != "__"
                ):  # of lists
                    _refuse(each, name, origin=each.origin)
            for each in tree_flatten(result)[0] if given else ():
                if type(each) is DTensor and _address(each) == _address(given[0]):
                    _mark(each, given[0].origin)
        return result

    def __reduce_ex__(self, proto: Any) -> Any:
        return cut_like(self._local_tensor, self).__reduce_ex__(proto)


def _address(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def origin_of(tensor: Tensor) -> Origin:
    """Where the local piece of a tensor is."""
    local = local_tensor(tensor)
    return local.data_ptr(), id(local.untyped_storage())  # one object for each memory, as long as it is there


def _mark(tensor: DTensor, origin: Origin) -> None:
    tensor.__class__ = _Gathered
    tensor.origin = origin  # type: ignore[attr-defined]


def _refuse(tensor: DTensor, name: str, *, origin: Origin | None = None, kind: Kind = "write") -> None:
    """Calls what was registered for the mesh of ``tensor``, if it is cut."""
    call = _on_lost_write.get(tensor.device_mesh._get_root_mesh())
    if call is not None and (origin is not None or any(_cuts(tensor))):
        call(name, origin or origin_of(tensor), kind)


def _cuts(tensor: DTensor | DTensorSpec) -> list[bool]:
    """For each dim of its mesh: ranks along it have other values."""
    return [n > 1 and not p.is_replicate() for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True)]


@contextmanager
def _without_handler(op: Any) -> Iterator[None]:
    """torch runs ``op`` by itself. A view that another thread makes meanwhile is not marked."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op, None)
    try:
        yield
    finally:
        if handler is not None:
            handlers[op] = handler


def _viewed(op: Any, args: Any, kwargs: Any) -> Any:
    with _without_handler(op):
        result = op(*args, **kwargs)
    tensor = args[0]
    if not torch.compiler.is_compiling() and tensor.device_mesh._get_root_mesh() in _on_lost_write:
        cuts = _cuts(tensor)
        for each in result if isinstance(result, list | tuple) else (result,):
            if cuts != _cuts(each) and not is_fake(tensor._local_tensor):
                _mark(each, origin_of(tensor))
    return result


def _has_no_rule(error: RuntimeError) -> bool:
    """Whether torch refuses an operator because of how its arguments are cut, and not, say, for want of memory."""
    return any(words in str(error) for words in _WORDS)


def _strided(before: Callable[..., Any] | None, op: Any, args: Any, kwargs: Any) -> Any:
    try:
        if before is not None:
            return before(op, args, kwargs)
        with _without_handler(op):
            return op(*args, **kwargs)
    except RuntimeError:
        _refuse(args[0], "as_strided", kind="view")
        raise


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu" and not is_fake(tensor._local_tensor):
        _refuse(tensor, op.overloadpacket.__name__, kind="draw")
    with _without_handler(op):
        return op(*args, **kwargs)


def _placed(op: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], _Gathered):  # that w[0] = x has made, in C++
        _refuse(args[0], op.overloadpacket.__name__, origin=args[0].origin)
    try:
        with _without_handler(op):
            return op(*args, **kwargs)
    except RuntimeError as error:
        written = (
            next((x for x in args[0] if isinstance(x, DTensor)), None) if isinstance(args[0], list | tuple) else args[0]
        )
        if isinstance(written, DTensor) and _has_no_rule(error):
            _refuse(written, op.overloadpacket.__name__)
        raise


def _filled(op: Any, args: Any, _kwargs: Any) -> Any:
    """``w[:, 0] = 1``, for which torch has no rule: a fill of a view that is this rank's own."""
    tensor, value = args
    if isinstance(tensor, _Gathered):
        _refuse(tensor, "fill_", origin=tensor.origin)
    is_ours = isinstance(tensor, DTensor) and tensor.device_mesh._get_root_mesh() in _on_lost_write
    if not is_ours or any(placement.is_partial() for placement in tensor.placements):
        with _without_handler(op):
            return op(*args, **_kwargs)
    op(tensor._local_tensor, value.full_tensor() if isinstance(value, DTensor) else value)
    return tensor


def _never(op: Any, _args: Any, kwargs: Any) -> Any:
    if isinstance(kwargs["out"], DTensor):
        _refuse(kwargs["out"], op.overloadpacket.__name__)
    with _without_handler(op):
        return op(*_args, **kwargs)


def _over_all_dims(op: Any, args: Any, kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    if named.get("dim") == []:
        named["dim"] = list(range(args[0].dim()))
    with _without_handler(op):
        return op(**named)


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name."""
    return dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs


def _averaged(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs a loss on whole tensors where it takes a mean over what is cut: the same result on every rank, and a gradient that is cut later."""
    named = _named(op, args, kwargs)
    given = [x for x in named.values() if isinstance(x, DTensor)]
    mesh = given[0].device_mesh
    is_ours = mesh._get_root_mesh() in _on_lost_write and all(x.device_mesh == mesh for x in given)
    if not is_ours or named.get("reduction", _MEAN) != _MEAN or not any(any(_cuts(x)) for x in given):
        with _without_handler(op):
            return op(*args, **kwargs)
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}
    return DTensor.from_local(op(**whole), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _before_redistribution(info: Any, wanted: Any, *rest: Any) -> None:
    """Called before torch gathers an argument of an operator, or cuts it otherwise."""
    given, then = info.flat_args_schema[0], wanted.args_schema[0]
    written = wanted.op._schema.arguments[0].alias_info
    if written is not None and written.is_write and isinstance(then, DTensorSpec) and _cuts(given) != _cuts(then):
        call = _on_lost_write.get(given.mesh._get_root_mesh())
        if call is not None:
            call(wanted.op.overloadpacket.__name__, origin_of(info.local_args[0]), "write")
    type(DTensor._op_dispatcher).redistribute_local_args(info, wanted, *rest)


def _with_reasons(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """``propagate`` looks for a rule for an operator, once for each that has one."""

    def find(op: Any, args: Any, *rest: Any, **options: Any) -> Any:
        try:
            return propagate(op, args, *rest, **options)
        except RuntimeError as error:
            target = args[0] if args and isinstance(args[0], DTensor) else rest[0].get("out") if rest else None
            if _has_no_rule(error) and (op._schema.is_mutable or op.is_view) and isinstance(target, DTensor):
                _refuse(target, op.overloadpacket.__name__, kind="write" if op._schema.is_mutable else "view")
            raise

    return find


def _refusing(name: str) -> Callable[..., Any]:
    method = getattr(DTensor, name)

    def write(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse(tensor, name, origin=origin_of(tensor))
        return method(tensor, *args, **kwargs)

    return write


def _set_data(tensor: DTensor, value: Tensor) -> None:
    _refuse(tensor, "data", origin=origin_of(tensor))
    Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
