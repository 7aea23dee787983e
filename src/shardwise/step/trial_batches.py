"""The batches on which a loss is tried: copies of a micro-batch, parts of one with very different counts, and other labels."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import IGNORED, is_padding
from shardwise.model.pytrees import leaves_of, map_leaves, tensors_within
from shardwise.step.loss import Batch, Loss, as_sums

_MOST_BYTES = 256 << 20  # of three copies in float64; above it, only two samples are copied, in their own dtype


class Copies:
    """A micro-batch and the model's output for it, repeated along the batch dim: each tensor with a row per sample is."""

    def __init__(self, batch: Batch, output: Any = None):
        self._batch, self._output, self.size = dict(batch), output, _num_rows(batch)
        tensors = [x for x in (*batch.values(), *leaves_of(output)) if isinstance(x, Tensor)]
        self._is_small = sum(3 * 8 * x.numel() for x in tensors) <= _MOST_BYTES
        self._num_copied = self.size if self._is_small else min(self.size, 2)

    @property
    def is_of_samples(self) -> bool:
        """Whether the copies are a valid micro-batch for the model: the first dim of every tensor is the number of samples, or 1 (shared
        by all samples). Another one, such as the edges of a graph, would have to point to the copies."""
        rows = [x.shape[0] for x in self._batch.values() if isinstance(x, Tensor) and x.dim()]
        return bool(rows) and all(num in (self.size, 1) for num in rows)

    def holds_rows(self, *, or_numbers: bool = False) -> bool:
        """Whether every tensor of the output has a row per sample, so that its copies are the output for the copied
        batch; or is 0-dim, if ``or_numbers``: a loss, or a part of one, that the forward computed."""
        tensors = [leaf for leaf in leaves_of(self._output) if isinstance(leaf, Tensor)]
        fits = all(x.shape[0] == self.size if x.dim() else or_numbers for x in tensors)
        return bool(tensors) and fits and tensors_within(self._output) == ([], True)

    def batch(self, num: int) -> dict[str, Any]:
        """``num`` copies of the micro-batch."""
        return self._repeated(self._batch, num)

    def sums(self, loss: Loss, num: int, computed: Any = None) -> dict[str, Tensor]:
        """What ``loss`` returns for ``num`` copies: in float64, where a mean shows even next to a sum of millions, if they are small and
        it can be computed so (it may have constants of another dtype).

        Args:
            computed: what the model returned for the copied batch. Only its tensors without a row per sample are used;
                the others are copies of the first output.
        """
        output = self._repeated(self._output, num)
        old, new = leaves_of(output), leaves_of(output if computed is None else computed)
        if len(old) != len(new):
            output = computed
        elif computed is not None:
            rows = num * self._num_copied
            values = iter([a if _has_rows(a, rows) else b for a, b in zip(old, new, strict=True)])
            output = map_leaves(lambda _: next(values), output)
        given = output, self.batch(num)
        try:
            return as_sums(loss(*(map_leaves(_as_float64, given) if self._is_small else given)))
        except Exception:
            return as_sums(loss(*given))

    def _repeated(self, value: Any, num: int) -> Any:
        def copies(x: Any) -> Any:
            return x[: self._num_copied].repeat(num, *[1] * (x.dim() - 1)) if _has_rows(x, self.size) else x

        return map_leaves(copies, value)


def parts_of(batches: Sequence[Batch]) -> list[Batch]:
    """Of the micro-batch that tells most: two parts together, each by itself, and the first twice over, which shows what another number of
    samples changes by rounding. One that has no rows for each sample is every part itself: each rank runs the model equally often."""
    given = max(batches, key=_num_telling)
    copies = Copies(given)
    if not copies.is_of_samples:
        return [given] * 4
    both = dict(given) if copies.size > 1 else _two_samples(given, copies, batches)
    if (labels := _labels_of(both)) is not None:
        both["labels"] = _uneven(labels)
    first, second = (
        {key: x[start::2].contiguous() if _has_rows(x, _num_rows(both)) else x for key, x in both.items()}
        for start in (0, 1)
    )
    return [both, first, second, Copies(first).batch(2)]


def relabelled(batch: Batch, column: int) -> Batch | None:
    """The batch with another label at a position of each sample; None: its labels are not those of tokens."""
    labels = _labels_of(batch)
    if labels is None or labels.dim() != 2 or labels.shape[1] < 3 or not bool((labels >= 0).any()):
        return None
    if not any(isinstance(x, Tensor) and x.shape[:2] == labels.shape for key, x in batch.items() if key != "labels"):
        return None
    lowest, highest = (int(each(labels[labels >= 0])) for each in (torch.min, torch.max))
    if lowest == highest:
        lowest = highest - 1 if highest else highest + 1
    changed = labels.clone()
    changed[:, column] = torch.where(labels[:, column] == highest, lowest, highest)
    return {**batch, "labels": changed}


def _num_rows(batch: Mapping[str, Any]) -> int:
    """The number of samples, which most tensors have as their first dim; 0: there are none."""
    sizes = Counter(x.shape[0] for x in batch.values() if isinstance(x, Tensor) and x.dim())
    return sizes.most_common(1)[0][0] if sizes else 0


def _labels_of(batch: Batch) -> Tensor | None:
    """The labels that are classes or tokens."""
    labels: Any = batch.get("labels")
    is_one = (
        isinstance(labels, Tensor)
        and labels.dim() > 0
        and not labels.is_floating_point()
        and labels.dtype != torch.bool
    )
    return labels if is_one else None


def _total(value: Any, flags: Callable[[Tensor], Tensor]) -> float:
    return float(flags(value).sum()) if isinstance(value, Tensor) else math.nan


COUNTS: dict[str, Callable[[Batch], float]] = {
    "samples": _num_rows,
    "labels": lambda batch: _total(_labels_of(batch), lambda labels: labels != IGNORED),
    "not negative": lambda batch: _total(_labels_of(batch), lambda labels: labels >= 0),
    "mask": lambda batch: _total(batch.get("attention_mask"), lambda mask: mask),
}
"""What the mean of a model may run over."""


def _num_telling(batch: Batch) -> float:
    """How much a micro-batch tells: labels that count and labels that do not."""
    labels, valid = _labels_of(batch), COUNTS["labels"](batch)
    if labels is None or is_padding(batch):
        return -2.0 if is_padding(batch) else -1.0
    return min(valid, labels.numel() - valid) + (0.5 if valid else 0)


def _two_samples(given: Batch, copies: Copies, batches: Sequence[Batch]) -> dict[str, Any]:
    """A micro-batch of one sample with that of another one; or where no other has its shapes, with itself and its labels in another order."""
    rows = {key: x for key, x in given.items() if _has_rows(x, 1)}
    for other in batches:
        pairs = [(x, other.get(key)) for key, x in rows.items()]
        fits = all(isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        if fits and other is not given and not is_padding(other) and set(other) == set(given):
            return {**given, **{key: torch.cat([x, other[key]]) for key, x in rows.items()}}
    both, labels = copies.batch(2), _labels_of(given)
    if labels is not None and labels.dim() == 2:
        both["labels"] = torch.cat([labels, labels.roll(1, 1)])
    return both


def _uneven(labels: Tensor) -> Tensor:
    """``labels`` with one valid label in each second row, where they have ignored ones: a model that is given none may not
    know what -100 is."""
    labels = labels.clone()
    for row in labels[::2] if labels.dim() > 1 and bool((labels == IGNORED).any()) else ():
        flat = row.view(-1)
        flat[(flat != IGNORED).nonzero().flatten()[1:]] = IGNORED
    return labels


def _has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
