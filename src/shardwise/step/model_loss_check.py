"""Checks that a loss which the model computes is a mean over what is counted: on two parts of a micro-batch, and on both
together.

Of a mean over ``count(batch)`` items, the loss of both parts is the mean of theirs, weighted by their counts. A mean of the
means of samples, a sum, or a mean over other items is not, and would give gradients that depend on how samples are grouped.
The parts are given very different counts, where the data has labels that are ignored (-100). Whether the model shifts labels
itself shows in the first label of each sample: then the loss does not change with it.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.data.batch import IGNORED
from shardwise.data.labels import valid_labels
from shardwise.errors import ConfigError, RankError, ShardwiseError
from shardwise.launch.failure import is_lost_peer
from shardwise.parallel import Runtime
from shardwise.step.growth import Copies
from shardwise.step.loss import Batch
from shardwise.step.loss_check import agreed_problem, seeded, without_a_trace
from shardwise.step.mode import eval_mode
from shardwise.step.model_loss import ModelLoss, loss_of_output

__all__ = ["ModelLossCheck"]

_ROUNDING = {
    8: 1e-9,
    4: 1e-5,
}  # bytes per number -> relative differences up to this prove nothing; 2e-2 for fewer bytes
_OTHER = 10  # a guess is told from another one where they differ by this many times the rounding
_MOST_ROUNDING = 1e-2  # what differs by more between one and two copies of a part is no mean
_UNCHANGED = 1e-3  # of the change that another label makes


class ModelLossCheck:
    """Tries the loss of :func:`~shardwise.step.model_loss.model_loss` in the first window, and again in others while the data
    has not shown enough. All ranks take part in the same way.

    Args:
        loss: the loss, with what is counted.
    """

    def __init__(self, loss: ModelLoss) -> None:
        self._count = loss.count
        self._counts_labels = loss.count is valid_labels
        self._is_aligned = not self._counts_labels  # with a count of the user's, labels may be shifted by the model
        self._is_weighed = False  # parts with other counts than samples were compared
        self._has_tried_ignored = False

    def is_due(self, num_windows: int, num_ignored: int | None) -> bool:
        """Whether to try the loss after the backward of a window; equal on all ranks.

        Args:
            num_windows: windows before this one.
            num_ignored: labels of all ranks in this window that are -100; None: they are not what is counted.
        """
        is_checkpoint = num_windows & (num_windows - 1) == 0  # 0, 1, 2, 4, 8, ...
        if num_ignored and not self._has_tried_ignored:
            self._has_tried_ignored = True
            return True
        could_weigh = num_ignored is None or num_ignored > 0
        return is_checkpoint and (num_windows == 0 or not self._is_aligned or (could_weigh and not self._is_weighed))

    def run(self, runtime: Runtime, forward: Callable[[Batch], Any], batches: Sequence[Batch]) -> None:
        """Runs the model on parts of a micro-batch, without side effects. All ranks must call it, outside a window.

        Raises:
            ConfigError: on every rank, if the loss is no mean over what is counted, or the model shifts labels that are
                aligned already.
        """
        trials = _Trials.of(max(batches, key=_num_ignored))
        means, error = self._means(runtime, forward, trials, in_eval_mode=True)
        if float(
            runtime.world.agreement.sum({"failed": float(error is not None)}, "trying the model's loss")["failed"]
        ):
            # Such as of a model that computes a loss in train mode only.
            means, error = self._means(runtime, forward, trials, in_eval_mode=False)
        problem: ShardwiseError | None = None
        is_weighed = is_aligned = False
        if error is not None:
            _warn_untried(error)
        else:
            try:
                is_weighed = self._weigh(trials, means)
                is_aligned = self._counts_labels and _refuse_shift(runtime, trials, means)
            except ConfigError as found:
                problem = found
        agreed = runtime.world.agreement.sum(
            {"problem": float(problem is not None), "weighed": float(is_weighed), "aligned": float(is_aligned)},
            "trying the model's loss, the result",
        )
        if float(agreed["problem"]):
            raise agreed_problem(runtime, problem)
        self._is_weighed |= float(agreed["weighed"]) > 0
        self._is_aligned |= float(agreed["aligned"]) > 0

    def _means(
        self, runtime: Runtime, forward: Callable[[Batch], Any], trials: "_Trials", *, in_eval_mode: bool
    ) -> tuple["_Means", Exception | None]:
        """The model's loss for each trial, and what kept it from running."""
        with without_a_trace(runtime), eval_mode(runtime.module, on=in_eval_mode):
            try:
                found = [loss_of_output(seeded(runtime, 0, forward, dict(batch))) for batch in trials]
            except Exception as error:  # such as of a model that takes one number of samples only
                if isinstance(error, RankError) or is_lost_peer(error):
                    raise
                runtime.engine.abandon()
                return _Means(*[0.0] * len(trials), rounding=0.0), error
        return _Means(*(float(value) for value in found), rounding=_ROUNDING.get(found[0].dtype.itemsize, 2e-2)), None

    def _weigh(self, trials: "_Trials", means: "_Means") -> bool:
        """Whether the parts show that their losses are weighted by what is counted.

        Raises:
            ConfigError: they are weighted otherwise.
        """
        parts = (means.first, means.second)
        counts = [float(torch.as_tensor(self._count(batch))) for batch in (trials.first, trials.second)]
        if min(counts) <= 0 or not all(map(math.isfinite, (*parts, means.both))):
            return False
        scale = max(map(abs, (*parts, means.both))) or 1.0
        by_number = abs(means.first_twice - means.first) / scale  # of a mean, rounding: other sizes use other kernels
        limit = max(means.rounding, _OTHER * min(by_number, _MOST_ROUNDING))

        def off(guess: float) -> float:
            return abs(means.both - guess) / scale

        expected = _weighted(parts, counts)
        others = {
            "samples": _weighted(parts, [_num_rows(trials.first), _num_rows(trials.second)]),
            "labels": _weighted(parts, [_num_valid(trials.first), _num_valid(trials.second)]),
            "sum": sum(parts),
        }
        if off(expected) <= limit and by_number <= _MOST_ROUNDING:
            # A guess that says nearly the same would fit as well.
            return all(
                abs(other - expected) / scale > _OTHER * limit or off(other) > limit for other in others.values()
            )
        name = min(others, key=lambda name: off(others[name]))
        if off(others[name]) <= max(limit, off(expected) / _OTHER):
            raise _other_mean(name, parts, counts, expected, means.both)
        warnings.warn(
            f"the model's loss is not quite a mean over what is counted: on two parts of a micro-batch it is {parts[0]:.6g} and {parts[1]:.6g}, together "
            f"{means.both:.6g} where their mean is {expected:.6g}. What is added to it (a router's loss, a loss of pairs of samples) depends on how "
            "samples are grouped into micro-batches. If it is a mean over other items (cross entropy with class weights divides by the weights of the "
            "labels), pass their number: count=lambda batch: weights[batch['labels']].sum()",
            stacklevel=2,
        )
        return True


class _Trials(NamedTuple):
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
    def of(cls, given: Batch) -> "_Trials":
        """Of a micro-batch. One that has no rows for each sample is every trial itself: each rank runs the model equally
        often."""
        try:
            copies = Copies(given, None)
        except ValueError:
            return cls(*[given] * 7)
        if not copies.is_of_samples:
            return cls(*[given] * 7)
        whole = dict(given) if copies.size > 1 else copies.batch(2)
        both = {**whole, "labels": _uneven(whole["labels"])} if _are_labels(whole.get("labels")) else whole
        first, second = (_rows(both, slice(start, None, 2)) for start in (0, 1))
        return cls(
            both, first, second, Copies(first, None).batch(2), whole, _relabelled(whole, 0), _relabelled(whole, 1)
        )

    @property
    def is_causal(self) -> bool:
        """Whether the labels are of tokens of the same places, so that they may be shifted."""
        return self.whole is not self.other_first_label


class _Means(NamedTuple):
    """The model's loss for each of the trials; ``rounding``: relative differences up to it prove nothing."""

    both: float
    first: float
    second: float
    first_twice: float
    whole: float
    other_first_label: float
    other_second_label: float
    rounding: float


def _refuse_shift(runtime: Runtime, trials: _Trials, means: _Means) -> bool:
    """Whether the loss changes with the first label of each sample; True where labels are none of tokens.

    Raises:
        ConfigError: it does not, though it changes with the second.
    """
    if not trials.is_causal:
        return True
    by_first = abs(means.other_first_label - means.whole)
    by_second = abs(means.other_second_label - means.whole)
    if not by_second or not math.isfinite(by_first + by_second):
        return False  # a head of zeros has one loss for all labels: nothing is seen yet
    if by_first > _UNCHANGED * by_second:
        return True
    raise ConfigError(
        f"loss=sw.model_loss with {runtime.recipe.module_class}, which shifts labels itself",
        why="its loss does not change with the label of the first position, so labels[:, 1:] is compared with logits[:, :-1]. Labels here are shifted "
        "already (labels[b, t] is the target of logits[b, t]): each position would be trained on the token after next",
        fix="use loss=sw.next_token_loss, which takes the logits; or compare labels[:, t] with logits[:, t] in the model's forward",
    )


def _other_mean(
    name: str, parts: Sequence[float], counts: Sequence[float], expected: float, both: float
) -> ConfigError:
    told = {
        "samples": ("the mean of the means of samples", "count samples: count=lambda batch: len(batch['labels'])"),
        "labels": ("the mean over labels that are not -100", "leave count= out: these labels are counted by default"),
        "sum": (
            "the sum",
            "it is a sum already: loss=None, forward=lambda model, batch: model(batch['input_ids'], batch['labels'])[1]",
        ),
    }
    is_what, fix = told[name]
    return ConfigError(
        "loss=sw.model_loss, where the model's loss is no mean over what is counted",
        why=f"two parts of a micro-batch with {counts[0]:g} and {counts[1]:g} counted have the losses {parts[0]:.6g} and {parts[1]:.6g}. Together "
        f"{expected:.6g} would be the mean over both, and the model gives {both:.6g}: {is_what}. Gradients would depend on how samples are "
        "grouped",
        fix=f"{fix}; or take the loss from the logits: loss=sw.next_token_loss",
    )


def _warn_untried(error: Exception) -> None:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"the model's loss could not be tried on parts of a micro-batch ({text}), so nothing tells whether it is a mean over what is counted",
        stacklevel=2,
    )


def _weighted(parts: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / total if total else math.nan


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not value.is_floating_point() and value.dtype != torch.bool


def _num_ignored(batch: Batch) -> int:
    labels = batch.get("labels")
    if getattr(batch, "padding", False) or not _are_labels(labels):
        return -1
    return int((labels == IGNORED).sum())  # type: ignore[operator]


def _num_valid(batch: Batch) -> float:
    labels = batch.get("labels")
    return float((labels != IGNORED).sum()) if isinstance(labels, Tensor) and _are_labels(labels) else math.nan


def _num_rows(batch: Batch) -> int:
    return Copies(batch, None).size


def _rows(batch: Batch, rows: slice) -> dict[str, Any]:
    size = _num_rows(batch)
    return {
        key: value[rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value
        for key, value in batch.items()
    }


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
    if not isinstance(labels, Tensor) or not _are_labels(labels) or labels.dim() != 2 or labels.shape[1] < 3:
        return batch
    if not any(_are_labels(value) and value.shape == labels.shape for key, value in batch.items() if key != "labels"):
        return batch
    valid = labels[labels != IGNORED].unique()
    if not len(valid):
        return batch
    lowest, highest = int(valid[0]), int(valid[-1])
    if lowest == highest:
        lowest = highest - 1 if highest else highest + 1
    changed = labels.clone()
    changed[:, column] = torch.where(labels[:, column] == highest, lowest, highest)
    return {**batch, "labels": changed}
