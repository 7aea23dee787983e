"""The micro-batches on which the loss of a model is tried: parts of one, with very different counts, and other labels."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.data.batch import IGNORED, is_padding
from shardwise.step.growth import Copies
from shardwise.step.loss import Batch

__all__ = ["COUNTS", "Trials", "are_labels", "num_rows"]


class Trials(NamedTuple):
    """The micro-batches that the model is tried on: two parts and both together (the first twice over shows what another
    number of samples changes by rounding); and all of it with another first, and with another second label."""

    both: Batch
    first: Batch
    second: Batch
    first_twice: Batch
    whole: Batch
    other_first_label: Batch
    other_second_label: Batch

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Trials":
        """Of one of some micro-batches. One that has no rows for each sample is every trial itself: each rank runs the model
        equally often."""
        given = max(batches, key=_num_telling)
        try:
            copies = Copies(given, None)
        except ValueError:
            return cls(*[given] * 7)
        if not copies.is_of_samples:
            return cls(*[given] * 7)
        whole = dict(given) if copies.size > 1 else _two_samples(given, batches)
        both = {**whole, "labels": _uneven(whole["labels"])} if are_labels(whole.get("labels")) else whole
        first, second = (_rows(both, slice(start, None, 2)) for start in (0, 1))
        return cls(
            both, first, second, Copies(first, None).batch(2), whole, _relabelled(whole, 0), _relabelled(whole, 1)
        )

    @property
    def is_causal(self) -> bool:
        """Whether the labels are of tokens of the same places, so that they may be shifted."""
        return self.whole is not self.other_first_label


def are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not value.is_floating_point() and value.dtype != torch.bool


def _num_telling(batch: Batch) -> float:
    """How much a micro-batch tells: labels that count and labels that do not."""
    if is_padding(batch):
        return -2
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or not are_labels(labels):
        return -1
    valid = _num_valid(batch)
    return min(valid, labels.numel() - valid) + (0.5 if valid else 0)


def _two_samples(given: Batch, batches: Sequence[Batch]) -> dict[str, Any]:
    """A micro-batch of one sample with that of another one; or where no other has its shapes, with itself and its labels in
    another order."""
    size = num_rows(given)
    for other in batches:
        if other is given or is_padding(other) or set(other) != set(given):
            continue
        pairs = [(value, other[key]) for key, value in given.items() if _has_rows(value, size)]
        if all(isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs):
            return {
                key: torch.cat([value, other[key]]) if _has_rows(value, size) else value for key, value in given.items()
            }
    whole = Copies(given, None).batch(2)
    labels = whole.get("labels")
    if isinstance(labels, Tensor) and are_labels(labels) and labels.dim() == 2:
        whole["labels"] = torch.cat([labels[:1], labels[1:].roll(1, 1)])
    return whole


def _has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def _num_valid(batch: Batch) -> float:
    labels = batch.get("labels")
    return float((labels != IGNORED).sum()) if isinstance(labels, Tensor) and are_labels(labels) else math.nan


def _num_not_negative(batch: Batch) -> float:
    labels = batch.get("labels")
    return float((labels >= 0).sum()) if isinstance(labels, Tensor) and are_labels(labels) else math.nan


def _num_unmasked(batch: Batch) -> float:
    mask = batch.get("attention_mask")
    return float(mask.sum()) if isinstance(mask, Tensor) else math.nan


COUNTS = {"labels": _num_valid, "not negative": _num_not_negative, "mask": _num_unmasked}
"""What the mean of a model may run over, besides samples."""


def num_rows(batch: Batch) -> int:
    return Copies(batch, None).size


def _rows(batch: Batch, rows: slice) -> dict[str, Any]:
    size = num_rows(batch)
    return {key: value[rows].contiguous() if _has_rows(value, size) else value for key, value in batch.items()}


def _uneven(labels: Tensor) -> Tensor:
    """``labels`` with one valid label in each second row, where they have ignored ones: a model that is given none may not
    know what -100 is."""
    if labels.dim() < 2 or not bool((labels == IGNORED).any()):
        return labels
    labels = labels.clone()
    for row in itertools.islice(labels, 0, None, 2):
        flat = row.view(-1)
        valid = (flat != IGNORED).nonzero().flatten()
        flat[valid[1:]] = IGNORED
    return labels


def _relabelled(batch: Batch, column: int) -> Batch:
    """The batch with another label at a position of each sample; itself where its labels are not those of tokens."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or not are_labels(labels) or labels.dim() != 2 or labels.shape[1] < 3:
        return batch
    inputs = (value for key, value in batch.items() if key != "labels" and isinstance(value, Tensor))
    if not any(value.shape[:2] == labels.shape for value in inputs):
        return batch
    valid = labels[labels >= 0].unique()
    if not len(valid):
        return batch
    lowest, highest = int(valid[0]), int(valid[-1])
    if lowest == highest:
        lowest = highest - 1 if highest else highest + 1
    changed = labels.clone()
    changed[:, column] = torch.where(labels[:, column] == highest, lowest, highest)
    return {**batch, "labels": changed}
