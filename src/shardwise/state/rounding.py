"""Casts values to a dtype with a smaller range, and refuses finite values that would become infinite."""

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.model import dtype_name


def copy_checked(out: Tensor, values: Tensor, place: str) -> None:
    """Copies ``values`` to ``out``, cast to its dtype and device."""
    out.copy_(values)
    refuse_overflow(out, values, place)


def refuse_overflow(rounded: Tensor, values: Tensor, place: str) -> None:
    """Compares ``values`` with the same values cast to another dtype, ``rounded``."""
    if values.numel() == 0 or not _has_smaller_range(rounded.dtype, values.dtype):
        return
    numbers, end, kind = values, torch.finfo(rounded.dtype).max, dtype_name(rounded.dtype)
    if values.is_complex():
        numbers, rounded = torch.view_as_real(values.resolve_conj()), torch.view_as_real(rounded.resolve_conj())
    least, most = (float(number) for number in torch.aminmax(numbers))
    if -end <= least and most <= end:  # the usual case, with one pass over the values
        return
    num = int(rounded.isinf().sum()) - int(numbers.isinf().sum())
    if num:
        largest = float(numbers[numbers.isfinite()].abs().max())
        wider = "take bfloat16, which has float32's range; or " if largest <= torch.finfo(torch.bfloat16).max else ""
        raise CheckpointError(
            f"{place}: {num} values beyond what {kind} can hold",
            why=f"they are up to {largest:.3g} and would become infinite; it ends at {end:.3g}",
            fix=f"{wider}let this tensor keep its dtype (shardwise convert --keep), or leave it out (rename)",
        )


def _has_smaller_range(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether ``dtype`` has a much smaller range than ``other``. That of bfloat16 ends only 0.4 % before float32's:
    values there stand for infinity (masks), and may become infinite."""
    rounded = all(kind.itemsize > 1 and (kind.is_floating_point or kind.is_complex) for kind in (dtype, other))
    return rounded and 2 * torch.finfo(dtype).max < torch.finfo(other).max
