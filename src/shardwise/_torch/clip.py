"""The norm that torch's gradient clipping takes."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

__all__ = ["watch_total_norm"]

_checks: list[Callable[[list[Tensor]], None]] = []


def watch_total_norm(check: Callable[[list[Tensor]], None]) -> None:
    """From now on calls ``check`` with the tensors before ``torch.nn.utils.clip_grad_norm_`` (however it was imported) and
    ``torch.nn.utils.get_total_norm`` take their norm."""
    if not _checks:
        inner = clip_grad._get_total_norm

        @functools.wraps(inner)
        def watched(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for each in _checks:
                each(given)
            return inner(given, *args, **kwargs)

        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = watched
    if check not in _checks:
        _checks.append(check)
