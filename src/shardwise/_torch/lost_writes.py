"""Writes to DTensors that torch would lose or compute wrongly: seen where the operator is called, and refused."""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdKeyDictionary

from shardwise._torch.dtensor import cut_like, cuts_of, local_tensor, without_handler
from shardwise._torch.patches import patch
from shardwise._torch.pytrees import tree_flatten

Origin = tuple[int, int]
"""Where a local piece is: its address, and its memory, which an empty piece has too."""
Kind = Literal["write", "view", "draw"]
Refuse = Callable[[str, Origin, Kind], None]
_on_lost_write = WeakIdKeyDictionary()  # root of a mesh -> the function to call
_aten = torch.ops.aten
# Views for which torch gathers: along a dim that is cut, or of one that the ranks do not divide.
_VIEWS = (
    *("select", "slice", "split", "split_with_sizes", "unsafe_split", "diagonal", "view_as_complex", "view_as_real"),
    # Which some versions of torch make of what they gather.
    *("view", "t", "transpose", "permute", "squeeze", "unsqueeze"),
)
# Writes by place, and of plain tensors: torch refuses most of them, in words about strategies and meshes.
_PLACED = (
    *("copy_", "index_put_", "_index_put_impl_", "index_fill_", "index_copy_", "index_add_", "index_reduce_", "put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_fill_", "masked_scatter_", "triu_", "tril_"),
)
# Writes into lists of tensors: of plain ones torch refuses them, in words about mixed tensors.
_LISTS = tuple(f"_foreach_{name}_" for name in ("copy", "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"))
# On the CPU each rank draws what is its own: other numbers than one process, and other ones in each replica.
DRAWS_IN_PLACE = frozenset(
    ["normal_", "uniform_", "exponential_", "bernoulli_", "geometric_", "cauchy_", "log_normal_", "random_"]
)
_DRAWS = (
    *DRAWS_IN_PLACE,
    *("randn_like", "rand_like", "randint_like", "bernoulli", "normal", "poisson", "binomial", "multinomial"),
    *("native_dropout", "rrelu_with_noise", "rrelu_with_noise_"),
)
# With out=, each rank would write the whole, or its own sum, in place of its piece of the whole.
_REDUCTIONS = (
    "mean", "sum", "amax", "amin", "prod", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "all", "any",
)  # fmt: skip
_NEVER = [
    getattr(packet, kind)
    for packet in (getattr(_aten, name) for name in (*_REDUCTIONS, "mm", "addmm", "cat", "stack", "eye"))
    for kind in packet.overloads()
    if kind.endswith("out")
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
    of the local piece that the tensor is, or was viewed from, and what the operator does.
    """
    if not getattr(DTensor, "shardwise_refuses", False):
        DTensor.shardwise_refuses = True  # type: ignore[attr-defined]
        dispatcher: Any = DTensor._op_dispatcher
        handlers = dispatcher._custom_op_handlers
        for names, run in ((_VIEWS, _viewed), (_PLACED + _LISTS, _placed), (_DRAWS, _drawn)):
            packets = [getattr(_aten, name) for name in names]
            handlers |= {getattr(packet, kind): run for packet in packets for kind in packet.overloads()}
        handlers |= {_aten.fill_.Tensor: _filled, _aten.fill_.Scalar: _filled, **dict.fromkeys(_NEVER, _never)}
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
                # Operators of lists (_foreach_add_) are known by their names.
                if each._version != version or (name[:1] == "_" and name.endswith("_") and name[-2:] != "__"):
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
    if call is not None and (origin is not None or any(cuts_of(tensor))):
        call(name, origin or origin_of(tensor), kind)


def _viewed(op: Any, args: Any, kwargs: Any) -> Any:
    with without_handler(op):
        result = op(*args, **kwargs)
    tensor = args[0]
    if not torch.compiler.is_compiling() and tensor.device_mesh._get_root_mesh() in _on_lost_write:
        cuts = cuts_of(tensor)
        for each in result if isinstance(result, list | tuple) else (result,):
            if cuts != cuts_of(each) and not is_fake(tensor._local_tensor):
                _mark(each, origin_of(tensor))
    return result


def _has_no_rule(error: RuntimeError) -> bool:
    """Whether torch refuses an operator because of how its arguments are cut, and not, say, for want of memory."""
    return any(words in str(error) for words in _WORDS)


def _strided(before: Callable[..., Any] | None, op: Any, args: Any, kwargs: Any) -> Any:
    try:
        if before is not None:
            return before(op, args, kwargs)
        with without_handler(op):
            return op(*args, **kwargs)
    except RuntimeError:
        _refuse(args[0], "as_strided", kind="view")
        raise


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    tensor = next((x for x in args if isinstance(x, DTensor)), None)
    if tensor is not None and tensor.device_mesh.device_type == "cpu" and not is_fake(tensor._local_tensor):
        _refuse(tensor, op.overloadpacket.__name__, origin=origin_of(tensor), kind="draw")
    with without_handler(op):
        return op(*args, **kwargs)


def _placed(op: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], _Gathered):  # that w[0] = x has made, in C++
        _refuse(args[0], op.overloadpacket.__name__, origin=args[0].origin)
    try:
        with without_handler(op):
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
        with without_handler(op):
            return op(*args, **_kwargs)
    op(tensor._local_tensor, value.full_tensor() if isinstance(value, DTensor) else value)
    return tensor


def _never(op: Any, _args: Any, kwargs: Any) -> Any:
    if isinstance(kwargs["out"], DTensor):
        _refuse(kwargs["out"], op.overloadpacket.__name__)
    with without_handler(op):
        return op(*_args, **kwargs)


def _before_redistribution(info: Any, wanted: Any, *rest: Any) -> None:
    """Called before torch gathers an argument of an operator, or cuts it otherwise."""
    given, then = info.flat_args_schema[0], wanted.args_schema[0]
    written = wanted.op._schema.arguments[0].alias_info
    if written is not None and written.is_write and isinstance(then, DTensorSpec) and cuts_of(given) != cuts_of(then):
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
