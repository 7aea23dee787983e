"""Replicated data parallelism (DDP): full copies, whose gradients are summed over the ranks, never averaged.

Gradients are all-reduced bucket by bucket while the window's last backward still runs: a hook on each parameter notices when its
gradient is there, and a bucket is sent when all of its parameters have theirs. These rules make the sum right in every loop:

* Buckets are sent in one fixed order, from the last parameters to the first, and the last bucket only at the end. So
  ranks that used other parameters, or in another order, still send the same buckets; and a resumed run is bit-equal.
* A gradient moves into its bucket when it is sent. What a later backward adds (two losses, two forwards, a checkpoint
  that is recomputed, a parameter used outside forward) is then in ``.grad`` alone, and is sent after the rest.
* Which parameters were used, and whether there are such late gradients, is known to the host, and travels with what a
  window exchanges before the step anyway: nothing is read from the device for it. A parameter that no rank used ends with
  ``grad is None``, as in one process.

torch's own reducer instead takes each forward of the root for one backward, and parameters outside that graph for
unused: two backwards in one micro-batch left gradients 0.5 off without an error, and a second model, an encoder called
by itself, or a loss on a block's attribute ended in errors.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch.spans import span
from shardwise.model import canonical_tensors
from shardwise.recipe import Recipe
from shardwise.techniques.data.buckets import Bucket, make_buckets
from shardwise.techniques.data.gradients import Padding, State, add_to_gradient, outside_of_windows
from shardwise.techniques.data.options import DDP
from shardwise.techniques.data.outputs import OutputMarks
from shardwise.techniques.data.rule import DataEntry
from shardwise.world import World


def apply_ddp(module: nn.Module, recipe: Recipe, world: World) -> "DDPEngine":
    """Makes ``module`` a replica, in place. Its tensors must have their values already."""
    first = {id(o._parameters[a]): o._parameters[a] for _, o, a in canonical_tensors(module, "_parameters")}
    trained = [param for param in first.values() if param is not None and param.requires_grad]
    engine = DDPEngine(trained, world, (recipe.entry("data", DataEntry).ddp or DDP()).bucket_cap_mb)
    if world.size > 1:
        engine.marks = OutputMarks(module)
    return engine


class DDPEngine:
    """Sums the gradients of one replicated module over the ranks; see ``parallel.protocols.Engine``."""

    def __init__(self, params: list[nn.Parameter], world: World, bucket_cap_mb: float):
        self.params, self.world = params, world
        self._is_alone = world.axis("loss").size == 1 or not params
        self.buckets = [] if self._is_alone else make_buckets(params, int(bucket_cap_mb * 2**20))
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self._used = bytearray(len(params))
        self._late: dict[int, Tensor] = {}  # what came after its bucket was sent, on this rank
        self._flats: list[Tensor] = []  # of a summed window: what its gradients are views of
        self._state = State.OUTSIDE
        self.marks: OutputMarks | None = None  # None: one rank
        self._padding = Padding()
        self._forget()
        if not self._is_alone:
            world.gradient_group()  # made now, because all ranks are here
        for i, param in enumerate(params if world.size > 1 else ()):
            param.register_post_accumulate_grad_hook(self._when_arrived(i))

    # ---- called by a window ----------------------------------------------------------------------------------

    def begin(self, *, reuses: bool, gathers_once: bool, marks_parts: bool) -> None:
        self._used = bytearray(len(self.params))
        self._forget()
        self._state = State.KEPT
        if self.marks is not None:
            self.marks.begin(of_parts=marks_parts)

    @property
    def hides_outputs(self) -> bool:
        return self.marks is not None and self.marks.are_hidden

    def set_last(self, is_last: bool) -> None:
        self._state = State.SENT if is_last else State.KEPT

    def set_micro_batch(self, micro_batch: int | None) -> None:
        pass  # whatever a backward reaches is summed

    def set_padding(self, padding: bool) -> None:
        self._padding.set(padding, self.params)

    def note_added(self, params: Sequence[nn.Parameter]) -> None:
        numbers = {id(param): i for i, param in enumerate(self.params)}
        for param in params:
            self._count(numbers[id(param)])

    def complete(self, place: str) -> None:
        if not self._is_alone:
            for bucket in self.buckets[self._num_sent :]:
                self._post(bucket, self._own_of(bucket))
            self.world.agreement.carry_out(
                lambda: [bucket.work for bucket in self.buckets], f"{place}, summing gradients"
            )
            # What is there now came after its bucket was sent: from a later backward, or by hand.
            late = {i: self._take(i) for bucket in self.buckets for i in bucket.members}
            self._late = {i: grad for i, grad in late.items() if grad is not None}
            for i in self._late:
                self._used[i] = 1
            self._flats = [bucket.flat for bucket in self.buckets]
            for bucket in self.buckets:
                for i, grad in bucket.views().items():
                    self.params[i].grad = grad
            self._forget()
        self._state = State.SUMMED

    def end(self) -> None:
        self._state, self._late, self._flats = State.OUTSIDE, {}, []
        if self.marks is not None:
            self.marks.begin(of_parts=True)

    def abandon(self) -> None:
        for bucket in self.buckets:
            bucket.settle()
        self._forget()
        self.end()

    def flat_gradients(self) -> Sequence[Tensor]:
        return self._flats

    def holds(self) -> bool:
        return self._num_sent > 0

    def has_gradients(self) -> bool:
        return any(self._used)

    def used(self) -> Tensor | None:
        return None if self._is_alone else torch.tensor(list(self._used), dtype=torch.uint8)

    def late(self) -> Tensor | None:
        # One flag for all: ranks along other axes may have other buckets.
        return None if self._is_alone else torch.tensor([bool(self._late)], dtype=torch.uint8)

    def add_late(self, used: Sequence[float], place: str) -> None:
        parts = [bucket.packed({i: self._late.get(i) for i in bucket.members}) for bucket in self.buckets]
        self.world.agreement.carry_out(lambda: [self._sum(part) for part in parts], f"{place}, summing late gradients")
        for bucket, part in zip(self.buckets, parts, strict=True):
            for i, view in bucket.views_of(part).items():
                if used[i]:
                    add_to_gradient(self.params[i], view)

    def entered(self) -> list[str]:
        return []

    def drop_gathered(self) -> None:
        pass  # parameters are full copies, with which forward computes

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def watch_writes(self, compares: bool) -> None:
        pass  # none is lost

    def lost_writes(self) -> list[Tensor]:
        return []

    def whole(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def explain(self, error: BaseException) -> None:
        return None

    # ---- while backward runs ---------------------------------------------------------------------------------

    def _when_arrived(self, i: int) -> Callable[[Tensor], None]:
        """The hook on parameter ``i`` for after its gradient was accumulated. It is called for each parameter in each micro-batch."""
        engine = weakref.ref(self)  # hooks live in C++, where a cycle through them is never freed

        def arrived(_param: Tensor) -> None:
            found = engine()
            if found is not None:
                found._used[i] = 1
                if found._state is not State.KEPT:
                    found._count(i)

        return arrived

    def _count(self, i: int) -> None:
        """Counts a gradient in ``.grad``; sends the buckets that it completes."""
        self._used[i] = 1
        if self._state is State.OUTSIDE:
            raise outside_of_windows(self.world.axis("loss").size)
        if self._state is not State.SENT or self._is_alone:
            return
        bucket = self._bucket_of[i]
        bucket.missing.discard(i)
        if bucket.work is None and not bucket.missing:
            self._send_ready()

    def _take(self, i: int) -> Tensor | None:
        """This rank's own part of a gradient; removes it from ``.grad``."""
        grad, self.params[i].grad = self.params[i].grad, None
        return grad

    # ---- sending ---------------------------------------------------------------------------------------------

    def _send_ready(self) -> None:
        """Sends the complete buckets, in order. The last one waits for the end: in a model of one bucket, what a second backward adds is
        in time then."""
        while self._num_sent < len(self.buckets) - 1 and not self.buckets[self._num_sent].missing:
            bucket = self.buckets[self._num_sent]
            self._post(bucket, self._own_of(bucket))

    def _own_of(self, bucket: Bucket) -> dict[int, Tensor | None]:
        """This rank's gradients of a bucket; removes them from ``.grad``."""
        grads = {i: self._take(i) for i in bucket.members}
        for i, grad in grads.items():
            if grad is not None:  # perhaps assigned by hand, which no hook notices
                self._used[i] = 1
        return grads

    def _post(self, bucket: Bucket, grads: Mapping[int, Tensor | None]) -> None:
        with span("reduce bucket", self._num_sent):
            bucket.fill(grads)
            bucket.work = self._sum(bucket.flat)
        self._num_sent += 1

    def _sum(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self.world.gradient_group(), async_op=True)

    def _forget(self) -> None:
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.reset()
