"""Checks that a loss returns sums and not means: on copies of a micro-batch, a sum grows with their number, a mean does
not.

The loss alone is tried first, on copies of the model's output. Where that does not show a sum (the output is not one
row for each sample, the loss is computed inside the forward), forward and loss run on copies of the micro-batch, once,
before the step is taken.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.config.suggest import first_few
from shardwise.data.batch import MicroBatch
from shardwise.errors import ConfigError, RankError, ShardwiseError, UsageError, first_line
from shardwise.launch.failure import is_lost_peer
from shardwise.model.module_state import FunctionState
from shardwise.parallel import Runtime
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.step.growth import Copies, Growth, growths_of
from shardwise.step.loss import Batch, Loss, as_sums
from shardwise.world.rng import derive_seed, forked_streams

__all__ = ["SumCheck", "agreed_problem", "seeded", "without_a_trace"]

T = TypeVar("T")

_RUNS = (1, 1, 2, 3)  # numbers of copies; the second run on one copy shows whether random numbers are in it


class SumCheck:
    """Determines once for each entry of a loss whether it is a sum; all ranks take part in the same way.

    An entry that is 0 shows nothing, so it is tried until some rank has settled it: ``"loss"`` in every window, another
    entry in the first window and then ever more rarely, since it may stay 0 for ever. While an entry is open, a window
    runs the loss again in each of its micro-batches, paddings too, whatever this rank has found
    meanwhile: a loss may contain a collective (a sharded teacher), and then every rank must run it equally often.

    Args:
        runtime: of the model whose loss it is.
        count: what is counted in a micro-batch.
        forward: calls the model on a micro-batch; what it and the loss keep is as before after a trial.

    Attributes:
        is_due: whether this window tries the loss; equal on every rank.
        unclear: entries that the loss alone did not show to be sums on this rank, with how they grew, where that means
            something; :meth:`try_forward` settles them.
    """

    def __init__(self, runtime: Runtime, count: Callable[[Batch], Any], forward: Callable[..., Any]) -> None:
        self._runtime, self._count, self._forward = runtime, count, forward
        self._has_warned = False
        self.settled: set[str] = set()  # entries settled by some rank: equal on every rank
        self.names: set[str] = set()  # entries the loss has returned
        self.found: set[str] = set()  # entries settled by this rank in this window
        self.unclear: dict[str, _Seen | None] = {}
        self.is_due = True
        self._batch: Batch | None = None  # the micro-batch for `try_forward`
        self._error: Exception | None = None  # of the loss on copies

    def begin(self, num_steps: int) -> None:
        """Called when a window begins (in an evaluation, a batch), after ``num_steps`` others."""
        self.found = set()
        is_metric_due = num_steps & (num_steps - 1) == 0  # 0, 1, 2, 4, 8, ...
        self.is_due = "loss" not in self.settled or (is_metric_due and not self.names <= self.settled)

    def entry(self, names: list[str]) -> Tensor:
        """For the exchange: a flag for each of ``names``, whether this rank has settled it or leaves it to
        :meth:`try_forward`."""
        return torch.tensor([float(name in self.found or name in self.unclear) for name in names])

    def agree(self, names: list[str], summed: Tensor) -> None:
        """Marks as settled those of ``names`` that any rank has flagged. ``summed``: :meth:`entry`, summed over the
        ranks."""
        self.names = set(names)
        self.settled |= {name for name, told in zip(names, summed.tolist(), strict=True) if told}

    def try_loss(
        self, loss: Loss | None, output: Any, batch: Batch, once: Mapping[str, Tensor], *, counts: bool
    ) -> None:
        """Runs ``loss`` on copies of a micro-batch and of the model's output for it, if this window is due.

        Args:
            loss: the loss function; None: the forward has returned the sums.
            output: the model's output for ``batch``.
            batch: the micro-batch.
            once: what the loss returned for it.
            counts: False for a padding: it runs, as on the other ranks, but its result is not used.
        """
        self.names |= once.keys()
        if not self.is_due:
            return
        self._batch = batch if self._batch is None else self._batch
        growths, seen = self._by_loss(loss, output, batch)
        for name in sorted(once.keys() - self.settled - self.found - self.unclear.keys() if counts else ()):
            value, growth = float(once[name].detach()), growths.get(name)
            if value == 0.0 or value != value or (growth is not None and not growth.tells):
                continue
            if growth is not None and (growth.kind == "sum" or (growth.kind == "other" and seen == "whole")):
                self.found.add(name)
                if growth.is_square:
                    _warn_of_square(name)
            else:
                says = {"whole": ("mean", "part"), "but for numbers": ("mean", "part"), "means": ("mean",)}.get(
                    seen, ()
                )
                self.unclear[name] = (
                    _Seen(growth, seen != "but for numbers") if growth and growth.kind in says else None
                )
                self._batch = batch

    def _by_loss(self, loss: Loss | None, output: Any, batch: Batch) -> tuple[dict[str, Growth], str]:
        """How each entry grows with copies of the output, and how far that can be trusted: ``"whole"`` where the copies
        are what the model would return, ``"but for numbers"`` where 0-dim tensors in them are not, ``"means"`` where
        the micro-batch has tensors with other numbers of rows (edges of a graph), over which a sum would not grow,
        ``""`` for any other output."""
        if loss is None:
            return {}, ""
        with torch.no_grad(), without_a_trace(self._runtime, loss) as kept:
            try:
                copies = Copies(batch, output)
                runs = _in_float64_or_as_it_is(
                    lambda exact: [as_sums(loss(*copies.for_loss(num, exact=exact))) for num in _RUNS]
                )
            except Exception as error:  # such as an output that can be used only once, a distribution of a fixed size
                self._error = error
                return {}, ""
            finally:
                written, lost = self._buffers_outside(kept), kept.lost
        if lost:
            raise _too_large(lost[0])
        if written:
            self._warn_of_buffers(written)
        return growths_of(runs, of_forward=False), self._worth(copies)

    def _buffers_outside(self, kept: FunctionState) -> list[str]:
        """The buffers that the loss has written and the model does not have."""
        if self._has_warned or self._runtime.world.axis("loss").size == 1:
            return []
        return [f"{type(owner).__name__}.{name}" for owner, name in kept.written_buffers]

    def _warn_of_buffers(self, names: list[str]) -> None:
        self._has_warned = True
        if self._runtime.world.is_main:
            warnings.warn(
                f"the loss writes {first_few(names)}, a buffer that the model does not have: each rank writes it from its own data, nothing "
                "compares the ranks, and it is in no checkpoint. Put the loss in the model, before parallelize: "
                'model = sw.TaskModel(model, loss), and say what the ranks make of it together: Sharding(buffers={"*.center": "mean"})',
                stacklevel=2,
            )

    def _worth(self, copies: Copies) -> str:
        if not copies.is_of_samples:
            once, twice = (float(torch.as_tensor(self._count(copies.batch(num)))) for num in (1, 2))
            return "means" if copies.is_whole and twice == 2 * once else ""
        return "whole" if copies.is_whole else "but for numbers" if copies.is_rows_and_numbers else ""

    def try_forward(self, forward: Callable[[Batch], Any], loss: Loss | None) -> None:
        """Settles the unclear entries of any rank: runs forward and loss on copies of a micro-batch, without side
        effects. All ranks must call it, outside a window.

        Raises:
            ConfigError: on every rank, for an entry that is not a sum.
        """
        unclear, batch = self.unclear, self._batch
        assert batch is not None  # every rank has kept one in `try_loss`
        growths = self._by_forward(forward, loss, batch)
        problem = None
        for name, seen in unclear.items():
            growth = growths.get(name)
            if growth is None and (seen is None or not seen.is_whole):
                if self._runtime.world.is_main:
                    _warn_unchecked(self._error)
            else:
                problem = problem or _problem(name, seen, growth)
        self.unclear, self._batch, self._error = {}, None, None
        agreed = self._runtime.world.agreement.sum(
            {"problem": float(problem is not None)}, "trying whether the loss is a sum"
        )
        if float(agreed["problem"]):
            raise agreed_problem(self._runtime, problem)

    def _by_forward(self, forward: Callable[[Batch], Any], loss: Loss | None, batch: Batch) -> dict[str, Growth]:
        """How each entry grows when forward runs on the copies; empty where it cannot run on them."""
        runtime = self._runtime
        with torch.no_grad(), without_a_trace(runtime, loss, self._forward), torch.compiler.set_stance("force_eager"):
            try:
                plain = Copies(batch, None)
                if not plain.is_of_samples:
                    raise ValueError(
                        "its tensors have different numbers of rows, so that copies would be another kind of batch"
                    )
                outputs = [seeded(runtime, i, forward, plain.batch(num)) for i, num in enumerate(_RUNS)]
                if loss is None:
                    runs = [as_sums(output) for output in outputs]
                else:
                    runs = _runs_of_loss(loss, Copies(batch, outputs[0]), outputs)
            except Exception as error:  # such as of a model that takes one batch size only
                if isinstance(error, RankError) or is_lost_peer(error):
                    raise
                self._error = error
                runtime.engine.abandon()
                return {}
        return {name: growth for name, growth in growths_of(runs, of_forward=True).items() if growth.tells}


class _Seen(NamedTuple):
    """An entry that does not grow as a sum in the loss alone, and whether that proves it (all the output was
    copied)."""

    growth: Growth
    is_whole: bool


def _in_float64_or_as_it_is(run: Callable[[bool], T]) -> T:
    """Calls ``run`` with float64, where a mean shows even next to a sum of millions; in the given dtypes if that fails,
    as for a loss with constants of another dtype."""
    try:
        return run(True)
    except Exception:
        return run(False)


def seeded(runtime: Runtime, i: int, forward: Callable[[Batch], Any], batch: dict[str, Any]) -> Any:
    """What ``forward`` returns for a batch, with random numbers of the stream ``i`` of such trials in this step."""
    seed = derive_seed(runtime.world.seed, "trying the loss", runtime.step, i)
    with forked_streams(seed, runtime.world.device, runtime.generators):
        return forward(MicroBatch(batch))


def _runs_of_loss(loss: Loss, copies: Copies, outputs: list[Any]) -> list[dict[str, Tensor]]:
    def run(exact: bool) -> list[dict[str, Tensor]]:
        return [
            as_sums(loss(*copies.for_loss(num, exact=exact, computed=output)))
            for num, output in zip(_RUNS, outputs, strict=True)
        ]

    return _in_float64_or_as_it_is(run)


def _problem(name: str, seen: _Seen | None, by_forward: Growth | None) -> ConfigError | None:
    """The error for an entry that the loss alone did not show to be a sum; None if it is one."""
    if seen is not None and (by_forward is None or not by_forward.noise):
        if by_forward is not None and abs(by_forward.rest) < abs(seen.growth.rest) / 2:
            return None  # what did not grow was computed in the forward, where it does
        return _no_sum(name, seen.growth)
    assert by_forward is not None
    return None if by_forward.kind in ("sum", "other") else _no_sum(name, by_forward)


def agreed_problem(runtime: Runtime, problem: ShardwiseError | None) -> ShardwiseError:
    """The error of the loss to raise on this rank: its own, else that of another rank. All ranks must call it."""
    found = runtime.world.agreement.gather(problem, "naming a fault of the loss")
    ranks = tuple(rank for rank, error in enumerate(found) if error is not None)
    error = problem or found[ranks[0]]
    if problem is not None or isinstance(error, ConfigError):  # a mean is one on every rank, whichever rank found it
        return error
    return RankError(
        f"rank {', '.join(map(str, ranks))} could not run backward",
        why=error.given,
        fix="see the error of that rank",
        ranks=ranks,
    )


def _no_sum(name: str, growth: Growth) -> ConfigError:
    if growth.kind == "part":
        return _part(name, growth)
    shown = f"the micro-batch twice over gives {growth.twice:.6g}, once {growth.once:.6g}: a sum would double"
    if name == "loss":
        return ConfigError(
            "a loss that takes a mean",
            why=f"{shown}. Means of unequal micro-batches and ranks cannot be combined into the right gradient",
            fix='use reduction="sum"; Shardwise divides by the tokens of all ranks. For a mean that the model computes itself: loss=sw.model_loss',
        )
    return ConfigError(
        f"a loss whose {name!r} is a mean, or another value that is no sum",
        why=f"{shown}. Every entry is added up over micro-batches and ranks and divided by the tokens of all, so this one would "
        "be reported wrong",
        fix=f"return the sum: {{{name!r}: (...).sum()}} instead of .mean(); leave out what is no sum over tokens",
    )


def _part(name: str, growth: Growth) -> ConfigError:
    return ConfigError(
        f"a loss whose {name!r} is a sum with something added to it that is no sum, such as a mean",
        why=f"one, two and three copies of the micro-batch give {growth.once:.6g}, {growth.twice:.6g} and {growth.thrice:.6g}: "
        f"{growth.once * growth.rest:.6g} stays the same. All of it is divided by the tokens of all ranks, so this part would "
        "weigh less the more tokens there are, and depend on the number of micro-batches",
        fix="multiply a mean by what is counted in the micro-batch: total + 0.01 * auxiliary * (batch['labels'] != -100).sum(); "
        "a penalty on weights needs a backward of its own: see sw.window",
    )


@contextlib.contextmanager
def without_a_trace(runtime: Runtime, *functions: Any) -> Iterator[FunctionState]:
    """Within: no warnings. Buffers of the models, the Python state beside them, and what ``functions`` keep, are restored afterwards;
    yields the latter."""
    known = {id(module) for each in runtimes_in_use() for _, module in each.modules}
    state, kept = runtime.module_state(), FunctionState(functions, known)
    try:
        with _without_warnings():
            yield kept
    finally:
        state.restore()
        kept.restore()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Within: no warnings, since those of torch about shapes would be about the copies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _too_large(tensor: Tensor) -> UsageError:
    return UsageError(
        f"a loss that writes a tensor of its own, of {tensor.nbytes >> 20} MiB",
        why="the loss is tried on copies of the first micro-batches, and what it writes is put back after that: of tensors that it keeps, "
        "64 MiB at most",
        fix="make it a buffer of the model, before parallelize: model = sw.TaskModel(model, loss); or write it after the step",
    )


def _warn_of_square(name: str) -> None:
    """Warns of a loss that pairs each sample with each other one."""
    warnings.warn(
        f"the {name} grows with the square of the number of samples: four times as large for a micro-batch twice over, nine times for three copies. "
        "Where an output of shape [N, 1] meets a target of shape [N], torch makes [N, N] of them: output.squeeze(-1). A loss of pairs of samples is "
        "meant so, and depends on the size of a micro-batch",
        stacklevel=2,
    )


def _warn_unchecked(error: Exception | None) -> None:
    text = first_line(error, type(error).__name__)
    if "does not require grad" in text:
        text = "its forward takes a gradient itself, and is tried without gradients"
    warnings.warn(
        f"the loss could not be tried on a micro-batch twice over ({text}), so nothing tells whether it is a sum: a mean "
        'would train wrong (use reduction="sum")',
        stacklevel=2,
    )
