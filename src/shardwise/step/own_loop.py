"""Training loops of the user's own: ``accumulate`` and ``count_tokens``, and what such loops are warned of."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise._torch.autograd import unseen_writes
from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.data.batch import is_padding
from shardwise.data.loader import mark_used
from shardwise.errors import UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffers import BufferExchange
from shardwise.step.accumulation import Accumulation
from shardwise.step.loss import Batch, as_micro_batches, counter_of_loop
from shardwise.step.own_collectives import NoOwnCollectives, none_over_copies
from shardwise.step.token_count import agree_on_count
from shardwise.step.written_state import written_state


@dataclass
class TokenCount:
    """Whether your own training loop has read the token count of its window (not used by :class:`TrainStep`).

    Attributes:
        num_summed: number of micro-batches of all ranks, whose gradients are summed.
        is_read: whether the count was read.
    """

    num_summed: int
    is_read: bool = False


class OwnLoop:
    """What is known of the loop of one model.

    Attributes:
        paddings: of the counted micro-batches that ``accumulate`` runs next, whether they are paddings.
    """

    def __init__(self) -> None:
        self.paddings: list[bool] = []
        self._last_count: TokenCount | None = None  # of the last window
        self._warned: set[str] = set()

    def begin(self, num_summed: int) -> TokenCount:
        self._last_count = TokenCount(num_summed)
        return self._last_count

    def forget(self, count: TokenCount) -> None:
        """Called when the window of ``count`` has ended in an exception."""
        if self._last_count is count:
            self._last_count = None

    def warn_of_unread(self, runtime: Runtime) -> None:
        """Warns once if the loop never read ``num_tokens`` of the previous window. Not earlier, since a loop may divide the
        gradients after the window."""
        last = self._last_count
        if last is None or last.is_read or last.num_summed == 1:
            return
        self._warn(
            runtime,
            "unread",
            f"nothing has read num_tokens of the window before: its gradients are sums over {last.num_summed} micro-batches of all ranks, and those "
            f'of a mean {last.num_summed} times too large. Divide a sum by it: (loss / w.num_tokens).backward(), with reduction="sum"; a loop '
            "that divides by another number may read it once",
        )

    def warn_of_nothing(self, runtime: Runtime, place: str) -> None:
        """Warns once of a window in which no rank counts anything."""
        self._warn(
            runtime,
            "nothing counted",
            f"{place} has nothing to train on: on every rank all labels are -100, or count= gave 0. sw.TrainStep leaves its step out, "
            "and its loss is NaN; in a loop of your own, leave out optim.step() where w.num_valid is 0. If it was not meant, look at the labels",
        )

    def warn_of_window(self, gradients: Accumulation, num_tokens: float, place: str) -> None:
        """Warns, once each, of a window without a backward, and of a missing ``zero_grad()``."""
        runtime = gradients.runtime
        if num_tokens and not any(param.grad is not None for param in runtime.parameters.values()):
            self._warn(
                runtime,
                "no backward",
                "a window without a backward: no parameter has a gradient, and a step would train nothing. Call "
                "(loss / w.num_tokens).backward() for each micro-batch",
            )
        elif gradients.were_stepped:
            self._warn(
                runtime,
                "no zero_grad",
                f"gradients of an earlier window are added to those of {place}, and an optimizer has stepped with them: call "
                "optim.zero_grad() after optim.step()",
            )

    def _warn(self, runtime: Runtime, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            if runtime.world.is_main:
                warnings.warn(text, stacklevel=level_of_caller())


@public_call()
def count_tokens(model: nn.Module, batches: Iterable[Batch], *, loss: Any = None, count: Any = None) -> int | float:
    """Counts the valid tokens of a window's micro-batches over all ranks; paddings count 0. All ranks must call it (one
    exchange).

    Args:
        model, batches, loss, count: as for :func:`window`.

    Raises:
        RankError, UsageError, ConfigError: as for :func:`window`.
    """
    runtime, given = runtime_of(model), as_micro_batches(batches)
    runtime.memory(OwnLoop).paddings[:] = map(is_padding, given)
    mark_used(given)
    return agree_on_count(runtime, given, counter_of_loop(model, loss, count), trains=False).tokens


@contextlib.contextmanager
def not_counted(gradients: Accumulation, padding: bool, *, has_backward: bool = True) -> Iterator[None]:
    """Within: gradients of a ``padding`` count as 0, whatever the loss is divided by; the buffers that it writes, and the Python state
    beside them, are restored afterwards. Without its backward that may still need them: it is not to see that they were written."""
    runtime = gradients.runtime
    if not padding:
        with contextlib.nullcontext() if runtime.num_windows else none_over_copies(runtime):
            yield
        return
    state = runtime.module_state()
    gradients.set_padding(True)
    try:
        with NoOwnCollectives("a padding of a window"):
            yield
    finally:
        gradients.set_padding(False)
        with contextlib.nullcontext() if has_backward else unseen_writes(runtime.buffers().values()):
            state.restore()


@public_call({"last": "is_last", "is_last": "is_last: whether this micro-batch is the last of its step"})
@contextlib.contextmanager
def accumulate(model: nn.Module, *, is_last: bool, batch: Batch | None = None) -> Iterator[None]:
    """Gradient accumulation by hand: gradients of the backwards within are kept, and summed over the ranks on leaving the one with
    ``is_last=True``.

    Between them, and afterwards, a backward is refused on several ranks. Until gradients are summed, clipping and optimizer steps are
    refused. An exception drops the gradients of the micro-batches since the last sum. All ranks must use it in the same way.

    Args:
        model: from ``parallelize``.
        is_last: whether this micro-batch is the window's last one.
        batch: the micro-batch that runs: a padding counts as 0. None: the next of those given to :func:`count_tokens`,
            in their order; pass it if the loop leaves some of them out or runs them in another order.
    """
    runtime = runtime_of(model)
    runtime.refuse_own_loop()
    paddings = runtime.memory(OwnLoop).paddings
    in_order = paddings.pop(0) if paddings else False
    padding = in_order if batch is None else is_padding(batch)
    gradients = _begun(runtime)
    first = written_state(runtime)
    gradients.open(True)
    runtime.engine.set_last(is_last)
    try:
        with gradients.buffers.watched(), not_counted(gradients, padding):
            yield
        gradients.open(False)
        if is_last:
            _finish(gradients)
    except BaseException:
        gradients.abandon()
        paddings.clear()
        raise
    if is_last:
        paddings.clear()
        if first is not None:
            first.end()


def _begun(runtime: Runtime) -> Accumulation:
    """The gradients of the micro-batches of ``accumulate`` before, or new ones."""
    if runtime.in_window:
        raise UsageError(
            "sw.accumulate inside a window of the same model",
            why="the window says itself which micro-batch is the last one",
            fix="use one of them: within `for batch in w:` call backward() alone",
        )
    refuse_within(runtime)
    if isinstance(runtime.accumulation, Accumulation) and runtime.accumulation.of == "accumulate":
        return runtime.accumulation
    runtime.check_unchanged()
    return Accumulation(runtime, "accumulate", BufferExchange(runtime))


def refuse_within(runtime: Runtime) -> None:
    gradients = runtime.accumulation
    if gradients is not None and gradients.of == "accumulate" and gradients.is_open:
        raise UsageError(
            "a window, or sw.accumulate, inside sw.accumulate of the same model",
            why="both would sum the same gradients over the ranks",
            fix="leave `with sw.accumulate(...)` first, or use the window alone",
        )


def _finish(gradients: Accumulation) -> None:
    runtime, place = gradients.runtime, "the last micro-batch"
    gradients.complete(place)
    summed = runtime.world.agreement.sum(gradients.entries(), place)
    gradients.agree(summed, place)
    gradients.end()
    gradients.buffers.apply(summed, place)
    gradients.close()
