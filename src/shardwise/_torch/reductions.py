"""Reductions of DTensors for which torch has wrong rules: each gives what it gives of the whole tensor."""

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


def mend_reductions() -> None:
    """Makes these operators give what they give of the whole tensor, from now on in this process."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers |= dict.fromkeys(_LOSSES, _averaged) | dict.fromkeys(_BY_DIMS, _over_all_dims)


def _over_all_dims(op: Any, args: Any, kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    if named.get("dim") == []:
        named["dim"] = list(range(args[0].dim()))
    with without_handler(op):
        return op(**named)


def _averaged(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs a loss on whole tensors where it takes a mean over what is cut: the same result on every rank, and a gradient that is cut later."""
    named = _named(op, args, kwargs)
    given = [x for x in named.values() if isinstance(x, DTensor)]
    mesh = given[0].device_mesh
    is_cut = any(any(cuts_of(x)) for x in given) and all(x.device_mesh == mesh for x in given)
    if not is_cut or named.get("reduction", _MEAN) != _MEAN:
        with without_handler(op):
            return op(*args, **kwargs)
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}
    return DTensor.from_local(op(**whole), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name."""
    return dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
