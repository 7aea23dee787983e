"""When the units of a sharded model are gathered, freed and reduced: driven by what runs, in one order on every rank.

*Forward.* The root's parameters are gathered when the model is called, a unit's when one of its modules is. A unit is
freed when all of its modules have run, or another unit is entered. When a forward has returned, the modules hold the
shards again, the objects that the user knows; gathered memory may be kept for backward. A forward without gradients
leaves nothing gathered.

*Backward.* A unit's turn begins when a gradient reaches an output of one of its modules, or one of its parameters,
whatever the forward returned and wherever the loss was taken from. It ends, with the reduce-scatter of its gradients,
when the gradient has reached the unit's inputs, or another unit's turn begins. The root's turn is the whole backward.

A rank that skips a unit still takes part in its collectives: see :mod:`shardwise.techniques.data.walk`. There is one
order per situation: forward with gradients, forward without, and backward by the number of forwards since the last one.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import Backward as RunBackward
from shardwise._torch.autograd import before_backward, current_backward, freed_leaf, in_backward, marks_of
from shardwise._torch.fsdp2 import Unit, when_interrupted
from shardwise._torch.fully_shard import reset_iteration
from shardwise.errors import UnsupportedError
from shardwise.model.attend import beside_code
from shardwise.techniques.data.explain import ungathered
from shardwise.techniques.data.gradients import EndOfBackward
from shardwise.techniques.data.passes import Backward, Forward, Units, refuse_written
from shardwise.techniques.data.walk import Orders, Walk
from shardwise.techniques.edges import Inputs, hand_out, refuse_changed
from shardwise.world import World


class Listener(Protocol):
    """Callbacks of the engine, called by :class:`Order` on this rank."""

    def begins_backward(self) -> None:
        """A backward has reached the model."""

    def loses_backward(self) -> None:
        """A backward that has reached the model raised: its gradients, and those that waited to be reduced with them,
        are dropped."""

    def takes(self, unit: Unit, *, backward: bool) -> None:
        """``unit`` was gathered in a forward, or is about to be reduced in a backward."""


_in_use: "weakref.WeakSet[Order]" = weakref.WeakSet()


def _refuse_from_inside(backward: RunBackward) -> None:
    """Raises UnsupportedError for a backward that comes to a unit's parameters past none of its outputs, at which it would be gathered:
    kernels read freed memory without a check, which ends the process. Where a unit's output is passed too, that comes first."""
    leaf = freed_leaf(backward.outputs)
    if leaf is None:
        return
    for unit in [unit for order in _in_use for unit in order.units.all()]:
        if any(whole is leaf for whole, _ in unit.gathered()) and id(unit) not in marks_of(backward.outputs):
            raise ungathered(unit.name or None)


class Order:
    """Gathers, frees and reduces the units of one sharded model, by hooks on its modules."""

    def __init__(self, module: nn.Module, units: Units, world: World, listener: Listener):
        self.module, self.units, self.world = module, units, world
        self._listener = listener
        self._orders = Orders(len(units.inner), world)
        self._is_held = self._shows_running = False
        # Of the next forwards and backwards, where those of several are interleaved.
        self.micro_batch: int | None = None
        self._num_forwards: dict[int | None, int] = {}  # micro-batch -> forwards with gradients since its last backward
        self._root_version = -1  # version of the root's shards when they were gathered
        self._forget()
        _in_use.add(self)
        before_backward(_refuse_from_inside)
        when_interrupted(module, self._leave_interrupted)
        module.register_forward_pre_hook(self._before_root, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after_root, always_call=True)
        for number, unit in enumerate(units.inner):
            for target in unit.modules:
                target.register_forward_pre_hook(
                    functools.partial(self._before, number), with_kwargs=True, prepend=True
                )
                target.register_forward_hook(functools.partial(self._after, number), always_call=True)
                when_interrupted(target, self._leave_interrupted)

    def _forget(self) -> None:
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        self._backward_number: int | None = None  # of the running backward, as ``current_backward`` gives it
        self._ending = EndOfBackward()
        self._nested = 0  # calls of the root inside a forward or a backward of it
        self._caught: BaseException | None = None  # an exception that the caller of the forward is handling
        self._inputs: list[tuple[nn.Module, Inputs]] = []  # of the calls of units' modules that run
        self._set_running(False)
        self._direct: nn.Module | None = None  # a unit's module that was called by itself

    def _set_running(self, runs: bool) -> None:
        """Makes the modules of units show the dtypes that a forward computes in, while one runs."""
        if self._shows_running != runs:
            self._shows_running = runs
            for unit in self.units.inner:
                unit.run(runs)

    # ---- for the engine --------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Forgets unfinished forwards and an unfinished backward. All ranks must call it."""
        self._forget()
        self._num_forwards = {}
        reset_iteration(self.module)
        for unit in self.units.all():
            unit.show_shards()
            unit.drop_gradients()
        self.units.kept.clear()

    def free(self) -> None:
        """Frees all gathered parameters. All ranks must call it."""
        for unit in self.units.all():
            unit.free()

    def reuse(self, keep: bool, *, root: bool) -> None:
        """Sets whether parameters that are whole are cast once, and with ``root`` those of the root gathered once, not for
        each forward and backward. Ranks may skip other units, and then have them gathered at other times."""
        self.units.root.reuse(keep, gathered=root)
        for unit in self.units.inner:
            unit.reuse(keep, gathered=False)

    def look(self) -> None:
        """Notices a backward that raised, if nothing has run since, and calls the listener."""
        self._runs_backward()

    def flush(self) -> None:
        """Reduces what earlier backwards accumulated. All ranks must call it, outside of forwards and backwards."""
        self._reduce_rest(())

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context manager: every parameter is gathered, and the modules hold the full ones. All ranks enter and leave
        it together; forwards inside it gather nothing, so each rank may run as many as it likes."""
        if self._is_held:
            yield
            return
        try:
            for number, unit in self.units.numbered():
                unit.free()
                unit.gather()
                unit.keep_whole(True)
                self._hook_gradients(number)
            self._is_held = True
            yield
        finally:
            self._is_held = False
            for unit in self.units.all():
                unit.keep_whole(False)
                unit.free()

    def gathers(self, number: int | None) -> Callable[[nn.Module], None]:
        """A function to call for a module inside a unit (None: the root) that runs and finds shards. This happens if
        another method of the unit was called than its forward, or if the module is recomputed in a backward, or runs
        after the model's forward (which returned a closure or a generator)."""
        order = weakref.ref(self)

        def gather(module: nn.Module) -> None:
            found = order()
            if found is None:
                return
            if found._forward is not None and number is not None:
                found._enter_part(number)
            elif in_backward():
                found._reach(number)
            elif number is None and found._num_forwards and found._root_version == found.units.root.version():
                found.units.root.lend(module)

        return gather

    # ---- forward ---------------------------------------------------------------------------------------------

    @beside_code
    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._forward is not None or self._runs_backward():
            self._nested += 1
            return None
        args, kwargs = self._begin_forward(self._orders.walk(_forward(), self._pass_forward), module, args, kwargs)
        if not self._is_held:
            self.units.begin_forward()
            self._root_version = self.units.root.version()
            self._listener.takes(self.units.root, backward=False)
            self._hook_gradients(None)
        return args, kwargs

    def _begin_forward(self, walk: Walk, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._caught = sys.exc_info()[1]
        self._forward = Forward(self.units, None if self._is_held else walk)
        self._set_running(not self._is_held)
        return self.units.root.prepare(module, args, kwargs)

    @beside_code
    def _after_root(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._nested:
            self._nested -= 1
            return None
        if self._forward is None:
            return None
        if self._has_failed(output):
            self._leave_failed()
            return None
        try:
            if torch.is_grad_enabled():
                refuse_changed(self._forward.views)
                output, _ = hand_out(output, self._reached(None), [], self._refuse_graph(None))
            self._end_forward()
        except BaseException:
            self._leave_failed()
            raise
        return output

    def _end_forward(self) -> None:
        forward = self._forward
        assert forward is not None
        forward.end()
        self._forward = self._caught = None
        if forward.walk is not None:
            if forward.walk.has_agreed:
                self.units.spanning |= self._orders.of_any_rank(forward.resumed)
            self._orders.learn(_forward(), forward.walk, range(len(self.units.inner)), self.units.spanning)
            self.units.end_forward(with_gradients=forward.has_gradients)
            # Forwards inside ``whole`` do not count: each rank runs as many of them as it likes.
            self._num_forwards[self.micro_batch] = self._num_forwards.get(self.micro_batch, 0) + forward.has_gradients
            self._set_running(False)

    @beside_code
    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._forward is None and (self._runs_backward() or in_backward()):
            self._reach(number)  # a checkpoint recomputes it
            return None
        if self._forward is None:
            args, kwargs = self._begin_forward(self._orders.alone(number, self._pass_forward), module, args, kwargs)
            self._direct = module
            if not self._is_held:
                self.units.begin_alone(number)
        forward = self._forward
        assert forward is not None
        inputs = Inputs((args, kwargs))
        self._inputs.append((module, inputs))
        if not forward.enter(number, module):
            return args, kwargs
        if not self._is_held:
            self._listener.takes(self.units.inner[number], backward=False)
        self._hook_gradients(number)
        return inputs.when_left(self._left(number)) if forward.is_watched(number) else (args, kwargs)

    @beside_code
    def _enter_part(self, number: int) -> None:
        """Gathers a unit whose forward was not called. No hook sees when the method returns, or what: the unit stays
        gathered until another unit is, and for its backward."""
        forward = self._forward
        assert forward is not None
        if not forward.enter_part(number):
            return
        if not self._is_held:
            self._listener.takes(self.units.inner[number], backward=False)
            if torch.is_grad_enabled():
                self.units.kept.add(number)
        self._hook_gradients(number)

    @beside_code
    def _after(self, number: int, module: nn.Module, _args: Any, output: Any) -> Any:
        forward = self._forward
        if forward is None and torch.is_grad_enabled() and self._runs_backward() and not self._has_failed(output):
            # It was recomputed: a backward of this run may follow.
            output, _ = hand_out(output, self._reached(number), [])
            return output
        if forward is None or not forward.is_inside(number):
            return None
        has_failed = self._has_failed(output)
        inputs = self._inputs_of(module)
        if inputs is not None:
            inputs.undo()
        if has_failed and self._direct is module:
            self._leave_failed()
            return None
        if torch.is_grad_enabled() and not has_failed:
            if inputs is not None:
                inputs.hand_out(self._reached(number), forward.views)
            output, hides = hand_out(output, self._reached(number), forward.views, self._refuse_graph(number))
            if hides and not self._is_held:
                self.units.kept.add(number)
        forward.leave(number, module)
        if self._direct is module:
            self._direct = None
            self._end_forward()
        return output

    def _inputs_of(self, module: nn.Module) -> Inputs | None:
        """What the call of ``module`` that ends now was given; drops that of calls within it whose end was not seen."""
        while self._inputs:
            other, inputs = self._inputs.pop()
            if other is module:
                return inputs
            inputs.undo()
        return None

    def _leave_failed(self) -> None:
        """Cleans up after a forward that raised. A caller may catch the error and continue: gradients of earlier
        micro-batches stay."""
        self._forget()
        reset_iteration(self.module)
        if not self._is_held:
            self.free()
            self.units.kept.clear()

    def _leave_interrupted(self) -> None:
        if self._forward is not None:
            self._leave_failed()

    def _has_failed(self, output: Any) -> bool:
        """Whether an ``always_call`` hook was called for a forward that raised."""
        error = sys.exc_info()[1]
        return output is None and error is not None and error is not self._caught

    def _pass_forward(self, number: int) -> None:
        """Gathers and frees a unit that this rank skips in forward."""
        assert self._forward is not None
        self._forward.skip(number)
        self._listener.takes(self.units.inner[number], backward=False)

    # ---- backward --------------------------------------------------------------------------------------------

    def _reached(self, number: int | None) -> Callable[[Tensor], None]:
        """A hook on an output of a unit (None: the root). The graph of the forward holds it, and it holds the model."""
        unit = self.units.unit(number)
        version = unit.version()

        def hook(_grad: Tensor) -> None:
            refuse_written(unit, version)
            self._reach(number)

        hook.of = id(unit)  # type: ignore[attr-defined]
        return hook

    def _refuse_graph(self, number: int | None) -> Callable[[Any], None] | None:
        """A hook on what has made an output of a unit, which refuses a backward that makes a graph of itself: to differentiate that, torch
        would read the memory of parameters that are freed by then, for most layers without a check."""
        name = self.units.unit(number).name or None

        def refuse(_grads: Any) -> None:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "a gradient of a gradient (create_graph=True) through a module whose parameters are cut",
                    why="its parameters are gathered for one backward and freed when that ends: a second one through it would find none",
                    fix='keep the parameters whole on every rank: sw.init("dp_replicate=-1")',
                    name=name,
                )

        return None if self._is_held else refuse

    def _left(self, number: int) -> Callable[[], None]:
        def call() -> None:
            if self._runs_backward() and self._backward is not None:
                self._backward.leave(number)

        return call

    def _hook_gradients(self, number: int | None) -> None:
        """Registers hooks on a unit's gathered parameters. They do not hold the model: hooks are held in C++."""
        order = weakref.ref(self)

        def hook(_param: Tensor) -> None:
            found = order()
            # The root's turn is the whole backward: its later gradients start nothing.
            if found is not None and (number is not None or found._backward_number != current_backward()):
                found._reach(number)

        unit = self.units.unit(number)
        unit.hook_gradients(lambda: hook)

    def _reach(self, number: int | None) -> None:
        """Called when a backward has reached a unit (None: the root)."""
        if not self._runs_backward():
            self._begin_backward(number)
        if number is not None:
            assert self._backward is not None
            self._backward.reach(number)

    def _runs_backward(self) -> bool:
        """Whether a backward has reached the model and has not ended; forgets one that raised."""
        if self._backward is None:
            return False
        if self._ending.is_due:
            return True
        self._listener.loses_backward()
        self.abandon()
        return False

    def _begin_backward(self, number: int | None) -> None:
        if self._forward is not None:
            unit = self.units.unit(number)
            raise UnsupportedError(
                "a gradient taken inside the model's own forward",
                why="a unit's parameters are freed when its backward ends, and here forward still needs them",
                fix='keep the parameters whole on every rank: sw.init("dp_replicate=-1")',
                name=unit.name or None,
            )
        self._refuse_kept_by_others()
        self._ending.call(self._end_backward)
        self._backward_number = current_backward()
        self._backward = Backward(
            self.units, self._orders.walk(self._situation(), self._pass_backward), self._reduce, self._hook_gradients
        )
        self._listener.begins_backward()
        self._backward.begin()

    def _refuse_kept_by_others(self) -> None:
        """A backward frees all units. Those whose outputs hide tensors stay gathered for it, as no hook shows where to gather them again:
        one of another micro-batch would read freed memory."""
        others = [forwards for at, forwards in self._num_forwards.items() if at != self.micro_batch]
        if self.units.kept and any(others):
            raise UnsupportedError(
                "a backward between the forward and the backward of another micro-batch",
                why="a block returns what hides its tensors (an object, a closure), so that it stays gathered until its backward, and this "
                "one would free it",
                fix='let the block return tensors; or keep the parameters whole on every rank: sw.init("dp_replicate=-1")',
                name=self.units.inner[min(self.units.kept)].name,
            )

    def _end_backward(self) -> None:
        backward = self._backward
        if backward is None:
            return
        backward.end()
        self._orders.learn(self._situation(), backward.walk, self._backward_reference(), self.units.spanning)
        self._reduce_rest(set(backward.walk.taken) - backward.spanned)
        self._ending.forget()
        self._backward, self._backward_number = None, None
        self._num_forwards.pop(self.micro_batch, None)

    def _situation(self) -> str:
        return f"backward {self._num_forwards.get(self.micro_batch, 0)}"

    def _pass_backward(self, number: int) -> None:
        assert self._backward is not None
        self._backward.skip(number)

    def _reduce(self, number: int) -> None:
        unit = self.units.inner[number]
        self._listener.takes(unit, backward=True)
        unit.reduce()

    def _reduce_rest(self, done: Collection[int]) -> None:
        """Ends a backward: also reduces units without a turn, which may have gradients of earlier micro-batches."""
        for number in reversed(range(len(self.units.inner))):
            if number not in done and self.units.inner[number].is_trained:
                self._reduce(number)
        root = self.units.root
        self._listener.takes(root, backward=True)
        root.reduce()
        self.units.end_backward()

    def _backward_reference(self) -> list[int]:
        seen = dict.fromkeys(reversed(self._orders.forward() or range(len(self.units.inner))))
        return [number for number in seen if self.units.inner[number].is_trained]


def _forward() -> str:
    return "forward" if torch.is_grad_enabled() else "forward without gradients"
