"""Operators of DTensors for which torch has wrong rules: each gives what it gives of the whole tensor."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch.dtensor import cuts_of, without_handler

_aten = torch.ops.aten
_MEAN = 1  # as an operator gets the reduction
# With reduction="mean", torch's rules divide by the elements that this rank has, forward or backward.
_LOSSES = [
    getattr(_aten, f"{name}{which}").default
    for name in (
        *("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"),
        "binary_cross_entropy_with_logits",
    )
    for which in ("", "_backward")
    if hasattr(_aten, f"{name}{which}")
]
# dim=[], as amax() and norm(inf) have it in their backward, means all dims: torch's rules take it for none.
_BY_DIMS = [
    operator
    for name in (
        *("sum", "nansum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "count_nonzero"),
        *("norm", "linalg_vector_norm", "logsumexp"),
    )
    for kind in getattr(_aten, name).overloads()
    for operator in [getattr(getattr(_aten, name), kind)]
    if any(each.name == "dim" and "List[int]" in str(each.type) for each in operator._schema.arguments)
    and not kind.endswith("out")
]
# A dim that is counted from the end is taken for none that is cut.
_FROM_THE_END = [getattr(_aten, name).default for name in ("cumsum", "cumprod", "logcumsumexp")]


def mend_rules() -> None:
    """Makes these operators give what they give of the whole tensor, from now on in this process."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers |= dict.fromkeys(_LOSSES, _averaged) | dict.fromkeys(_BY_DIMS, _over_all_dims)
    handlers |= dict.fromkeys(_FROM_THE_END, _along)
    handlers |= {getattr(_aten.any, kind): _any for kind in ("default", "dim", "dims")}
    handlers[_aten.gather.default] = _taken


def _over_all_dims(op: Any, args: Any, kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    if named.get("dim") == []:
        named["dim"] = list(range(args[0].dim()))
    with without_handler(op):
        return op(**named)


def _along(op: Any, args: Any, kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    named["dim"] %= max(args[0].dim(), 1)
    with without_handler(op):
        return op(**named)


def _any(op: Any, args: Any, kwargs: Any) -> Any:
    """Counts: torch adds the ranks' answers as bools, of which two make a true value that is not equal to True."""
    named, tensor = _named(op, args, kwargs), args[0]
    if (dims := named.get("dim")) == []:  # of no dim: each element by itself
        return tensor.ne(0)
    found = tensor.ne(0).sum(list(range(tensor.dim())) if dims is None else dims, named.get("keepdim", False)).gt(0)
    return found.to(tensor.dtype) if tensor.dtype == torch.uint8 else found


def _averaged(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs a loss on whole tensors where it takes a mean."""
    named = _named(op, args, kwargs)
    return _of_wholes(op, named, named.get("reduction", _MEAN) == _MEAN)


def _taken(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs ``gather``, which the backward of ``scatter`` calls too, on whole tensors where the places are of fewer rows: those of a rank are
    not of the rows that it has."""
    named = _named(op, args, kwargs)
    tensor, dim, index = named["self"], named["dim"], named["index"]
    sizes = [(a, b) for i, (a, b) in enumerate(zip(tensor.shape, index.shape, strict=False)) if i != dim % tensor.dim()]
    return _of_wholes(op, named, any(a != b for a, b in sizes))


def _of_wholes(op: Any, named: dict[str, Any], is_wrong: bool) -> Any:
    """Runs ``op`` on whole tensors if torch ``is_wrong`` on cut ones: the same result on every rank, and a gradient that is cut later."""
    given = [x for x in named.values() if isinstance(x, DTensor)]
    mesh = given[0].device_mesh
    if not is_wrong or not any(any(cuts_of(x)) for x in given) or any(x.device_mesh != mesh for x in given):
        with without_handler(op):
            return op(**named)
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}
    return DTensor.from_local(op(**whole), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
