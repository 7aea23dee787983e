"""Values that are written in a dtype of a smaller range: none of them may become infinite."""

import torch
from torch import Tensor

from shardwise.anatomy import dtype_name
from shardwise.errors import CheckpointError

__all__ = ["put", "refuse_overflow"]


def put(out: Tensor, values: Tensor, place: str) -> None:
    """Copies ``values`` to ``out``, in its dtype and on its device.

    Raises:
        CheckpointError: a finite value is beyond that dtype; ``place`` says where it was read.
    """
    out.copy_(values)
    refuse_overflow(out, values, place)


def refuse_overflow(rounded: Tensor, values: Tensor, place: str) -> None:
    """Of ``values``, and the same in another dtype.

    Raises:
        CheckpointError: a finite value has become infinite.
    """
    if not _has_smaller_range(rounded.dtype, values.dtype):
        return
    num = int(rounded.isinf().sum()) - int(values.isinf().sum())
    if num:
        raise CheckpointError(
            f"{place}: {num} values beyond what {dtype_name(rounded.dtype)} can hold",
            why=f"they are up to {float(values[values.isfinite()].abs().max()):.3g} and would become infinite; it ends at "
            f"{torch.finfo(rounded.dtype).max:.3g}",
            fix="take bfloat16, which has float32's range, or leave the dtype as it is",
        )


def _has_smaller_range(dtype: torch.dtype, other: torch.dtype) -> bool:
    rounded = all(kind.is_floating_point or kind.is_complex for kind in (dtype, other))
    return rounded and torch.finfo(dtype).max < torch.finfo(other).max
