"""One check of the loss, in the first window in which something counts: is each entry of it a sum over what is counted, is the
mean that a model computes itself one over what is counted, and does the model shift labels that are shifted already.

A sum grows with the number of copies of a micro-batch, a mean does not: the loss alone is run on copies of the model's output,
and where that does not show a sum (the loss is computed inside the forward), the model on copies of the micro-batch. A model's
own mean is compared on two parts of very different counts and on both together. That a model shifts labels itself shows in
its logits, or in that the first label of each sample changes nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.batch import IGNORED
from shardwise.data.labels import valid_labels
from shardwise.errors import ConfigError
from shardwise.model.pytrees import leaves_of
from shardwise.parallel import Runtime
from shardwise.step import loss_errors as errors
from shardwise.step.forward import Forward, TrialRuns, drawn, run_alone, without_a_trace
from shardwise.step.growths import APART, ROUNDING, UNCHANGED, Growth, growths_of, resolution
from shardwise.step.loss import Batch, Loss, as_sums
from shardwise.step.model_loss import ModelLoss, loss_of_output, said_forward
from shardwise.step.step_state import StepState
from shardwise.step.trial_batches import COUNTS, Copies, parts_of, relabelled


class LossCheck:
    """Determines once for each entry of a loss whether it is a sum, or of a :class:`ModelLoss` whether it is the right mean; all
    ranks take part in the same way.

    An entry that is 0 shows nothing, so it is tried until some rank has settled it: ``"loss"`` in every window, another
    entry in the first window and then ever more rarely, since it may stay 0 for ever. While an entry is open, a window
    runs the loss again in each of its micro-batches, paddings too, whatever this rank has found meanwhile: a loss may contain
    a collective (a sharded teacher), and then every rank must run it equally often.

    Args:
        loss: None: the forward returns the sums.
        given: the ``forward=`` of the user; what it and the loss keep is as before after a trial.

    Attributes:
        is_due: whether this window tries the loss; equal on every rank.
        settled: names of entries that some rank has settled; of a model's mean also ``"shift"`` and ``"weights"``.
    """

    def __init__(
        self, runtime: Runtime, loss: Loss | None, count: Callable[[Batch], Any], forward: Forward, given: Any
    ) -> None:
        self._runtime, self._loss, self._forward, self._given = runtime, loss, forward, given
        self._is_mean = isinstance(loss, ModelLoss)
        self._count = count = loss.count if isinstance(loss, ModelLoss) else count
        # With a count of the user's own, the model may shift labels.
        self._has_shift = self._is_mean and count is valid_labels
        self._names = {"weights", "shift"} if self._has_shift else {"weights"} if self._is_mean else set()
        self.settled: set[str] = set()
        self._found: set[str] = set()  # settled by this rank in this window
        # Not shown to be a sum by the loss alone: how it grows there, where that means something, and whether it is proved.
        self._unclear: dict[str, tuple[Growth | None, bool]] = {}
        self.is_due = True
        self._batch: Batch | None = None  # the micro-batch that the model is run on for these
        self._error: Exception | None = None  # of the loss on copies
        self._has_warned = self._has_ignored = False

    def begin(self, num_steps: int, num_ignored: int | None = None) -> None:
        """Called when a window begins (in an evaluation, a batch), after ``num_steps`` others; ``num_ignored``: labels of all
        ranks in it that are -100."""
        self._found = set()
        is_new = self._is_mean and bool(num_ignored) and not self._has_ignored
        self._has_ignored |= is_new
        is_due = is_new or num_steps & (num_steps - 1) == 0  # windows 0, 1, 2, 4, 8, ...
        self.is_due = "loss" not in self.settled or (is_due and not self._names <= self.settled)

    def see(self, output: Any, batch: Batch, once: Mapping[str, Tensor], *, counts: bool) -> None:
        """TrialRuns the loss on copies of a micro-batch and of the model's ``output`` for it, if this window is due. ``once``: what it
        returned for them; not ``counts``: a padding, whose result is not used."""
        if not self.is_due or self._is_mean:
            return
        self._names |= once.keys()
        self._batch = batch if self._batch is None else self._batch
        growths, kinds, is_proved = self._by_loss(output, batch)
        for name in sorted(once.keys() - self.settled - self._found - self._unclear.keys() if counts else ()):
            value, growth = float(once[name].detach()), growths.get(name)
            if value == 0.0 or not math.isfinite(value):
                continue
            fine = ("sum", "other") if is_proved and "part" in kinds else ("sum",)
            if growth is not None and growth.kind in fine:
                self._found.add(name)
                if growth.is_square:
                    errors.warn_of_square(name)
            else:
                self._unclear[name] = (growth if growth is not None and growth.kind in kinds else None, is_proved)
                self._batch = batch

    def _by_loss(self, output: Any, batch: Batch) -> tuple[dict[str, "Growth"], tuple[str, ...], bool]:
        """How each entry grows with copies of the output, which kinds of growth other than a sum's mean something, and whether they
        are proved: the copies are what the model would return. Where tensors have other numbers of rows (edges of a graph),
        over which a sum would not grow, that is a mean alone."""
        loss, runtime = self._loss, self._runtime
        if loss is None:
            return {}, (), False
        with without_a_trace(runtime, loss) as kept:
            try:
                copies = Copies(runtime.for_loss(batch), output)
                runs, is_noisy = drawn(runtime, lambda: [copies.sums(loss, num) for num in (1, 2, 3)])
            except Exception as error:  # such as an output that can be used only once, a distribution of a fixed size
                self._error = error
                return {}, (), False
            finally:
                is_new = not self._has_warned and runtime.world.axis("loss").size > 1
                written = [f"{type(owner).__name__}.{name}" for owner, name in kept.written_buffers] if is_new else []
                lost = kept.lost
        if lost:
            raise errors.too_large(lost[0])
        if written:
            self._has_warned = True
            errors.warn_of_buffers(written, is_main=runtime.world.is_main)
        growths, is_whole = growths_of(runs, is_noisy=is_noisy), copies.holds_rows()
        if copies.is_of_samples:
            return growths, ("mean", "part") if copies.holds_rows(or_numbers=True) else (), is_whole
        once, twice = (float(torch.as_tensor(self._count(copies.batch(num)))) for num in (1, 2))
        return growths, ("mean",), is_whole and twice == 2 * once

    def entries(self, names: list[str]) -> dict[str, Any]:
        """For the exchange: a flag for each of ``names``, whether this rank has settled it or leaves it to :meth:`run`; and
        whether :meth:`run` is to be called."""
        told = torch.tensor([float(name in self._found or name in self._unclear) for name in names])
        return {"told": told, "unclear": float(self.is_due if self._is_mean else bool(self._unclear))}

    def agree(self, names: list[str], told: Tensor) -> None:
        """Marks as settled those of ``names`` that any rank has flagged. ``told``: of :meth:`entries`, summed over the ranks."""
        self._names |= set() if self._is_mean else set(names)
        self.settled |= {name for name, flag in zip(names, told.tolist(), strict=True) if flag}

    def forget(self) -> None:
        """Frees what :meth:`run` would use; called where it is not called, as nothing is unclear on any rank."""
        self._batch = self._error = None

    def run(self, batches: Sequence[Batch], state: StepState) -> None:
        """TrialRuns the model on copies or parts of a micro-batch, without side effects, and settles what is unclear on any rank. All
        ranks must call it, outside a window.

        Raises:
            ConfigError: on every rank, for an entry that is no sum; a model's loss that is no mean over what is counted, or is one
                of labels that are shifted twice.
        """
        runtime, settled, problem = self._runtime, {"loss"}, None
        try:
            if runtime.cannot_run_alone is not None:
                runtime.chosen["loss check"] = f"the model is not run to try its loss: {runtime.cannot_run_alone}"
                settled |= {"shift", "weights"}
                self._refuse_proved()
            else:
                settled |= self._try_parts(batches, state) if self._is_mean else self._try_copies(state)
        except ConfigError as error:
            problem = error
        told = {name: float(name in settled) for name in ("loss", "shift", "weights")}
        agreed = runtime.world.agreement.sum(
            {"problem": float(problem is not None), **told}, "trying the loss, the result"
        )
        if float(agreed.pop("problem")):
            raise errors.agreed_problem(runtime, problem)
        self.settled |= {name for name, flag in agreed.items() if float(flag)}
        self._unclear, self._batch, self._error = {}, None, None

    def _refuse_proved(self) -> None:
        for name, (seen, is_proved) in self._unclear.items():
            if seen is not None and is_proved and seen.kind == "mean":
                raise errors.no_sum(name, seen)

    def _runs(
        self, trials: Sequence[Batch], read: Callable[[int, Any], Any], state: StepState, *modes: Any
    ) -> TrialRuns:
        return run_alone(self._runtime, self._forward, trials, read, state, (self._loss, self._given), *modes)

    def _try_copies(self, state: StepState) -> set[str]:
        """Settles unclear entries by runs of forward and loss on one, two and three copies of a micro-batch."""
        loss, batch, first = self._loss, self._batch, list[Any]()
        assert batch is not None  # every rank has kept one in `see`
        copies = Copies(batch)

        def read(i: int, output: Any) -> dict[str, Tensor]:
            first[i:] = [output] if i == 0 else []
            if loss is None:
                return as_sums(output)
            return Copies(self._runtime.for_loss(batch), first[0]).sums(loss, i + 1, output)

        # Each rank runs the model equally often, also one whose micro-batch cannot be copied.
        runs = self._runs([copies.batch(num) if copies.is_of_samples else batch for num in (1, 2, 3)], read, state)
        if not copies.is_of_samples:
            why = "its tensors have different numbers of rows, so that copies would be another kind of batch"
            runs.error = ValueError(why)
        growths = {} if runs.error else growths_of(runs.values, is_noisy=runs.is_noisy, of_forward=True)
        for name, (seen, is_proved) in self._unclear.items():
            growth = growths.get(name)
            if growth is None and (seen is None or not is_proved):
                errors.warn_untried(runs.error or self._error, is_main=self._runtime.world.is_main)
                continue
            if growth is not None and growth.is_square:
                errors.warn_of_square(name)
            if seen is not None and (growth is None or not growth.is_noisy):  # what did not grow may be of the forward
                growth = seen if growth is None or abs(growth.rest) >= abs(seen.rest) / 2 else None
            if growth is not None and growth.kind in ("mean", "part"):
                raise errors.no_sum(name, growth)
        return set()

    def _try_parts(self, batches: Sequence[Batch], state: StepState) -> set[str]:
        """Tries the model's mean on parts of a micro-batch, and on other labels where its logits do not tell how it compares them.
        Returns what is settled."""
        runtime, parts, seen = self._runtime, parts_of(batches), list[Any]()

        def read(i: int, output: Any) -> Tensor:
            loss = loss_of_output(output)
            if i == 0:
                seen[:] = _fits(output, parts[0].get("labels"), loss), said_forward(runtime.module, parts[0], output)
            return loss

        runs = self._runs(parts, read, state)
        error = runs.error or (ValueError("it draws random numbers in eval mode too") if runs.is_noisy else None)
        others = [other for column in (0, 1) if (other := relabelled(parts[0], column)) is not None]
        is_open, of_labels = error is None and self._has_shift and bool(others) and not seen[0], None
        if float(runtime.world.agreement.sum({"open": float(is_open)}, "trying the loss, its labels")["open"]):
            of_labels = self._runs(others or parts[:2], lambda _, output: loss_of_output(output), state, runs.mode)
        if error is not None:
            errors.warn_untried(error, is_mean=True)
            return set()
        fits, said = seen
        is_aligned = fits == {"aligned"} or not self._has_shift or not others
        is_shifted = not is_aligned and bool(fits) and "aligned" not in fits
        if is_open and of_labels is not None and of_labels.error is None:
            is_aligned, is_shifted = _uses_first(runs.values[0], *of_labels.values)
        if is_shifted:  # first: with a sum of labels that are shifted twice, the loss would be taken as it is
            raise errors.shifted(runtime.recipe.module_class, by_logits=bool(fits))
        return ({"shift"} if is_aligned else set()) | ({"weights"} if self._weigh(parts, runs.values, said) else set())

    def _weigh(self, parts: Sequence[Batch], losses: Sequence[Tensor], said: str) -> bool:
        """Whether the losses of parts show that they are weighted by what is counted: of a mean over ``count(batch)`` items, the loss
        of both parts is the mean of theirs, weighted by their counts. A mean of the means of samples, a sum, or a mean over other
        items is not, and would give gradients that depend on how samples are grouped.

        Raises:
            ConfigError: they are weighted otherwise.
        """
        both, *each, first_twice = map(float, losses)
        try:
            counts = [float(torch.as_tensor(self._count(part))) for part in parts[1:3]]
        except Exception as error:  # on one rank alone, whose others wait for the result
            errors.warn_untried(error, is_mean=True)
            return False
        if min(counts) <= 0 or not all(map(math.isfinite, (both, *each))):
            return False
        scale = max(map(abs, (both, *each))) or 1.0
        by_number = abs(first_twice - each[0]) / scale  # of a mean, rounding
        limit = max(resolution(losses[0]), APART * min(by_number, ROUNDING[2]))
        expected = _weighted(each, counts)
        # Of what counts the same here, such as labels that are not negative where all others are -100, nothing is to be told apart.
        by_name = {name: [count(part) for part in parts[1:3]] for name, count in COUNTS.items()}
        others = {name: _weighted(each, given) for name, given in by_name.items() if given != counts}
        others = {"sum": sum(each), **{name: guess for name, guess in others.items() if not math.isnan(guess)}}
        off = {name: abs(both - guess) / scale for name, guess in {"": expected, **others}.items()}
        if off[""] <= limit and by_number <= ROUNDING[2]:
            # A guess that says nearly the same would fit as well.
            is_apart = {name: abs(other - expected) / scale > APART * limit for name, other in others.items()}
            return all(is_apart[name] or off[name] > limit for name in others)
        name = min(others, key=lambda name: off[name])
        if off[name] <= max(limit, off[""] / APART):
            raise errors.other_mean(name, each, counts, expected, both, said)
        errors.warn_of_other_terms(each, expected, both)
        return True


def _weighted(parts: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / total if total else math.nan


def _fits(output: Any, labels: Any, loss: Tensor) -> set[str]:
    """How labels are shifted in the mean cross entropy with the logits of an output that gives this loss."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.long or labels.dim() != 2:
        return set()
    found = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == labels.shape]
    if len(found) != 1 or not found[0].is_floating_point() or int(labels.max()) >= found[0].shape[-1]:
        return set()
    logits, labels = found[0].transpose(1, 2), labels.masked_fill(labels < 0, IGNORED)
    means = {
        "aligned": F.cross_entropy(logits, labels, ignore_index=IGNORED),
        "shifted": F.cross_entropy(logits[..., :-1], labels[:, 1:], ignore_index=IGNORED),
        "rolled": F.cross_entropy(logits, labels.roll(-1, 1), ignore_index=IGNORED),
    }
    limit = resolution(loss) * (abs(float(loss)) or 1.0)
    return {how for how, mean in means.items() if abs(float(mean) - float(loss)) <= limit}


def _uses_first(loss: Tensor, other_first: Tensor, other_second: Tensor) -> tuple[bool, bool]:
    """Whether the loss changes with the label of the first position, and whether it changes with that of the second alone; neither,
    as with a head of zeros: nothing is seen yet."""
    by_first, by_second = (abs(float(other) - float(loss)) for other in (other_first, other_second))
    # Of the same logits: seen above the last place or two.
    is_seen = math.isfinite(by_second) and max(by_first, by_second) > resolution(loss) / APART * abs(float(loss))
    return is_seen and by_first > UNCHANGED * by_second, is_seen and by_first <= UNCHANGED * by_second
