"""The gradients of one model from the first micro-batch of a window, or of ``accumulate``, until they are summed over the ranks."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from shardwise._torch.autograd import without_subclasses
from shardwise._torch.dtensor import local_tensor
from shardwise.errors import RankError, UsageError
from shardwise.parallel import Runtime
from shardwise.parallel.buffers import BufferExchange
from shardwise.parallel.named_gradients import OwnGradients
from shardwise.parallel.partial_sums import sum_partial
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.parallel.step_checks import end_clears, watch_clears
from shardwise.step.exchange import Exchange
from shardwise.step.grad_stash import GradStash
from shardwise.world.agreement import Entry

OTHERS, _PENALTIES = "gradients of other models", "penalties"  # entries of the exchange
_main: "weakref.WeakSet[Accumulation]" = weakref.WeakSet()  # that have not ended; not those of "another model"


class Accumulation:
    """Gradients of ``runtime``'s model that are accumulated, and summed over the ranks in the end, with those of the other models in use
    that a loss comes to: those are in no window of their own.

    Gradients from before stay in ``.grad`` until the first backward; they are put aside then, and added at the end.

    Args:
        runtime: of the model.
        of: see :class:`~shardwise.parallel.protocols.OpenGradients`.
        buffers: the buffers as they were before the first forward.
        gathers_once: no code of the user's runs between micro-batches that could write parameters.
        marks_parts: see ``Engine.begin``.
    """

    def __init__(
        self,
        runtime: Runtime,
        of: Literal["window", "step", "accumulate", "another model"],
        buffers: BufferExchange,
        *,
        gathers_once: bool = False,
        marks_parts: bool = True,
    ):
        self.runtime, self.of, self.buffers = runtime, of, buffers
        self.is_open, self.in_micro_batch, self.is_padding, self.has_others = True, False, False, False
        self.num_penalties = 0
        self._exchange: Exchange | None = None
        before, is_step = runtime.accumulation, of == "step"
        if isinstance(before, Accumulation) and before.has_gradients:
            # Of a loss in another model's window: both are summed together.
            _refuse_step_on_top(is_step)
            self.buffers, self._stash = before.buffers, before._stash
            runtime.engine.set_last(False)
        else:
            if isinstance(before, Accumulation):
                before.forget()
            # A loop of the user's own may write parameters in between, in ways that count in no version.
            runtime.engine.begin(reuses=is_step, gathers_once=gathers_once, marks_parts=marks_parts)
            self._stash = GradStash(runtime, waits=not is_step)
        runtime.accumulation = self
        watch_clears(runtime)
        self._others: list[Accumulation] = []
        # Name -> a gradient as the last backward has left it, and its version.
        self._left: dict[str, tuple[Tensor, int]] = {}
        self._norms: Tensor | None = None
        if of != "another model":
            _main.add(self)
            self._join(runtimes_in_use())

    @property
    def has_begun(self) -> bool:
        return self._stash.is_taken

    @property
    def has_gradients(self) -> bool:
        has_new = self.has_begun and any(param.grad is not None for param in self.runtime.parameters.values())
        return has_new or self.runtime.engine.has_gradients()

    @property
    def were_stepped(self) -> bool:
        """Whether an optimizer has stepped with gradients from before, which nothing has cleared since."""
        return self._stash.were_stepped()

    def _join(self, models: Iterable[Runtime]) -> None:
        """Begins the same for each other model of the world that is in no window, since a loss may come to it."""
        for other in models:
            is_free = other is not self.runtime and other.world is self.runtime.world and other.accumulation is None
            if is_free and any(param.requires_grad for param in other.parameters.values()):
                joined = Accumulation(other, "another model", BufferExchange(other))
                joined.is_open, joined.in_micro_batch = self.is_open, self.in_micro_batch
                self._others.append(joined)

    def open(self, is_open: bool) -> None:
        """Sets whether backwards may come to the parameters now."""
        for each in (self, *self._joined()):
            each.is_open = is_open

    def set_micro_batch(self, runs: bool) -> None:
        for each in (self, *self._joined()):
            each.in_micro_batch = runs

    def set_padding(self, padding: bool) -> None:
        """Sets whether gradients of the next backwards count as 0."""
        for each in (self, *self._joined()):
            each.is_padding = padding
            each.runtime.engine.set_padding(padding)

    def zero_grad(self, params: Mapping[int, object], set_to_none: bool) -> None:
        """``zero_grad()`` clears the gradients from before, as in one process. After a backward it would clear gradients of micro-batches,
        which FSDP2 does not show before they are summed."""
        runtime = self.runtime
        if not self._stash.is_taken:
            self._stash.clear(params)  # they are still where torch clears them
            return
        if runtime.engine.holds() or any(param.grad is not None for param in runtime.parameters.values()):
            raise UsageError(
                "zero_grad() inside a window, after a backward",
                why="it would drop gradients of the window's micro-batches, of which some wait to be summed over the ranks",
                fix="call it before the window, as its first line, or after optim.step()",
            )
        self._stash.zero(params, set_to_none)

    # ---- edits by hand ----------------------------------------------------------------------------------------------------

    def note_left(self) -> None:
        """Notes gradients as a backward has left them, once there are any of the window."""
        if not self.has_begun:
            return
        params = self.runtime.parameters.items()
        with self.runtime.torchs_classes():
            self._left = {
                name: (grad, local_tensor(grad)._version) for name, p in params if (grad := p.grad) is not None
            }
        # Kernels over lists of tensors, by which torch clips on a GPU, change no version.
        num = self.runtime.num_windows
        self._norms = None if num & (num - 1) else self._norms_of_left()

    def refuse_edited(self) -> None:
        """Raises UsageError where code of the user's has changed a gradient since the last backward: those of other micro-batches, and
        of other ranks, are not in it yet. A loop that has others from ``torch.autograd.grad`` may add them."""
        if not self._left or self.runtime.memory(OwnGradients).may_be_added:
            return
        params = self.runtime.parameters
        with self.runtime.torchs_classes():
            edited = [
                name
                for name, (grad, version) in self._left.items()
                if params[name].grad is not grad or local_tensor(grad)._version != version
            ]
        norms = None if edited or self._norms is None else self._norms_of_left()
        if norms is not None:
            same = torch.eq(self._norms, norms).tolist()  # type: ignore[arg-type]
            edited = [name for name, is_same in zip(self._left, same, strict=True) if not is_same]
        if edited:
            raise UsageError(
                "a gradient changed within a window, by clipping, scaling or clearing it after a backward",
                why="gradients are final when the window is left: until then those of other micro-batches, or of other ranks, are missing, and "
                "what follows is added to what was changed",
                fix="change gradients after the with block, once for all micro-batches: sw.clip_grad_norm_(model, 1.0). What belongs to a single "
                "micro-batch belongs into its loss, or into a hook of what the model computes",
                name=edited[0],
            )

    def _norms_of_left(self) -> Tensor | None:
        """The bits of this rank's norm of each of these gradients, on the device: a norm may be NaN."""
        local = [local_tensor(grad).detach() for grad, _ in self._left.values()]
        if not local or any(grad.layout != torch.strided for grad in local):
            return None
        with without_subclasses():
            return torch.stack([torch.linalg.vector_norm(grad).double() for grad in local]).view(torch.int64)

    # ---- the end: complete, entries, agree, end ---------------------------------------------------------------------------

    def complete(self, place: str) -> None:
        """Sums the gradients over the ranks, but for what :meth:`agree` adds."""
        self.refuse_edited()
        self._left = {}
        self._stash.take()
        self.runtime.engine.complete(place)
        sum_partial(self.runtime, place)

    def entries(self, *, is_idle: bool = False) -> dict[str, Entry]:
        """Entries of the exchange that follows. ``is_idle``: this rank ran paddings only."""
        self._exchange = Exchange(self.runtime)
        others = any(other.has_gradients for other in self._joined())
        return {
            **self._exchange.entries(),
            **self.buffers.entries(is_idle=is_idle),
            OTHERS: float(others),
            _PENALTIES: self.runtime.world.agreement.same(self.num_penalties),
        }

    def agree(self, summed: Mapping[str, Tensor], place: str) -> bool:
        """Completes the gradients by the sums of :meth:`entries`; those of other models too. Returns whether some came late, so that what
        was computed from them is to be computed again."""
        assert self._exchange is not None
        if not self.runtime.world.agreement.all_same(summed[_PENALTIES]):
            raise RankError(
                f"{self.num_penalties} calls of sw.parameter_penalty on this rank in {place}, and another number on others",
                why="each rank adds what it has of a penalty's gradient",
                fix="call it on all ranks, with the same penalty",
            )
        is_late = self._exchange.apply(summed, place)
        self.runtime.engine.end()
        if float(summed[OTHERS]):
            self._agree_on_others(place)
        return is_late

    def end(self) -> None:
        """Adds the gradients from before. They are final now; :meth:`abandon` still gives back what was there before, until
        :meth:`close`."""
        self._stash.add_back()
        self._leave()

    def close(self) -> None:
        """Frees the gradients from before. Called when buffers have been agreed on too."""
        self._stash.forget()
        self._join_again()

    def _agree_on_others(self, place: str) -> None:
        agreement = self.runtime.world.agreement
        by_number = {other.runtime.number: other for other in self._joined()}
        own = [number for number, other in by_number.items() if other.has_gradients]
        used = agreement.gather(own, f"{place}, naming the other models of the loss")
        for number in sorted({number for numbers in used for number in numbers}):
            if number not in by_number:
                raise RankError(
                    "a model in a loss on other ranks, which is not in use on this one",
                    why="its gradients are summed over all ranks, and this one has dropped it",
                    fix="keep every model of the loss on every rank",
                )
            other = by_number[number]
            other.runtime.check_unchanged()
            where = f"{place}, model {type(other.runtime.module).__name__} of the same loss"
            other.complete(where)
            summed = agreement.sum(other.entries(is_idle=number not in own), where)
            other.agree(summed, where)
            other.end()
            other.buffers.apply(summed, where)

    def _joined(self) -> list["Accumulation"]:
        """Those of other models that have not begun a window of their own since."""
        return [other for other in self._others if other.runtime.accumulation is other]

    # ----------------------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drops what was accumulated: gradients are what they were before."""
        for other in self._others:
            other.abandon()
        if self.runtime.accumulation is self:
            self.runtime.engine.abandon()
            self._leave()
        self._stash.put_back()
        if self.of != "another model":
            self._join_again()

    def _join_again(self) -> None:
        """Lets the windows of other models that surround this one take this model in again."""
        for main in list(_main):
            if main is not self:
                main._join([self.runtime])

    def forget(self) -> None:
        self.runtime.engine.end()
        self._stash.put_back()
        self._leave()

    def _leave(self) -> None:
        for other in self._joined():
            other.forget()
        if self.runtime.accumulation is self:
            self.runtime.accumulation = None
        end_clears(self.runtime)
        _main.discard(self)


def _refuse_step_on_top(is_step: bool) -> None:
    if is_step:
        raise UsageError(
            "a TrainStep of a model that has gradients of a loss in the window of another one",
            why="a TrainStep clips, checks and steps the gradients of its own window only",
            fix="leave the other model's window first, and step or clear what it has given",
        )
