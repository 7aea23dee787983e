"""Functions of torch that take tensors of one floating dtype: layers and products, and what is cast where dtypes differ."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Key = int | str
"""An argument: its position, or its keyword."""


class Function(NamedTuple):
    """A layer or a product.

    Attributes:
        name: of the function.
        weight: the argument that is a layer's weight, first of the places where it may be; empty: it is a product.
        apart: arguments that may have another dtype.
        writes: its first argument, which it changes in place, says the dtype.
    """

    name: str
    weight: tuple[Key, ...] = ()
    apart: tuple[Key, ...] = ()
    writes: bool = False


class Cast(NamedTuple):
    """What a function is called with: floating tensors in ``dtype``, some of which had the dtypes ``before``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    before: tuple[torch.dtype, ...]


def cast_of(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], compute: torch.dtype | None
) -> Cast | None:
    """The arguments of a call in which floating dtypes differ, in one: of a layer that of its weight, of a product
    ``compute``. None: nothing differs, ``compute`` is not known, or autocast is on, which has casts of its own."""
    given: dict[Key, Any] = dict(enumerate(args)) | kwargs  # type: ignore[operator]
    joined = {key: value for key, value in given.items() if key not in function.apart}
    found = [dtype for value in joined.values() for dtype in floating_dtypes(value)]
    if all(dtype == found[0] for dtype in found) or any(kwargs.get(key) is not None for key in ("out", "out_dtype")):
        return None
    leads = (0,) if function.writes else function.weight
    leading = [dtype for key in leads for dtype in floating_dtypes(given.get(key))]
    target = (leading or [None])[0] if leads else compute
    if target is None or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    made: list[tuple[Tensor, Tensor]] = []
    cast = {key: _cast(value, target, made) if key in joined else value for key, value in given.items()}
    return Cast(
        tuple(cast[i] for i in range(len(args))),
        {key: cast[key] for key in kwargs},
        target,
        tuple(dtype for dtype in dict.fromkeys(found) if dtype != target),
    )


def floating_dtypes(value: Any) -> list[torch.dtype]:
    """The dtype of a floating tensor, or of those in a list or tuple."""
    if isinstance(value, Tensor):
        return [value.dtype] if value.dtype in _FLOATING else []
    return [dtype for item in value for dtype in floating_dtypes(item)] if type(value) in (list, tuple) else []


def _cast(value: Any, dtype: torch.dtype, made: list[tuple[Tensor, Tensor]]) -> Any:
    """``value`` with floating tensors in it cast; one tensor stays one: attention asks whether keys are the values."""
    if type(value) in (list, tuple):
        return type(value)([_cast(item, dtype, made) for item in value])
    if not isinstance(value, Tensor) or value.dtype not in _FLOATING or value.dtype == dtype:
        return value
    for known, cast in made:
        if known is value:
            return cast
    made.append((value, value.to(dtype)))
    return made[-1][1]


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_LAYERS: tuple[tuple[tuple[Any, ...], str, tuple[Key, ...]], ...] = (
    ((functional, Tensor), "linear prelu", (1, "weight")),
    ((functional,), "bilinear layer_norm rms_norm group_norm", (2, "weight")),
    ((functional,), "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", (1, "weight")),
    ((torch,), "convolution", (1, "weight")),
    ((torch,), "layer_norm rms_norm group_norm native_layer_norm", (2, "weight")),
    ((functional,), "embedding_bag", (1, "weight")),
    ((functional,), "batch_norm instance_norm", (1, "running_mean", 3, "weight")),  # which must have one dtype
    ((torch,), "batch_norm instance_norm", (3, "running_mean", 1, "weight")),
    ((functional,), "multi_head_attention_forward", (5, "in_proj_weight", "q_proj_weight")),
    ((torch,), "lstm gru rnn_tanh rnn_relu", (3, 2)),  # a list; at 3 with packed sequences
    ((torch,), "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", (2, "w_ih")),
)
_PRODUCTS = (
    "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm addmv addbmm baddbmm einsum tensordot chain_matmul"
)
_IN_PLACE = "addmm_ addmv_ addbmm_ baddbmm_"


def _functions() -> dict[Any, Function]:
    found: dict[Any, Function] = {}
    for homes, names, weight in _LAYERS:
        for name in names.split():
            for home in homes:
                if hasattr(home, name):
                    found[getattr(home, name)] = Function(name, weight)
    for name in _PRODUCTS.split():
        for home in (torch, Tensor):
            if hasattr(home, name):
                found[getattr(home, name)] = Function(name)
    found[torch.linalg.multi_dot] = Function("multi_dot")
    found[functional.scaled_dot_product_attention] = Function("scaled_dot_product_attention", (), (3, "attn_mask"))
    return found | {getattr(Tensor, name): Function(name, writes=True) for name in _IN_PLACE.split()}


FUNCTIONS = _functions()
"""Functions of torch as a ``TorchFunctionMode`` meets them -> what is known of them."""
