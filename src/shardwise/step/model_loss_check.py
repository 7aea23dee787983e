"""Checks that a loss which the model computes is a mean over what is counted: on two parts of a micro-batch, and on both
together.

Of a mean over ``count(batch)`` items, the loss of both parts is the mean of theirs, weighted by their counts. A mean of the
means of samples, a sum, or a mean over other items is not, and would give gradients that depend on how samples are grouped.
The parts are given very different counts, where the data has labels that are ignored (-100). Whether the model shifts labels
itself shows in the first label of each sample: then the loss does not change with it.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config.caller import level_of_caller
from shardwise.data.batch import IGNORED
from shardwise.data.labels import valid_labels
from shardwise.errors import ConfigError, RankError, ShardwiseError, first_line
from shardwise.launch.failure import is_lost_peer
from shardwise.model.pytrees import leaves_of, map_leaves
from shardwise.parallel import Runtime
from shardwise.step.loss import Batch
from shardwise.step.loss_check import agreed_problem, seeded, without_a_trace
from shardwise.step.mode import acts_by_mode, eval_mode
from shardwise.step.model_loss import ModelLoss, loss_of_output, said_forward
from shardwise.step.model_loss_trials import COUNTS, Trials, are_labels, num_rows

__all__ = ["ModelLossCheck"]

_ROUNDING = {8: 1e-9, 4: 1e-5}  # bytes per number -> relative differences up to this prove nothing
_ROUNDING_OF_HALF = 2e-2  # the same for fewer bytes
_TRIES = 3  # in windows with labels that are ignored, before it is left to ever rarer ones
_OTHER = 10  # two guesses are distinguishable where they differ by this many times the rounding
_MOST_ROUNDING = 1e-2  # what differs by more between one and two copies of a part is no mean
_UNCHANGED = 1e-3  # of the change that another label makes
_SEEN = 0.05  # of the rounding: what another label changes is seen above it


class ModelLossCheck:
    """Tries the loss of :func:`~shardwise.step.model_loss.model_loss` in the first window, and again in others while the data
    has not shown enough. All ranks take part in the same way.

    Args:
        loss: the loss, with what is counted.
    """

    def __init__(self, loss: ModelLoss, forward: Callable[..., Any]) -> None:
        self._count, self._forward = loss.count, forward
        self._counts_labels = loss.count is valid_labels
        self._is_aligned = not self._counts_labels  # with a count of the user's, labels may be shifted by the model
        self._said = ""  # a forward that takes the loss out, as text
        self._is_weighed = False  # parts with other counts than samples were compared
        self._tries_with_ignored = 0

    def is_due(self, num_windows: int, num_ignored: int | None) -> bool:
        """Whether to try the loss after the backward of a window; equal on all ranks.

        Args:
            num_windows: windows before this one.
            num_ignored: labels of all ranks in this window that are -100; None: they are not what is counted.
        """
        if self._is_aligned and self._is_weighed:
            return num_windows == 0
        if num_ignored and self._tries_with_ignored < _TRIES:
            self._tries_with_ignored += 1
            return True
        return num_windows & (num_windows - 1) == 0  # 0, 1, 2, 4, 8, ...

    def run(self, runtime: Runtime, forward: Callable[[Batch], Any], batches: Sequence[Batch]) -> None:
        """Runs the model on parts of a micro-batch, without side effects. All ranks must call it, outside a window.

        Raises:
            ConfigError: on every rank, if the loss is no mean over what is counted, or the model shifts labels that are
                aligned already.
        """
        trials = Trials.of(batches)
        for mode in (_without_draws, eval_mode):
            means, error = self._means(runtime, forward, trials, mode)
            failed = error is not None or means.is_noisy
            agreed = runtime.world.agreement.sum({"failed": float(failed)}, "trying the model's loss")
            if not float(agreed["failed"]):
                break  # otherwise code of the model's draws in train mode, or a loss is computed in train mode only
        problem: ShardwiseError | None = None
        is_weighed = is_aligned = False
        if error is not None:
            _warn_untried(error)
        else:
            try:
                # First: with a sum of labels that are shifted twice, the loss would be taken as it is.
                is_aligned = self._counts_labels and _refuse_shift(runtime, trials, means)
                is_weighed = self._weigh(trials, means)
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
        self, runtime: Runtime, forward: Callable[[Batch], Any], trials: "Trials", mode: Any
    ) -> tuple["_Means", Exception | None]:
        """The model's loss for each trial, and what kept it from running."""
        found: list[Tensor] = []
        others: dict[str, float] = {}
        untraced = without_a_trace(runtime, self._forward)
        with (
            torch.no_grad(),
            untraced,
            torch.compiler.set_stance("force_eager"),
            mode(runtime.module),
            _LossesInFloat32(),
        ):
            try:
                for batch in trials:
                    output = seeded(runtime, 0, forward, dict(batch))
                    found.append(loss_of_output(output))
                    if batch is trials.whole and not others:
                        others = _by_logits(output, batch.get("labels"))
                        self._said = said_forward(runtime.module, batch, output)
            except Exception as error:  # such as of a model that takes one number of samples only
                if isinstance(error, RankError) or is_lost_peer(error):
                    raise
                runtime.engine.abandon()
                return _Means(*[0.0] * len(trials), rounding=0.0, by_logits={}), error
        rounding = _ROUNDING.get(found[0].dtype.itemsize, _ROUNDING_OF_HALF)
        return _Means(*(float(value) for value in found), rounding=rounding, by_logits=others), None

    def _weigh(self, trials: "Trials", means: "_Means") -> bool:
        """Whether the parts show that their losses are weighted by what is counted.

        Raises:
            ConfigError: they are weighted otherwise.
        """
        parts = (means.first, means.second)
        counts = [float(torch.as_tensor(self._count(batch))) for batch in (trials.first, trials.second)]
        if min(counts) <= 0 or not all(map(math.isfinite, (*parts, means.both))):
            return False
        scale = max(map(abs, (*parts, means.both))) or 1.0
        limit = max(means.rounding, _OTHER * min(means.by_number, _MOST_ROUNDING))

        def off(guess: float) -> float:
            return abs(means.both - guess) / scale

        expected = _weighted(parts, counts)
        others = {
            "samples": _weighted(parts, [num_rows(trials.first), num_rows(trials.second)]),
            **{
                name: _weighted(parts, [count(part) for part in (trials.first, trials.second)])
                for name, count in COUNTS.items()
            },
            "sum": sum(parts),
        }
        if off(expected) <= limit and not means.is_noisy:
            # A guess that says nearly the same would fit as well; and half precision hides what is small.
            return means.rounding < _ROUNDING_OF_HALF and all(
                abs(other - expected) / scale > _OTHER * limit or off(other) > limit for other in others.values()
            )
        name = min(others, key=lambda name: (math.isnan(others[name]), off(others[name])))
        if off(others[name]) <= max(limit, off(expected) / _OTHER):
            raise _other_mean(name, parts, counts, expected, means.both, self._said)
        warnings.warn(
            f"the model's loss is not quite a mean over what is counted: on two parts of a micro-batch it is {parts[0]:.6g} and {parts[1]:.6g}, together "
            f"{means.both:.6g} where their mean is {expected:.6g}. What is added to it (a router's loss, a loss of pairs of samples) depends on how "
            "samples are grouped into micro-batches. If it is a mean over other items (cross entropy with class weights divides by the weights of the "
            "labels), pass their number: count=lambda batch: weights[batch['labels']].sum()",
            stacklevel=level_of_caller(),
        )
        return True


class _Means(NamedTuple):
    """The model's loss for each of the trials; ``rounding``: relative differences up to it prove nothing; ``by_logits``: cross
    entropies that its logits have with the labels, by how these are shifted."""

    both: float
    first: float
    second: float
    first_twice: float
    whole: float
    other_first_label: float
    other_second_label: float
    rounding: float
    by_logits: Mapping[str, float]

    @property
    def by_number(self) -> float:
        """What another number of samples changes: of a mean, rounding, as other sizes use other kernels."""
        return abs(self.first_twice - self.first) / (max(abs(self.first), abs(self.first_twice)) or 1.0)

    @property
    def is_noisy(self) -> bool:
        """Whether that is no rounding: random numbers, or no mean."""
        return self.by_number > _MOST_ROUNDING


def _refuse_shift(runtime: Runtime, trials: Trials, means: _Means) -> bool:
    """Whether the model compares each label with the logits at its place; True where labels are none of tokens.

    Raises:
        ConfigError: it compares them with those before.
    """
    if not trials.is_causal:
        return True
    scale = abs(means.whole) or 1.0
    fits = {how for how, value in means.by_logits.items() if abs(value - means.whole) <= 10 * means.rounding * scale}
    if fits == {"aligned"}:
        return True
    by_first = abs(means.other_first_label - means.whole)
    by_second = abs(means.other_second_label - means.whole)
    is_seen = math.isfinite(by_first + by_second) and by_second > _SEEN * means.rounding * scale
    if "aligned" in fits or not (fits or is_seen):
        return False  # a head of zeros has one loss for all labels: nothing is seen yet
    if not fits and by_first > _UNCHANGED * by_second:
        return True
    raise ConfigError(
        f"loss=sw.model_loss with {runtime.recipe.module_class}, which shifts labels itself",
        why=(
            "its loss is the cross entropy of labels[:, 1:] and logits[:, :-1]"
            if fits
            else "its loss does not change with the label of the first position, so labels[:, 1:] is compared with logits[:, :-1]"
        )
        + ". Labels here are shifted already (labels[b, t] is the target of logits[b, t]): each position would be trained on the token after next",
        fix="use loss=sw.next_token_loss, which takes the logits; or compare labels[:, t] with logits[:, t] in the model's forward",
    )


def _by_logits(output: Any, labels: Any) -> dict[str, float]:
    """The mean cross entropy of the logits in an output with labels, as they are and shifted; empty where there are none."""
    if not isinstance(labels, Tensor) or not are_labels(labels) or labels.dim() != 2:
        return {}
    found = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == labels.shape]
    if len(found) != 1 or not found[0].is_floating_point() or int(labels.max()) >= found[0].shape[-1]:
        return {}
    logits, labels = found[0].transpose(1, 2), labels.masked_fill(labels < 0, IGNORED)
    return {
        "aligned": float(F.cross_entropy(logits, labels, ignore_index=IGNORED)),
        "shifted": float(F.cross_entropy(logits[..., :-1], labels[:, 1:], ignore_index=IGNORED)),
        "rolled": float(F.cross_entropy(logits, labels.roll(-1, 1), ignore_index=IGNORED)),
    }


def _other_mean(
    name: str, parts: Sequence[float], counts: Sequence[float], expected: float, both: float, said: str
) -> ConfigError:
    told = {
        "samples": ("the mean of the means of samples", "count samples: count=lambda batch: len(batch['labels'])"),
        "labels": ("the mean over labels that are not -100", "leave count= out: these labels are counted by default"),
        "not negative": (
            "the mean over labels that are not negative",
            "use -100 for labels that do not count; or count=lambda batch: (batch['labels'] >= 0).sum()",
        ),
        "mask": ("the mean over attention_mask", "pass count=lambda batch: batch['attention_mask'].sum()"),
        "sum": (
            "the sum",
            f"it is a sum already: loss=None, {said}",
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
    text = first_line(error, type(error).__name__)
    warnings.warn(
        f"the model's loss could not be tried on parts of a micro-batch ({text}), so nothing tells whether it is a mean over what is counted",
        stacklevel=level_of_caller(),
    )


@contextlib.contextmanager
def _without_draws(model: nn.Module) -> Iterator[None]:
    """Within: modules of torch that draw random numbers or keep running statistics are in eval mode, and the others in train
    mode, in which they may compute another loss."""
    with eval_mode(model, on=False):
        for module in model.modules():
            module.training = not acts_by_mode(module)
        yield


class _LossesInFloat32(TorchFunctionMode):
    """Within: losses of half precision are computed in float32, where a mean shows next to its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _LOSSES:
            args, kwargs = map_leaves(_widened, (args, kwargs))
        return func(*args, **kwargs)


_LOSSES = frozenset(name for name in dir(F) if "loss" in name or "cross_entropy" in name) | {"log_softmax", "logsumexp"}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value


def _weighted(parts: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / total if total else math.nan
