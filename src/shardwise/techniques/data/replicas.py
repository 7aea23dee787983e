"""Replicated data parallelism (DDP): full copies, whose gradients are summed over the ranks, never averaged.

Gradients are all-reduced bucket by bucket while backward still runs: a hook on each parameter notices when its gradient
is ready, and a bucket is sent when all of its parameters have theirs. These rules make the sum right in every loop:

* Buckets are sent in one fixed order, from the last parameters to the first, and the last bucket only at the end. So
  ranks that used other parameters, or in another order, still send the same buckets; and a resumed run is bit-equal.
* A gradient moves into its bucket when it is sent. What a later backward adds (two losses, two forwards, a checkpoint
  that is recomputed, a parameter used outside forward) is then in ``.grad`` alone, and is sent after the rest.
* Which parameters were used, and which buckets have such late parts, is known to the host, and travels with what a
  window exchanges before the step anyway: nothing is read from the device for it. Outside of windows the last bucket
  carries it. A parameter that no rank used ends with ``grad is None``, as in one process.
* A backward outside a window that raised (a batch that was too large, and is skipped) is completed with zeros before
  the next one begins, marked as failed: ranks stay in step, and one whose own backward was complete gets an error.

torch's own reducer instead takes each forward of the root for one backward, and parameters outside that graph for
unused: two backwards in one micro-batch left gradients 0.5 off without an error, and a second model, an encoder called
by itself, or a loss on a block's attribute ended in errors.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch.autograd import PausableGradientHooks, RunningBackward, current_backward
from shardwise._torch.reads import on_host
from shardwise._torch.spans import span
from shardwise.errors import RankError, UnsupportedError
from shardwise.model import canonical_tensors
from shardwise.recipe import Recipe
from shardwise.techniques.data.buckets import Bucket, make_buckets
from shardwise.techniques.data.gradients import EndOfBackward, Padding, SetAsideGradients, add_to_gradient
from shardwise.techniques.data.options import DDP
from shardwise.techniques.data.penalties import PenaltyGradients, tolerance
from shardwise.techniques.data.rule import DataEntry
from shardwise.techniques.edges import calls
from shardwise.world import World

__all__ = ["DDPEngine", "apply_ddp"]


def apply_ddp(module: nn.Module, recipe: Recipe, world: World) -> "DDPEngine":
    """Makes ``module`` a replica, in place. Its tensors must have their values already."""
    first = {id(o._parameters[a]): o._parameters[a] for _, o, a in canonical_tensors(module, "_parameters")}
    trained = [param for param in first.values() if param is not None and param.requires_grad]
    engine = DDPEngine(trained, world, (recipe.entry("data", DataEntry).ddp or DDP()).bucket_cap_mb)
    if engine.buckets:
        engine.penalties.watch(module)
    return engine


class DDPEngine:
    """Sums the gradients of one replicated module over the ranks; see ``parallel.runtime.Engine``."""

    def __init__(self, params: list[nn.Parameter], world: World, bucket_cap_mb: float):
        self.params, self.world = params, world
        self._is_alone = world.axis("loss").size == 1 or not params
        self.buckets = [] if self._is_alone else make_buckets(params, int(bucket_cap_mb * 2**20))
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self._used = bytearray(len(params))
        self._running = RunningBackward()
        self._known: int | None = None  # a backward whose gradients are summed, whichever parameters it reaches
        self._unhooked: int | None = None  # the running backward, if its hooks before gradients are paused
        self._summed: set[int] = set()  # parameters whose .grad is a sum over the ranks already
        self._done = SetAsideGradients[int](params)  # such sums, set aside while new parts are summed
        self._late: dict[
            int, Tensor | None
        ] = {}  # of the window's buckets: what came after they were sent, on this rank
        self._told: tuple[bool, bytearray] | None = None  # of a summed window: gradients kept apart, parameters used
        self._flats: list[Tensor] = []  # of a summed window: what its gradients are views of
        self._ending = EndOfBackward()
        self._sync: bool | None = None  # the argument of set_sync
        self._in_window = False
        self.summed: Callable[[], None] = lambda: None  # called when a backward outside of windows was summed
        self.has_own = False
        self.penalties = PenaltyGradients(params, self._end_of_backward)
        self._padding = Padding(functools.partial(getattr, self.penalties, "has_reached"))
        self._expecting = PausableGradientHooks([], [])  # those that call _expect
        self._forget()
        if not self._is_alone:
            world.gradient_group()  # made now, because all ranks are here
            expecting = [param.register_hook(calls(self._expect, i)) for i, param in enumerate(params)]
            for i, param in enumerate(params):
                param.register_post_accumulate_grad_hook(self._when_arrived(i))
            if len({param.device for param in params}) == 1:
                self._expecting = PausableGradientHooks(params, expecting)

    # ---- called by a window ----------------------------------------------------------------------------------

    def begin(self, *, reuses: bool, gathers_once: bool) -> None:
        self._end_failed()
        self._drop()
        self._summed.clear()
        self.penalties.end_interrupted()
        self.penalties.take()
        if reuses:
            self.penalties.begin_step()
            if self.penalties.are_off:
                self._expecting.pause()
        self._in_window = True

    def own_backward(self) -> contextlib.AbstractContextManager[None]:
        return self.penalties.own_backward()

    def set_sync(self, sync: bool | None) -> None:
        self._sync = sync

    def set_micro_batch(self, micro_batch: int | None) -> None:
        pass  # whatever a backward reaches is summed

    def set_padding(self, padding: bool) -> None:
        self._padding.set(padding, self.params)

    def on_loose_sum(self, call: Callable[[], None]) -> None:
        self.summed = call

    def complete(self, place: str) -> None:
        self._sync = None
        if self._is_alone:
            return
        if not self._in_window or self._told is not None:
            self._complete_alone(place)
            return
        self._send_rest(is_told=False)
        self._wait(f"{place}, summing gradients")
        self._told = bool(self.penalties.parts), bytearray(self._used)
        late = [i for bucket in self.buckets if bucket.has_late_parts for i in bucket.members]
        self._late = {i: self._take(i) for i in late}
        self.has_own = self.has_own and not any(self._used)
        flats = [] if self._done.kept else [bucket.flat[: bucket.numel] for bucket in self.buckets]
        self._set_gradients([True] * len(self.params))
        self._flats = flats
        self._forget()

    def end(self) -> None:
        self._resume()  # after a backward that raised
        self.penalties.end_step()
        self._in_window, self._told, self._late, self._flats = False, None, {}, []

    def abandon(self) -> None:
        for bucket in self.buckets:
            bucket.settle()
        self.penalties.take()
        for i in self._unreduced():
            self.params[i].grad = None
        self._done.put_back(self._done.kept)
        self._drop()
        self._sync = None
        self.end()
        self._summed = set(range(len(self.params)))  # what was restored is a sum already

    def flat_gradients(self) -> Sequence[Tensor]:
        return self._flats

    def waits(self) -> bool:
        return bool(self._unreduced() or self.penalties.parts)

    def holds(self) -> bool:
        return self._num_sent > 0 or bool(self.penalties.parts)

    def used(self) -> Tensor | None:
        return None if self._told is None else torch.tensor(list(self._told[1]), dtype=torch.uint8)

    def late(self) -> Tensor | None:
        # Ranks along other axes may have other buckets, so that what is late is not told for each.
        return None if self._told is None else torch.tensor([self._told[0], bool(self._late)], dtype=torch.uint8)

    def add_late(self, late: Sequence[float], used: Sequence[float], place: str) -> None:
        any_penalties, any_late = late
        buckets = self.buckets if any_late else []
        for bucket, part in zip(buckets, self._late_sums(buckets, self._late, place), strict=True):
            for i, view in bucket.views_of(part).items():
                if used[i]:
                    add_to_gradient(self.params[i], view)
        if any_penalties:
            self._add_penalties(place)

    def entered(self) -> list[str]:
        return []

    def drop_gathered(self) -> None:
        pass  # parameters are full copies, with which forward computes

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def whole(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def explain(self, error: BaseException) -> None:
        return None

    # ---- while backward runs ---------------------------------------------------------------------------------

    def _expect(self, i: int) -> None:
        task = current_backward()
        if task != self._known:
            self._begin_or_keep_apart(i, task)
        elif i in self._summed:
            self._put_aside(i)

    def _begin_or_keep_apart(self, i: int, task: int) -> None:
        """For the first parameter that a backward reaches, and each one until it has reached the model itself."""
        if not self._running.accumulates(
            self.params[i]
        ):  # torch.autograd.grad runs this hook too, and leaves .grad alone
            # With create_graph the result is part of a loss, whose backward comes later.
            self.has_own = self.has_own or not torch.is_grad_enabled()
            return
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) on several ranks",
                why="gradients are summed over the ranks in place, and these would be part of a graph",
                fix="torch.autograd.grad(loss, x, create_graph=True) of what is differentiated again, and one backward() of the sum",
            )
        self._end_failed()
        if not self.penalties.before(i):
            self._put_aside(i)
            self._known = task
            if self._in_window and not self._summed and not self._expecting.is_paused:
                self._expecting.pause(self.params[i])  # those of the other parameters would do nothing until it ends

    def _end_of_backward(self, belonging: dict[int, Tensor], any_apart: bool) -> None:
        """The ``ended`` callback of :class:`PenaltyGradients`."""
        if not self.penalties.are_off:
            self._resume()
        for i, part in belonging.items():
            self._put_aside(i)
            add_to_gradient(self.params[i], torch.zeros_like(part) if self._padding.is_on else part)
            self._arrived(i)
        if any_apart and self._sync is None:
            self._complete_alone("a backward outside a window")

    def _resume(self) -> None:
        self._expecting.resume()
        self._unhooked = None

    def _when_arrived(self, i: int) -> Callable[[Tensor], None]:
        """The hook on parameter ``i`` for after its gradient was accumulated. It is called for each parameter in each micro-batch,
        and does itself what most calls need."""
        engine = weakref.ref(self)  # hooks live in C++, where a cycle through them is never freed

        def arrived(_param: Tensor) -> None:
            found = engine()
            if found is None:
                return
            if current_backward() != found._unhooked:
                found._arrived(i)
                return
            found._used[i] = 1
            if found._sync is not False:
                found._count(i)

        return arrived

    def _arrived(self, i: int) -> None:
        if self._expecting.is_paused:
            task = current_backward()
            if task != self._known:
                self.penalties.begun_unseen()
            self._known = self._unhooked = task
        if not self.penalties.after(i):
            self._count(i)

    def _count(self, i: int) -> None:
        """Counts a gradient that is to be summed over the ranks; sends the buckets that it completes."""
        bucket = self._bucket_of[i]
        self._used[i] = 1
        if self._sync is False:
            return
        if self._sync is None and not self._ending.is_due:
            self._ending.call(self._end_alone)
        if bucket.work is not None:
            bucket.has_late_parts = True
        else:
            bucket.missing.discard(i)
            if not bucket.missing:
                self._send_ready()

    def _unreduced(self) -> list[int]:
        """Indices of parameters with a gradient of this rank alone."""
        return [
            i for i, flag in enumerate(self._used) if flag and i not in self._summed and self.params[i].grad is not None
        ]

    def _end_alone(self) -> None:
        self._ending.forget()
        self._complete_alone("a backward outside a window")
        self.summed()

    def _end_failed(self) -> None:
        """Completes a backward that raised before its sums: sends zeros for the rest, and drops all gradients."""
        if not self._ending.was_dropped:
            return
        tail = [True, *self._flags(), *self._used]
        for bucket in self.buckets[self._num_sent :]:
            self._post(bucket, dict.fromkeys(bucket.members), tail)
        self._wait("after a backward that failed")
        self._drop()

    def _drop(self) -> None:
        self._done.clear()
        self._used = bytearray(len(self.params))
        self._forget()

    def _put_aside(self, i: int) -> None:
        """Sets a gradient that is a sum over the ranks aside, so that it is not summed again."""
        if i in self._summed:
            self._summed.discard(i)
            self._done.put(i)

    def _take(self, i: int) -> Tensor | None:
        """This rank's own part of a gradient; removes it from ``.grad``."""
        self._put_aside(i)
        grad, self.params[i].grad = self.params[i].grad, None
        return grad

    # ---- sending ---------------------------------------------------------------------------------------------

    def _send_ready(self) -> None:
        """Sends the complete buckets, in order; never the last one, which describes the whole pass."""
        while self._num_sent < len(self.buckets) - 1 and not self.buckets[self._num_sent].missing:
            bucket = self.buckets[self._num_sent]
            self._post(bucket, self._own_of(bucket))

    def _own_of(self, bucket: Bucket) -> dict[int, Tensor | None]:
        """This rank's gradients of a bucket; removes them from ``.grad``."""
        grads: dict[int, Tensor | None] = {}
        for i, param in bucket.members.items():
            if i in self._summed:
                self._put_aside(i)
            grads[i] = grad = param.grad
            if grad is not None:  # perhaps assigned by hand, which no hook notices
                self._used[i] = 1
                param.grad = None
        return grads

    def _post(self, bucket: Bucket, grads: Mapping[int, Tensor | None], tail: Sequence[int] | None = None) -> None:
        """Starts the sum of a bucket. The last one has room for a tail, which stays 0 where an exchange tells its content."""
        is_last = bucket is self.buckets[-1]
        with span("reduce bucket", self._num_sent):
            bucket.fill(grads, 2 + len(self.buckets) + len(self.params) if is_last else 0)
            if is_last and tail is not None:
                bucket.tail.copy_(torch.tensor(tail, dtype=torch.uint8))
            bucket.work = self._sum(bucket.flat)
        self._num_sent += 1

    def _flags(self) -> list[bool]:
        """Whether this rank has gradients that were kept apart, and late ones of each bucket."""
        return [bool(self.penalties.parts), *(bucket.has_late_parts for bucket in self.buckets)]

    def _sum(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self.world.gradient_group(), async_op=True)

    def _send_rest(self, *, is_told: bool) -> None:
        for bucket in self.buckets[self._num_sent :]:
            grads = self._own_of(bucket)
            self._post(bucket, grads, [False, *self._flags(), *self._used] if is_told else None)

    def _wait(self, place: str) -> None:
        self.world.agreement.carry_out(lambda: [bucket.work for bucket in self.buckets], place)

    def _complete_alone(self, place: str) -> None:
        """Sums the gradients where no exchange follows: what ranks must know of each other is read from the last bucket."""
        self._send_rest(is_told=True)
        self._wait(f"{place}, summing gradients")
        tail = on_host([self.buckets[-1].tail])[0]
        failed, flags, used = (piece.tolist() for piece in tail.split([1, 1 + len(self.buckets), len(self.params)]))
        if failed[0]:
            self._drop()
            raise RankError(
                f"{place}, which failed on other ranks",
                why="their gradients are missing in the sum",
                fix="see the error there; to skip a batch, all ranks must skip it",
            )
        late_buckets = [bucket for bucket, flag in zip(self.buckets, flags[1:], strict=True) if flag]
        late = {i: self._take(i) for bucket in late_buckets for i in bucket.members}
        for bucket, part in zip(late_buckets, self._late_sums(late_buckets, late, place), strict=True):
            bucket.flat[: len(part)] += part
        self.has_own = self.has_own and not any(used)
        self._set_gradients(used)
        apart = self._add_penalties(place) if flags[0] else set()
        self._forget()
        if self._told is not None:  # a backward after the last micro-batch of a window
            for i in {*apart, *(i for i, flag in enumerate(used) if flag)}:
                self._told[1][i] = 1

    def _late_sums(self, buckets: list[Bucket], late: Mapping[int, Tensor | None], place: str) -> list[Tensor]:
        """The sums over the ranks of what came after these buckets were sent, packed like them."""
        parts = [bucket.packed({i: late.get(i) for i in bucket.members}) for bucket in buckets]
        if parts:
            self.world.agreement.carry_out(
                lambda: [self._sum(part) for part in parts], f"{place}, summing late gradients"
            )
        return parts

    def _add_penalties(self, place: str) -> set[int]:
        """Adds the gradients that ranks have kept apart; counts them once where they are the same on all ranks. Returns the
        numbers of their parameters."""
        own, agreement = self.penalties.take(), self.world.agreement
        keys = agreement.gather([sorted(key) for key in own], f"{place}, naming parameters that backward came to alone")
        every_key = dict.fromkeys(tuple(each) for keys_of_rank in keys for each in keys_of_rank)
        for key in every_key:
            self._add_penalty(key, own.get(frozenset(key), {}), place)
        return {i for key in every_key for i in key}

    def _add_penalty(self, key: tuple[int, ...], own: Mapping[int, Tensor], place: str) -> None:
        size, agreement = self.world.axis("loss").size, self.world.agreement
        buckets = [bucket for bucket in self.buckets if any(i in bucket.members for i in key)]
        parts = [bucket.packed({i: own.get(i) for i in bucket.members}) for bucket in buckets]
        sums = [part.clone() for part in parts]
        agreement.carry_out(lambda: [self._sum(total) for total in sums], f"{place}, gradients of parameters alone")
        differs = False
        for bucket, part, total in zip(buckets, parts, sums, strict=True):
            whole = bucket.views_of(total)
            for i, view in bucket.views_of(part).items():
                penalties = (size * view - whole[i]).norm() > tolerance(view.dtype) * whole[i].norm()
                differs = differs or bool(penalties)
        found = agreement.sum({"differs": float(differs)}, f"{place}, comparing them")
        if not found["differs"]:
            self.penalties.refuse_doubt()
        for bucket, total in zip(buckets, sums, strict=True):
            for i, view in bucket.views_of(total).items():
                if i in key:
                    add_to_gradient(self.params[i], view.clone() if found["differs"] else view / size)

    def _set_gradients(self, used: Sequence[float]) -> None:
        kept, self._flats = self._done.kept, []
        for bucket in self.buckets:
            for i, grad in bucket.views().items():
                if kept and (done := kept.pop(i, None)) is not None:
                    self.params[i].grad = done.add_(grad) if used[i] else done
                else:
                    self.params[i].grad = grad if used[i] else None
        self._summed = set(range(len(self.params)))
        self._used = bytearray(len(self.params))

    def _forget(self) -> None:
        self._num_sent = 0
        self._ending.forget()
        for bucket in self.buckets:
            bucket.reset()
