"""Token-weighted evaluation over all ranks, with unequal numbers of batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.config.keywords import public_call
from shardwise.data.batch import Place, is_padding
from shardwise.data.labels import compare_labels, judge_labels
from shardwise.data.loader import Loader, mark_used
from shardwise.errors import ConfigError, UsageError
from shardwise.model.calling import call
from shardwise.model.mode import eval_mode
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffer_errors import BEGIN
from shardwise.parallel.buffers import BufferExchange
from shardwise.step.argument_checks import refuse_torch_loss
from shardwise.step.equal_losses import entries_of_losses, refuse_other_losses
from shardwise.step.forward import sums_on
from shardwise.step.fused import fused_forward
from shardwise.step.loss import (
    Batch,
    Loss,
    as_micro_batches,
    counter_of,
    forward_of,
    next_token_loss,
    refuse_uncallable,
    with_count,
)
from shardwise.step.loss_check import LossCheck
from shardwise.step.no_gradient import refuse_autocast
from shardwise.step.own_collectives import NoOwnCollectives, none_over_copies
from shardwise.step.same_data import digest_of_dataset, other_datasets
from shardwise.step.step_state import StepState
from shardwise.world.rng import derive_seed, forked_streams


@public_call(
    {"criterion": "loss=", "loss_fn": "loss=", "dataloader": "the loader, by its place: sw.evaluate(model, loader)"}
)
def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: Loss | None = next_token_loss,
    count: Callable[[Batch], Any] | None = None,
    forward: Callable[..., Any] = call,
    fused: bool | str = False,
) -> dict[str, float]:
    """Evaluates the model: the loss summed over all ranks' batches, divided by all their valid tokens; equal on every
    rank.

    All ranks must call it. They may have different numbers of batches: under FSDP every forward is collective, so
    before each one the ranks exchange whether any has a batch left. A rank without one runs a copy that is not counted,
    and what it wrote is restored afterwards. Buffers that the model writes in eval mode are compared at the end, as
    after a window. Random numbers that a forward draws depend on the batch's place among all ranks' batches: batches of
    a :class:`Loader` are numbered over its windows without their paddings, others round robin over the ranks. They are
    the same in every evaluation and under every layout, and training draws the same numbers as it would without the
    evaluation.

    Args:
        model: from ``parallelize``; put in eval mode, and back afterwards.
        loader: yields micro-batches (``str -> Tensor``) or windows (lists of them, as :class:`Loader` does).
        loss, count, forward, fused: as :class:`~shardwise.step.step.TrainStep` takes them.

    Returns:
        ``{"loss": ..., "num_tokens": ..., other entries of the loss}``.

    Raises:
        UsageError: no rank has a batch; a batch is no mapping; a :class:`Loader` in the middle of an epoch.
        ConfigError: an entry of the loss is a mean; labels that are the inputs at their own places (see
            :mod:`shardwise.data.labels`).
        RankError: a rank does not take part: it has exited, or makes another call.
    """
    refuse_uncallable(loss=loss, count=count, forward=forward)
    refuse_torch_loss(loss)
    refuse_autocast(runtime_of(model), "an evaluation")
    counter = counter_of(model, loss, count)
    loss = with_count(loss, count)
    call_model = forward_of(loss, forward)
    if fused:
        loss, call_model = None, fused_forward(model, fused, loss, call_model)
    sums = _Sums(runtime_of(model), loss, counter, call_model)
    runtime = sums.runtime
    nested = runtime.in_window
    runtime.enter("sw.evaluate")
    try:
        with eval_mode(model):
            sums.run(loader)
            return sums.means()
    finally:
        if not nested:
            runtime.leave()


class _Sums:
    """The sums of the loss and its metrics over one rank's batches, and their means over all ranks."""

    def __init__(self, runtime: Runtime, loss: Loss | None, counter: Any, forward: Any):
        self.runtime, self.loss, self.counter, self.forward = runtime, loss, counter, forward
        self.totals: dict[str, Tensor] = {}
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._buffers, self._is_idle = BufferExchange(runtime), True
        self._check = LossCheck(runtime, loss, counter, forward, given=forward)
        self._last: Batch = {}

    def run(self, loader: Iterable[Any]) -> None:
        with torch.no_grad():
            mine = _flat(loader, self.runtime.world.axis("dp"))
            for item in _in_step(self.runtime, mine, self._check, self.counter, self._buffers):
                state = None if item.counts else self.runtime.module_state()
                if not item.counts:
                    no_collectives = NoOwnCollectives("a padding of an evaluation")
                else:
                    no_collectives = contextlib.nullcontext() if self.totals else none_over_copies(self.runtime)
                with no_collectives, self._streams(item.number):
                    self._add(item)
                if state is not None:
                    state.restore()

    def _streams(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Within: random numbers from a stream seeded by (seed, the batch's number among all ranks' batches), the same
        under every layout and in every evaluation. The training's streams do not advance."""
        world = self.runtime.world
        return forked_streams(derive_seed(world.seed, "evaluate", number), world.device, self.runtime.generators)

    def _add(self, item: "_Item") -> None:
        loss, check, batch, counts = self.loss, self._check, item.batch, item.counts
        self._last = batch
        if counts:  # first: what cannot be counted has no labels for a loss either
            self._is_idle = False
            self.tokens = self.tokens + torch.as_tensor(self.counter(batch), dtype=torch.float64)
        state = StepState.at(self.runtime.step, batch, item.number, is_training=False)
        output, sums = sums_on(self.runtime, self.forward, loss, batch, state)
        check.see(output, batch, sums, counts=counts)
        names = sorted(sums)
        check.agree(names, check.entries(names)["told"])  # with its own entry: the others learn of it in `means`
        for name, value in sums.items():
            value = value.double() if counts else torch.zeros_like(value, dtype=torch.float64)
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def means(self) -> dict[str, float]:
        """The means over all ranks. Also makes buffers equal, and raises a problem of any rank on all of them."""
        counts, counts_data = self.runtime.world.counts, self.runtime.world.counts_data
        agreed = self.runtime.world.agreement.sum(
            {
                "tokens": self.tokens if counts_data else 0,
                "unclear": self._check.entries([])["unclear"],
                **self._buffers.entries(is_idle=self._is_idle),
                **{f"sum of {name}": self.totals[name] * float(counts) for name in sorted(self.totals)},
                **entries_of_losses(self.runtime, self.totals),
            },
            "evaluation, adding up",
        )
        refuse_other_losses(self.runtime, agreed)
        self._buffers.apply(agreed, "an evaluation")
        if float(agreed["unclear"]):
            self._check.run([self._last], StepState(self.runtime.step, is_training=False))
        num_tokens = float(agreed["tokens"])
        if not num_tokens:
            raise UsageError(
                "an evaluation without a valid token",
                why="every label is ignored (-100), or every count is 0, and a loss of 0 would look perfect",
                fix="look at the labels, or at count=",
            )
        if "num_tokens" in self.totals:
            raise ConfigError(
                "a loss with an entry 'num_tokens' in sw.evaluate",
                why="its result has the number of valid tokens under that name, and one of the two would be lost",
                fix="give the entry another name",
            )
        means = {name: float(agreed[f"sum of {name}"]) / num_tokens for name in sorted(self.totals)}
        return {"loss": means.pop("loss"), "num_tokens": num_tokens, **means}


class _Item(NamedTuple):
    """A batch that this rank runs, whether its sums count, and its number among all ranks' batches (a copy has the
    number of its source)."""

    batch: Batch
    counts: bool
    number: int


def _flat(loader: Iterable[Any], axis: Any) -> Iterator[_Item]:
    numbers = _Numbers(axis)
    if isinstance(loader, Loader):
        loader.refuse_partial("sw.evaluate")
    for item in loader:
        batches = as_micro_batches([item] if isinstance(item, Mapping | Tensor) else item)
        mark_used(batches)
        for batch in batches:
            yield _Item(batch, not is_padding(batch), numbers.next(batch))


class _Numbers:
    """Numbers this rank's batches among those of all ranks, without communication: every rank has at least one batch of
    each window of a Loader, if only a padding. Batches that are not from a Loader are numbered round robin over the
    ranks."""

    def __init__(self, axis: Any):
        self._axis = axis
        self._round = 0  # batches of this rank so far, paddings included
        self._begin = self._end = 0  # range of numbers of the window (or the round) of the last batch
        self._last: tuple[Place, int] | None = None  # of the last batch of a Loader: its window, and its index there

    def next(self, batch: Batch) -> int:
        rank, size = self._axis.rank, self._axis.size
        this, self._round = self._round, self._round + 1
        place = getattr(batch, "window", None)
        num_micro = place.num_micro if isinstance(place, Place) else None
        if place is None or num_micro is None:
            self._end, self._last = self._round * size, None
            return this * size + rank
        index = getattr(batch, "index", 0)
        # A window may be given as a list, batch by batch, or twice in a row.
        if self._last is None or self._last[0] != place or self._last[1] >= index:
            self._begin, self._end = self._end, self._end + num_micro
        self._last = place, index
        if is_padding(batch):
            index = rank if rank < num_micro else 0  # of the batch that the Loader copied
        return self._begin + index


def _in_step(
    runtime: Runtime, batches: Iterator[_Item], check: LossCheck, counter: Any, buffers: BufferExchange
) -> Iterator[_Item]:
    """Yields batches until no rank has one left; a rank without one repeats its last batch, or one of another rank,
    uncounted. Before the first, ranks agree on ``buffers``. Calls ``check.begin`` before each. The check is due on all ranks or on none: once one rank has settled
    every entry, it ends on all."""
    agreement = runtime.world.agreement
    last: _Item | None = None
    window: tuple[Any] | None = None  # of this rank's last batch of its own; None: it had none
    seen: Tensor | None = torch.zeros(3)  # label comparison, separate from the training's: these are other data
    for i in itertools.count():
        item = next(batches, None)
        check.begin(i)
        window = window if item is None else (getattr(item.batch, "window", None),)
        have = agreement.sum(
            {
                "have": float(item is not None),
                "seen": float(last is not None or item is not None),
                "dataset": (*agreement.same(digest_of_dataset(*window)), 1.0) if window else (0.0,) * 7,
                "due": float(check.is_due),
                "labels": compare_labels(seen, [] if item is None else [item.batch], counter),
                **({} if i else buffers.entries(is_idle=False)),
            },
            "evaluation, a batch",
        )
        if not agreement.all_same(have["dataset"][:-1], int(have["dataset"][-1])):
            raise other_datasets(runtime, *(window or (None,)), "an evaluation")
        if not i:
            buffers.apply(have, f"{BEGIN} an evaluation")
        check.is_due = float(have["due"]) == runtime.world.size
        seen = judge_labels(seen, have["labels"], "in this evaluation")
        if not float(have["have"]):
            if last is None:
                raise UsageError(
                    "an evaluation without batches", why="no rank's loader gave one", fix="give the loader samples"
                )
            return
        if float(have["seen"]) < runtime.world.size:  # a rank that never had a batch needs one to run
            own = None if item is None else item._replace(batch=dict(item.batch))
            offered = agreement.gather(own and tuple(own), "evaluation, lending a batch")
            if last is None and item is None:
                lent = _Item(*next(other for other in offered if other is not None))
                last = lent._replace(batch={key: value.to(runtime.world.device) for key, value in lent.batch.items()})
        if item is not None:
            last = item
            yield item
        else:
            assert last is not None
            yield last._replace(counts=False)
