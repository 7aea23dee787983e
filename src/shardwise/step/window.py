"""A window: gradient accumulation over the micro-batches of one optimizer step, with the same gradients as one process.

    with sw.window(model, batches) as w:
        for b in w:
            (loss(model(b["input_ids"]), b) / w.num_tokens).backward()

Entering sums the token count and the number of micro-batches over the ranks (the first of two exchanges per window).
Iterating gives each micro-batch its own random stream; in the last one gradients are summed over the ranks while backward still
runs. Leaving sums the rest, and the parts of gradients that a technique leaves to each rank, and exchanges what must be agreed before
the step (the second exchange): which parameters were used, the units entered, gradients of 0-dim parameters, and what the caller
adds. Gradients from before the window stay in ``.grad`` until its first backward; they are put aside then, and added at its
end, as in one process. An exception inside restores the module: gradients are what they were before.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise._torch.spans import span
from shardwise.config.keywords import public_call
from shardwise.data.batch import MicroBatch, is_padding
from shardwise.data.labels import refuse_second_shift, shifts_labels
from shardwise.data.loader import mark_used
from shardwise.errors import ShardwiseError, UsageError
from shardwise.launch.failure import is_lost_peer
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffers import BufferExchange
from shardwise.parallel.step_checks import refuse_unreduced
from shardwise.step.accumulation import OTHERS, Accumulation
from shardwise.step.loss import Batch, as_micro_batches, counter_of_loop
from shardwise.step.no_gradient import explain_no_gradient, refuse_unused
from shardwise.step.own_loop import OwnLoop, TokenCount, not_counted, refuse_within
from shardwise.step.param_write_check import ParamWriteCheck
from shardwise.step.token_count import agree_on_count, count_again, refuse_other_count
from shardwise.step.written_state import written_state
from shardwise.world.agreement import Entry
from shardwise.world.rng import continued_streams, derive_seed, forked_streams

_NUM_WINDOWS_CHECKED = 3  # windows in which the labels given to a model that shifts them itself are checked


class Window:
    """Gradient accumulation over the micro-batches of one optimizer step: a context manager and an iterator over them.

    Made by :func:`window`. All ranks must enter it, iterate to the end and leave it; the module's text says what each
    does.

    Attributes:
        num_tokens: valid tokens of all ranks and micro-batches, 1 if there are none: the divisor of a summed loss.
            While a padding micro-batch runs it is infinite, so that its sums count as 0.
        num_valid: the same count, but 0 if there are none.
        waited_s: seconds that ranks waited for the Loader of these micro-batches, on average over the ranks.
        num_ignored: labels of all ranks that are -100; None: labels are not what is counted.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        loss: Any = None,
        count: Any = None,
        trains: bool = False,
        gathers_once: bool = False,
        marks_parts: bool = True,
    ):
        self.model, self.batches = model, as_micro_batches(batches)
        self.runtime: Runtime = runtime_of(model)
        self._tokens: int | float = 0
        self.waited_s = 0.0
        self.num_ignored: int | None = None
        self._loop = self.runtime.memory(OwnLoop)
        self._count_of_tokens = TokenCount(0)
        self.agreed: dict[str, Tensor] | None = None  # sums over the ranks of the second exchange
        self.has_late = False  # gradients were added after the second exchange
        self._count = counter_of_loop(model, loss, count)
        self._trains = trains  # a backward follows each forward (TrainStep)
        # No code of the user's runs between micro-batches that could write parameters.
        self._gathers_once = gathers_once
        self._marks_parts = marks_parts
        self._padding = False
        self._num_backwards, self._is_ended, self._is_complete = 0, False, False
        self._undo = contextlib.ExitStack()  # closed when the current micro-batch ends, or a part of it
        # Micro-batch whose forward has run alone -> where its random numbers are.
        self._random_states: dict[int, dict[str, Any]] = {}

    @property
    def num_tokens(self) -> float:
        self._count_of_tokens.is_read = True
        return float("inf") if self._padding else float(self._tokens or 1)

    @property
    def num_valid(self) -> int | float:
        self._count_of_tokens.is_read = True
        return self._tokens

    @property
    def has_others(self) -> bool:
        """Whether a backward ran that was not the step's own."""
        return self._gradients.has_others

    @property
    def reached_others(self) -> bool:
        """Whether the loss of any rank came to another model, whose gradients are summed with these. After :meth:`finish`."""
        assert self.agreed is not None
        return bool(float(self.agreed[OTHERS]))

    @property
    def place(self) -> str:
        return f"window {self.runtime.step + 1}"

    # ---- entering --------------------------------------------------------------------------------------------

    def __enter__(self) -> "Window":
        self.runtime.enter("a window")
        try:
            self._begin()
        except BaseException:
            if not self.runtime.in_window:
                self.runtime.leave()
            raise
        return self

    def _begin(self) -> None:
        runtime = self.runtime
        if runtime.in_window:
            raise UsageError(
                "a window inside a window", why="they would share one model's gradients", fix="leave the first"
            )
        if self.agreed is not None:
            raise UsageError(
                "a window entered twice",
                why="it has counted and summed its micro-batches",
                fix="make another: sw.window(...)",
            )
        runtime.world.refuse_unwritten("a training step")
        runtime.check_unchanged()
        refuse_unreduced(runtime, "a window")
        refuse_within(runtime)
        self._loop.warn_of_unread(runtime)
        counted = agree_on_count(runtime, self.batches, self._count, trains=self._trains, meanwhile=self._mark_tensors)
        self._tokens, self.waited_s, self.num_ignored = counted
        if not self._tokens:
            self._loop.warn_of_nothing(runtime, self.place)
        self._counted_again = count_again(runtime, self.batches, self._count)
        if not self._trains:
            self._count_of_tokens = self._loop.begin(len(self.batches) * runtime.world.axis("dp").size)
        self._gradients = Accumulation(
            runtime,
            "step" if self._trains else "window",
            self._buffers,
            gathers_once=self._gathers_once,
            marks_parts=self._marks_parts,
        )
        self._buffers = self._gradients.buffers
        self._hook = None
        if runtime.step < _NUM_WINDOWS_CHECKED and shifts_labels(self.model):
            self._hook = self.model.register_forward_pre_hook(refuse_second_shift, with_kwargs=True)

    def _mark_tensors(self) -> None:
        """Notes versions and checksums that the end of the window compares with. Changes no tensor: the exchange that is under way may
        refuse the window."""
        self._first = written_state(self.runtime)
        self._buffers = BufferExchange(self.runtime)
        self._written = ParamWriteCheck(self.runtime)

    # ---- running ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        if not self.runtime.in_window:
            raise UsageError(
                "a window used outside its with block",
                why="tokens are counted when it is entered",
                fix="write `with sw.window(model, batches) as w:` and iterate over w inside",
            )
        if self._num_backwards:
            raise UsageError(
                "a window iterated twice",
                why="its gradients would count double",
                fix="iterate once; keep what you need of each micro-batch",
            )
        if not self._trains:
            self.runtime.refuse_own_loop()
        for i in range(len(self.batches)):
            yield self._begin_part(i, forward=True, backward=True)
            self._end_part(backward=True)

    @contextlib.contextmanager
    def part(self, i: int, *, forward: bool = False, backward: bool = False) -> Iterator[MicroBatch]:
        """The forward of micro-batch ``i``, its backward, or both: for a schedule (:mod:`shardwise.step.schedule`) that runs other
        micro-batches in between. Each has a forward and then a backward, in the same order on every rank. Within, random numbers are
        those of the micro-batch, and continue from where its forward has left them."""
        yield self._begin_part(i, forward=forward, backward=backward)
        self._end_part(backward=backward)

    def index(self, i: int) -> int:
        """The index of this rank's micro-batch ``i`` among those of all ranks."""
        return self._micro_batch(i).index

    def _micro_batch(self, i: int) -> MicroBatch:
        axis, given = self.runtime.world.axis("dp"), self.batches[i]
        return given if isinstance(given, MicroBatch) else MicroBatch(given, index=i * axis.size + axis.rank)

    def _begin_part(self, i: int, *, forward: bool, backward: bool) -> MicroBatch:
        """Sets up a micro-batch, or a part of it: random numbers (of torch, Python, numpy and the generators that modules keep) come
        from a stream seeded by (seed, step, global index), the same whichever rank runs it; a padding does not change
        sums or buffers."""
        runtime, world, batch = self.runtime, self.runtime.world, self._micro_batch(i)
        if backward:
            self._num_backwards += 1
            runtime.engine.set_last(self._num_backwards == len(self.batches))
        self._padding = batch.padding
        self._undo.enter_context(span("micro-batch", f"{batch.index}, a padding" if batch.padding else batch.index))
        self._undo.enter_context(not_counted(self._gradients, batch.padding, has_backward=backward))
        seed = derive_seed(world.seed, "forward", runtime.step, batch.index)
        if forward and backward:
            self._undo.enter_context(forked_streams(seed, world.device, runtime.generators))
        else:
            left = self._random_states.setdefault(i, {})
            self._undo.enter_context(continued_streams(left, seed, world.device, runtime.generators))
            runtime.engine.set_micro_batch(i)
            self._undo.callback(runtime.engine.set_micro_batch, None)
        self._undo.enter_context(self._buffers.watched())
        self._gradients.set_micro_batch(True)
        return batch

    def _end_part(self, *, backward: bool) -> None:
        """Ends a part of a micro-batch. Not a with block around the yield: an exception in the caller's loop would not close it."""
        self._undo.close()
        self._padding = False
        self._gradients.set_micro_batch(False)
        self._is_ended = self._is_ended or (backward and self._num_backwards == len(self.batches))

    # ---- leaving ---------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Sums the gradients over the ranks; those that came late, and of 0-dim parameters, follow in :meth:`finish`, which calls this if
        the caller did not. Call it first where ``entries`` are computed from gradients."""
        if not self._is_ended:
            raise UsageError(
                f"a window left after {self._num_backwards} of {len(self.batches)} micro-batches",
                why="gradients are reduced over the ranks at the last one, and other ranks wait for it",
                fix="let the schedule run the forward and the backward of each micro-batch"
                if self._trains
                else "write `for batch in w:` inside the with block, and let it run to the end; a loss over several models needs the "
                "window of one of them only",
            )
        if not self._is_complete:
            self._is_complete = True
            self._gradients.complete(self.place)

    def finish(self, entries: Mapping[str, Entry] | None = None) -> dict[str, Tensor]:
        """Runs the second exchange, which also sums the caller's ``entries`` (name -> number or tensor) over the ranks;
        gradients are final afterwards. Called once, after the last micro-batch; leaving the window calls it if the
        caller did not."""
        runtime = self.runtime
        self.complete()
        place, gradients = self.place, self._gradients
        self.agreed = runtime.world.agreement.sum(
            {
                **gradients.entries(is_idle=all(map(is_padding, self.batches))),
                "written": self._written.entry(),
                **self._counted_again,
                **(entries or {}),
            },
            f"{place}, before the step",
        )
        refuse_other_count(self.agreed, self._tokens, place)
        self._written.check(self.agreed["written"])
        self.has_late = gradients.agree(self.agreed, place)
        if self._trains and self._tokens and not float(self.agreed.get("problem", 0)):
            refuse_unused(runtime, self.agreed.get("used"))
        if not self._trains:
            self._loop.warn_of_window(self._gradients, self._tokens, self.place)
        gradients.end()
        runtime.step += 1
        mark_used(self.batches)
        runtime.reads_loader = any(getattr(batch, "window", None) is not None for batch in self.batches)
        runtime.leave()
        if not self._trains:
            self.agree_on_buffers(place)
        return self.agreed

    def agree_on_buffers(self, place: str) -> None:
        """Compares the buffers of all ranks, and makes equal what their policies say. Called once, after :meth:`finish`, which a
        window of the user's own loop does by itself; not for a window that is skipped."""
        assert self.agreed is not None
        self._buffers.apply(self.agreed, place)
        if self._first is not None:
            self._first.end()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._abandon()
            self._raise_translated(error)
            return
        try:
            if self.agreed is None:
                self.finish()
        except BaseException:
            self._abandon()
            raise
        self._gradients.close()
        self._unhook()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _raise_translated(self, error: BaseException) -> None:
        world = self.runtime.world
        if isinstance(error, ShardwiseError):
            return
        known = self.runtime.explain(error) or explain_no_gradient(self.runtime, error)
        if known is not None:
            raise known from error
        if world.size > 1 and is_lost_peer(error):
            raise world.agreement.explain(error, f"at {self.place}, forward or backward") from error

    def _abandon(self) -> None:
        self._unhook()
        self._loop.forget(self._count_of_tokens)
        self.runtime.leave()
        self._end_part(backward=False)
        self._gradients.abandon()


@public_call({"accumulation_steps": "the micro-batches of one optimizer step: sw.window(model, [batch, batch, ...])"})
def window(model: nn.Module, batches: Iterable[Batch], *, loss: Any = None, count: Any = None) -> Window:
    """Gradient accumulation for your own training loop: a context manager and iterator over one step's micro-batches;
    see :class:`Window`. All ranks must use it.

    Args:
        model: from ``parallelize``.
        batches: this rank's micro-batches (``str -> Tensor``); equally many on every rank.
        loss: optional; only its ``.count`` is used.
        count: ``count(batch)`` -> number of valid tokens; default: ``loss.count``, or of a
            :class:`~shardwise.step.loss.TaskModel` its loss's, else labels that are not -100.

    Raises:
        RankError: ranks have different numbers of micro-batches.
        UsageError: an empty window, a window inside a window.
        ConfigError: nothing says how many tokens a batch has.
    """
    return Window(model, batches, loss=loss, count=count)
