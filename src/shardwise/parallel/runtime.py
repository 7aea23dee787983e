"""The run-time object of a sharded module: its recipe, its world, and its data-parallel engine."""

import contextlib
import copy
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import PlanError, ShardwiseError, UnsupportedError, UsageError
from shardwise.layout import Coord
from shardwise.model import canonical_modules, dtype_name
from shardwise.model.module_state import ModuleState
from shardwise.model.own_state import OwnState
from shardwise.model.tensors import like_parameter, loose_tensors, tensors_of
from shardwise.parallel.stale import ModuleSnapshot
from shardwise.recipe import RankView, Recipe, Slice, extents
from shardwise.techniques.data.rule import DataEntry
from shardwise.world import World, is_generator
from shardwise.world.agreement import Scope
from shardwise.world.axis import Axis

_KEY = "_shardwise_runtime"  # in the module's __dict__: neither a child, a parameter nor a buffer
# By their number, so that all ranks have them in one order; not of parameters: module.to could not swap them then.
_in_use: "weakref.WeakValueDictionary[int, Runtime]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_num_models: "weakref.WeakKeyDictionary[World, int]" = weakref.WeakKeyDictionary()


class Engine(Protocol):
    """What a data-parallel engine (DDP, FSDP2) does during training."""

    @property
    def hides_outputs(self) -> bool:
        """Whether the model was compiled as a whole, so that its graph has no marks of outputs."""

    def begin(self, *, reuses: bool, gathers_once: bool, marks_parts: bool) -> None:
        """Called when a window starts; backwards may come to parameters until :meth:`end`. ``reuses``: nothing writes parameters between
        its micro-batches, so that where they are whole they are cast once (a ``TrainStep``). ``gathers_once``: and those of the root are
        gathered once. ``marks_parts``: outputs of the model's parts show in the graph too, not only the model's own."""

    def set_last(self, is_last: bool) -> None:
        """Sets whether the next backward is of the window's last micro-batch: gradients may be summed over the ranks from then on."""

    def set_micro_batch(self, micro_batch: int | None) -> None:
        """Sets which micro-batch the next forward or backward is of, where others run between the two; None: the last one that began,
        or none."""

    def set_padding(self, padding: bool) -> None:
        """Sets whether gradients of the next backwards count as 0: of a micro-batch that exists only as padding."""

    def note_added(self, params: Sequence[nn.Parameter]) -> None:
        """Called after something was added to the gradients of ``params`` in a window, by no backward."""

    def complete(self, place: str) -> None:
        """Called after the last backward of a window: sums its gradients over the ranks. Those that :meth:`late` has flags of, and what
        :meth:`used` says, follow in the next exchange. ``place`` is for messages."""

    def used(self) -> Tensor | None:
        """uint8 flag per trainable parameter, in the order of ``Runtime.trainable``: it got a gradient on this rank
        since :meth:`begin`. None: gradients are not summed over ranks, and unused ones are None already."""

    def late(self) -> Tensor | None:
        """A uint8 flag: this rank has gradients that came after the others of a window were sent, and :meth:`complete` did not sum.
        None: there never are any."""

    def flat_gradients(self) -> Sequence[Tensor]:
        """Between :meth:`complete` and :meth:`end`: flat tensors of which all gradients are views, and which have zeros where a
        parameter is unused. Empty: there are none."""

    def add_late(self, used: Sequence[float], place: str) -> None:
        """Adds the sums over the ranks of such gradients to ``.grad``. ``used``: how many ranks set each flag of :meth:`used`."""

    def entered(self) -> list[str]:
        """Units entered since :meth:`begin`, in order: they must be the same on every rank, or collectives mismatch."""

    def has_gradients(self) -> bool:
        """Whether a backward has come to parameters on this rank since :meth:`begin`."""

    def holds(self) -> bool:
        """Whether there are gradients of this window that are not in ``.grad``."""

    def end(self) -> None:
        """Called when a window has ended: ranks have exchanged the results of :meth:`used` and :meth:`entered`."""

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for an error of torch, if its cause is known; else None."""

    def abandon(self) -> None:
        """Called when a window ended in an exception: forgets its unfinished work."""

    def drop_gathered(self) -> None:
        """Called before shards are written: gathered parameters left by a forward must not be used again."""

    def gathered(self) -> Sequence[tuple[Tensor, Tensor]]:
        """``(what forward computes with, parameter)`` of each parameter that it computes with a gathered copy of, as far
        as there is one."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the modules hold full parameters, and forwards gather nothing. All ranks enter and leave it
        together."""


class OpenGradients(Protocol):
    """Gradients of a model that are not final yet: :class:`shardwise.step.accumulation.Accumulation`.

    Attributes:
        of: what they are of: a window, of a loop or of a ``TrainStep``, micro-batches of ``accumulate``, or either of another model.
        is_open: whether a backward may come to the parameters now.
        in_micro_batch: whether a micro-batch of a window runs.
        is_padding: whether gradients of the next backwards count as 0.
        num_penalties: how often a penalty was added.
        has_begun: whether a backward has run since they were opened.
        has_others: whether a backward has come to this model, or another open one, that was not a ``TrainStep``'s own.
    """

    of: Literal["window", "step", "accumulate", "another model"]
    is_open: bool
    in_micro_batch: bool
    is_padding: bool
    num_penalties: int
    has_others: bool

    @property
    def has_begun(self) -> bool: ...

    def zero_grad(self, params: Mapping[int, Any], set_to_none: bool) -> None:
        """Called before ``zero_grad()``, with the parameters (by id), and whether gradients become None."""


class Pending(Protocol):
    """The source of values of a model that waits to be loaded, for the tensors that loading does not bring."""

    def write_rest(self, runtime: "Runtime", local: Mapping[str, Tensor]) -> None:
        """Writes these tensors: canonical name -> this rank's part of it."""


class ShownClasses(Protocol):
    """The parameters of which a rank has plain parts: while the user's code runs their classes refuse to give numbers of
    a part."""

    def torchs(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: parameters have torch's own classes, of which attributes are read in less time."""

    def stepping(self, optim: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Context manager: an optimizer steps. Its state refuses too afterwards."""

    def mark_state(self, optim: torch.optim.Optimizer) -> None:
        """Makes the state of an optimizer refuse, where it is of parts. Called when it was loaded."""


class Runtime:
    """What Shardwise knows about one sharded module on this rank."""

    def __init__(self, module: nn.Module, recipe: Recipe, world: World, engine: Engine):
        self.module, self.recipe, self.world, self.engine = module, recipe, world, engine
        self.view: RankView = recipe.at(world.rank)
        # The ranks that hold the same units, which they must enter in one order: those of one stage.
        staged = {cut.axis for param in recipe.params.values() for cut in param.cuts if cut.holder is not None}
        self.same_units = Scope.of(self.view.coord, sorted(staged))
        self.parameters: dict[str, nn.Parameter] = tensors_of(module, "_parameters")  # type: ignore[assignment]
        self.trainable = [name for name, param in recipe.params.items() if param.trainable]
        # Parameters, gradients and optimizer state are in host memory.
        self.offloads = recipe.entry("data", DataEntry).offload
        self.replicated = [n for n in self.trainable if recipe.is_cut and recipe.params[n].shape == ()]
        # Runs the modules' own methods that say what they store; None: there are none.
        self.own_state: OwnState | None = None
        self.shown: ShownClasses | None = None  # None: there are none
        self.number = -1  # among the models of its world, in the order in which they were sharded
        self.step = 0  # optimizer steps begun: part of every random stream's name
        self.num_windows = 0  # that have ended in this process
        self.accumulation: OpenGradients | None = None  # gradients that are not final yet; None: there are none
        self._busy: tuple[threading.Thread, str] | None = None  # the thread that runs something on the model, and what
        self.is_checked = False  # the module was compared with its snapshot since the last optimizer step
        self.num_watchable = 0  # windows so far whose operators may be watched, for what they do with buffers
        self.paddings: list[bool] = []  # of the counted micro-batches that ``accumulate`` runs
        self.has_own = False  # torch.autograd.grad has given gradients of this rank alone, and none were summed since
        self.labels_seen: Tensor | None = torch.zeros(3)  # how labels compare with inputs so far; None: enough was seen
        # Digests of windows that were equal on all ranks; None: one was not, or the warning was given.
        self.same_data: list[int] | None = []
        # Of the last window of a user's own loop: a ``step.window.TokenCount``; None: none; False: warning given.
        self.last_count: object = None
        # Of the last optimizer step: a gradient that it was taken with, and its version.
        self._stepped_gradient: tuple[weakref.ref[Tensor], int] | None = None
        self.reads_loader = False  # the last window came from a Loader
        self.loop_warnings: set[str] = set()  # warnings about the user's own loop that were given
        self.num_gathered = 0  # number of open ``sw.gathered`` contexts
        self.schedule: Callable[[Any], None] | None = None  # see :meth:`hand_schedule`
        # What of a micro-batch this rank's forward gets, and its loss; see :meth:`split_batches`.
        self.for_forward: Callable[[Any], Any] = _whole
        self.for_loss: Callable[[Any], Any] = _whole
        # Mesh axis -> parameters of which each rank along it has a part of the gradient: summed at the end of a window.
        self.partial: dict[str, list[str]] = {}
        self.before_first_step: list[Callable[[], None]] = []  # called by all ranks, before an optimizer first steps
        self.chosen: dict[
            str, object
        ] = {}  # subject -> what was chosen or seen since training began, for people: its text
        self.explainers: list[Callable[[BaseException], ShardwiseError | None]] = []  # of techniques
        # Why a forward cannot be run by itself, beside the schedule of a window; a technique sets it when it begins. None: it can.
        self.cannot_run_alone: str | None = None
        self.pending: Pending | None = None  # source of the values that loading will not bring
        # Parameter that is not trained, and that the constructor drew -> whether it still has these numbers.
        self.frozen_draws: dict[str, Callable[[], bool]] = {}
        self.loaded_from: Path | None = None  # the model directory that its weights came from
        # The tokenizer that it is trained with: its file, or the files to save, by name; False: trained without one; None: that of
        # the directory of its weights.
        self.tokenizer: Path | Mapping[str, bytes] | Literal[False] | None = None
        self._structure = ModuleSnapshot(module, num_ranks=world.size)
        self.modules = [*canonical_modules(module)]  # which the snapshot holds to be all there are
        self.half_loaded: set[str] = set()  # tensors that a failed load had begun to write
        self._withheld: ShardwiseError | None = None

    def enter(self, what: str) -> None:
        """Notes that this thread runs ``what`` on the model, until :meth:`leave`.

        Raises:
            UsageError: another thread runs something on it.
        """
        now = threading.current_thread()
        if self._busy is not None and self._busy[0] is not now:
            other, running = self._busy
            raise UsageError(
                f"{what} in the thread {now.name!r}, while {running} of the same model runs in the thread {other.name!r}",
                why="both exchange with the other ranks over the same connections, in an order that differs from rank to rank, and set the model's mode",
                fix="call both in one thread, one after the other: sw.evaluate between two steps. Beside training, evaluate a checkpoint in a job of its own",
            )
        self._busy = (now, what)

    def leave(self) -> None:
        self._busy = None

    # ---- set by techniques in ``Act.begin`` ------------------------------------------------------------------

    def hand_schedule(self, schedule: Callable[[Any], None]) -> None:
        """Lets a ``TrainStep`` run forwards and backwards of micro-batches by ``schedule``; see :mod:`shardwise.step.schedule`.

        Raises:
            PlanError: another technique has handed one.
        """
        if self.schedule is not None:
            raise PlanError(
                "two techniques that hand a schedule",
                why="one order of forwards and backwards is run",
                fix="use one of them",
            )
        self.schedule = schedule

    def split_batches(self, *, for_forward: Callable[[Any], Any], for_loss: Callable[[Any], Any]) -> None:
        """Gives a forward, and its loss, these parts of a micro-batch; of what other techniques have left of it."""
        forward, loss = self.for_forward, self.for_loss
        self.for_forward, self.for_loss = lambda batch: for_forward(forward(batch)), lambda batch: for_loss(loss(batch))

    def refuse_own_loop(self) -> None:
        """Raises UnsupportedError for a training loop of the user's own, where a technique splits micro-batches or has a schedule."""
        if self.schedule is not None or self.for_forward is not _whole or self.for_loss is not _whole:
            raise UnsupportedError(
                f"a training loop of your own under {self.recipe.grid}",
                why="each rank runs a part of a micro-batch, or micro-batches in an order of their own, which such a loop does not know",
                fix="train with sw.TrainStep(model, optim, loss=...), and call it with each window",
            )

    @property
    def why_not_called(self) -> str | None:
        """Why a call of the model, outside of a step and of an evaluation, is not one on the whole of what it is given; None: it is."""
        is_split = self.for_forward is not _whole
        return f"under {self.recipe.grid} a forward gets a part of its batch" if is_split else self.cannot_run_alone

    # ----------------------------------------------------------------------------------------------------------

    def note_stepped_gradient(self) -> None:
        """Called when an optimizer steps."""
        grad = next((param.grad for name in self.trainable if (param := self.parameters[name]).grad is not None), None)
        self._stepped_gradient = None if grad is None else (weakref.ref(grad), local_tensor(grad)._version)

    def was_stepped_with(self, grad: Tensor) -> bool:
        """Whether it is the noted gradient of the last step, with the version that it had."""
        noted, version = self._stepped_gradient or (None, 0)
        return noted is not None and noted() is grad and local_tensor(grad)._version == version

    @property
    def in_window(self) -> bool:
        return self.accumulation is not None and self.accumulation.of in ("window", "step")

    # ---- tensors ---------------------------------------------------------------------------------------------

    def local_tensors(self) -> dict[str, Tensor]:
        """Name -> what this rank stores: local shards of parameters, full buffers, full plain tensor attributes."""
        found = {name: local_tensor(param).detach() for name, param in self.parameters.items()}
        buffers = self.buffers()
        registered = (*self.parameters.values(), *buffers.values())
        for name, tensor in (*buffers.items(), *loose_tensors(self.module, registered).items()):
            found.setdefault(name, local_tensor(tensor).detach())
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Canonical name -> buffer, each under its first name. Without a walk through the module, which takes a millisecond
        for some hundred modules."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self.modules:
            if not module._buffers:
                continue
            for attr, buffer in module._buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{prefix}.{attr}" if prefix else attr, buffer))
        return dict(found.values())

    def module_state(self) -> ModuleState:
        """What a forward may write besides gradients, as it is now, to be restored after one that does not count. Of all sharded
        models: a loss may run several."""
        return ModuleState(module for runtime in (self, *runtimes_in_use()) for _, module in runtime.modules)

    def saved_buffers(self, *, of_main: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and dtype of each persistent buffer, as it is now. With ``of_main`` as rank 0 has it, which differs where each
        rank has its own: all ranks must call it then."""
        now, known = self.buffers(), self.recipe.buffers.items()
        found = {
            name: (tuple(now[name].shape), dtype_name(now[name].dtype)) if name in now else (buffer.shape, buffer.dtype)
            for name, buffer in known
            if buffer.persistent
        }
        has_own = any(buffer.persistent and buffer.policy == "own" for _, buffer in known)
        return self.world.broadcast(found) if of_main and has_own else found

    def local_tensor_of(self, name: str) -> Tensor:
        """What this rank stores of parameter ``name``."""
        return local_tensor(self.parameters[name]).detach()

    def pieces(self, name: str, tensor: Tensor, coord: Coord | None = None) -> tuple[Slice, ...]:
        """The pieces of ``name`` held at ``coord`` (None: by this rank); one full piece if it is not a parameter."""
        if name in self.recipe.params:
            return self.view.extents(name) if coord is None else extents(self.recipe.params[name], coord)
        zeros = (0,) * tensor.dim()
        return (Slice(zeros, tuple(tensor.shape), zeros),)

    def parts(self, name: str, local: Tensor) -> list[tuple[Slice, Tensor]]:
        """The pieces of ``name`` that this rank holds, each with its part of ``local``, a view."""
        pieces = self.pieces(name, local)
        return [(piece, local if len(pieces) == 1 else local[piece.local_index]) for piece in pieces]

    def owned(self, name: str, local: Tensor) -> list[Tensor]:
        """The pieces of ``local`` that this rank counts when something is summed over the full parameter: of copies on
        several ranks, each is counted by one, and each rank counts about as much. Views."""
        mine = self._own_pieces[name]
        if mine is None:
            return [local] if local.numel() else []
        return [local[piece.local_index] for piece in mine]

    @functools.cached_property
    def _own_pieces(self) -> dict[str, tuple[Slice, ...] | None]:
        """Name -> the pieces that this rank counts; None: all that it holds."""
        found: dict[str, tuple[Slice, ...] | None] = {}
        counted: dict[tuple[int, ...], list[int]] = {}  # ranks that hold the same pieces -> elements that each counts
        trained = set(self.trainable)
        for name in sorted(self.parameters):  # all ranks decide in one order
            slices, mine = self.view.extents(name), []
            for piece, ranks in zip(slices, self.view.owners(name), strict=True):
                so_far = counted.setdefault(ranks, [0] * len(ranks))
                least = so_far.index(min(so_far))
                so_far[least] += math.prod(piece.sizes) if name in trained else 0
                if ranks[least] == self.world.rank:
                    mine.append(piece)
            found[name] = None if len(mine) == len(slices) else tuple(mine)
        return found

    def owned_gradients(self, *, without: Collection[str] = ()) -> list[Tensor]:
        """This rank's share of all gradients, as views: over all ranks each element is in one share. Of copies of the whole model it is
        an equal part of what their gradients are packed in, which are few tensors."""
        data = self.world.axis("loss")
        if data.size == self.world.size and not without and (flats := self.engine.flat_gradients()):
            shares = [flat.tensor_split(data.size)[data.rank] for flat in flats]
            return [share for share in shares if share.numel()]
        grads = ((name, grad) for name, grad in self.gradients().items() if name not in without)
        return [piece for name, grad in grads for piece in self.owned(name, grad)]

    def gradients(self) -> dict[str, Tensor]:
        """Name -> local gradient of every parameter that has one."""
        with self.torchs_classes():
            return {
                name: grad if type(grad) is Tensor else local_tensor(grad)
                for name, param in self.parameters.items()
                if (grad := param.grad) is not None
            }

    def torchs_classes(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: parameters have torch's own classes, also those of which this rank has a plain part."""
        return contextlib.nullcontext() if self.shown is None else self.shown.torchs()

    def sum_partial(self, place: str) -> None:
        """Sums the gradients of :attr:`partial` over their axes, once; ``.grad`` must hold only this window's
        gradients. ``place`` is for messages."""
        for name, names in self.partial.items():
            axis = self.world.axis(name)
            packed = [_PartialSum(self.parameters[each], slots) for each in names if (slots := self._slots(each, axis))]
            for dtype in dict.fromkeys(each.dtype for each in packed) if axis.size > 1 else ():
                of_dtype = [each for each in packed if each.dtype == dtype]
                flat = torch.cat([part for each in of_dtype for part in each.parts()])
                self.world.agreement.carry_out(
                    functools.partial(_sum_all, [flat], axis.group), f"{place}, summing gradients over {name}"
                )
                for each, summed in zip(of_dtype, flat.split([each.numel for each in of_dtype]), strict=True):
                    each.put(summed)

    def add_late(self, used: Sequence[float], place: str) -> None:
        """Sums the gradients that came after the others of a window were sent; see :meth:`Engine.late`."""
        before = {name: param.grad for name, param in self.parameters.items()}
        for param in self.parameters.values():
            param.grad = None
        self.engine.add_late(used, place)
        self.sum_partial(place)
        for name, grad in before.items():
            param = self.parameters[name]
            if grad is not None:
                param.grad = grad if param.grad is None else grad + param.grad

    def _slots(self, name: str, axis: Axis) -> list[tuple[int, Slice | None]]:
        """What of parameter ``name`` is summed over ``axis``: numbers of elements, equal on every rank of it, each with the
        piece that is this rank's; None: it is not. Pieces that one rank of the axis holds alone are not summed."""
        coords = [self.recipe.grid.coord(rank) for rank in axis.ranks]
        held = [{piece.box: piece for piece in extents(self.recipe.params[name], coord)} for coord in coords]
        boxes = sorted({box for pieces in held for box in pieces if sum(box in other for other in held) > 1})
        return [(math.prod(box.sizes), held[axis.rank].get(box)) for box in boxes]

    @functools.cached_property
    def dtensors(self) -> list[nn.Parameter]:
        """The parameters of which ranks store parts."""
        return [param for param in self.parameters.values() if isinstance(param, DTensor)]

    @functools.cached_property
    def buffer_policies(self) -> dict[str, str]:
        """Name of each buffer that the module had when it was sharded, aliases too -> its policy at the end of a window."""
        buffers = self.recipe.buffers.items()
        return {each: buffer.policy for name, buffer in buffers for each in (name, *buffer.aliases)}

    @functools.cached_property
    def generators(self) -> dict[str, Any]:
        """Name -> random generator that a module keeps as an attribute; searched once, when the first window begins."""
        found: dict[int, tuple[str, Any]] = {}
        for prefix, module in canonical_modules(self.module):
            for attr, value in module.__dict__.items():
                if is_generator(value):
                    found.setdefault(id(value), (f"{prefix}.{attr}" if prefix else attr, value))
        return dict(found.values())

    # ---- checks ----------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for an error of torch, if its cause is known; else None."""
        return next(
            (known for ask in (*self.explainers, self.engine.explain) if (known := ask(error)) is not None), None
        )

    def withhold(self, error: ShardwiseError) -> None:
        """Makes the model's forward, and :meth:`check_values`, raise ``error`` until :meth:`release` is called."""
        if self._withheld is None:
            self._values_hook = self.module.register_forward_pre_hook(lambda *_: self.check_values(), prepend=True)
        self._withheld = error

    def release(self) -> None:
        """Called when the model has its values: it may be used."""
        if self._withheld is not None:
            self._values_hook.remove()
        self._withheld = None

    def check_values(self) -> None:
        """Raises the error passed to :meth:`withhold`, if the model has no values yet."""
        if self._withheld is not None:
            raise copy.copy(self._withheld)

    def check_unchanged(self) -> None:
        """Raises UsageError if the module is no longer the one that was sharded; see :class:`ModuleSnapshot`."""
        with self.torchs_classes():
            self._structure.check(self._partly_held)
        self.is_checked = True

    def _partly_held(self) -> set[str]:
        cut = (n for n, param in self.recipe.params.items() if any(each.axis != "fsdp" for each in param.cuts))
        return {*cut, *itertools.chain.from_iterable(self.partial.values())}


class _PartialSum:
    """The gradient of one parameter, of which each rank along an axis has a part.

    Args:
        param: the parameter; its gradient may be None.
        slots: see :meth:`Runtime._slots`.
    """

    def __init__(self, param: nn.Parameter, slots: list[tuple[int, Slice | None]]):
        self._param, self._slots = param, slots
        local = local_tensor(param)
        self.dtype, self._shape, self._device = local.dtype, local.shape, local.device
        self.numel = sum(numel for numel, _ in slots)

    def parts(self) -> list[Tensor]:
        """One flat tensor for each slot: zeros where this rank has nothing."""
        grad = None if self._param.grad is None else local_tensor(self._param.grad)
        empty = functools.partial(torch.zeros, dtype=self.dtype, device=self._device)
        return [
            empty(numel) if piece is None or grad is None else grad[piece.local_index].reshape(-1)
            for numel, piece in self._slots
        ]

    def put(self, summed: Tensor) -> None:
        """Writes the sums into the gradient. One that this rank has not got stays None if it is 0 on all ranks."""
        if self._param.grad is None:
            if not bool(summed.any()):
                return
            zeros = torch.zeros(self._shape, dtype=self.dtype, device=self._device)
            self._param.grad = like_parameter(zeros, self._param)
        grad = local_tensor(self._param.grad)
        for (_, piece), part in zip(self._slots, summed.split([numel for numel, _ in self._slots]), strict=True):
            if piece is not None:
                grad[piece.local_index] = part.view(piece.sizes)


def _sum_all(tensors: list[Tensor], group: Any) -> list[Any]:
    return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]


def _whole(batch: Any) -> Any:
    return batch


def attach(module: nn.Module, runtime: Runtime) -> None:
    """Stores ``runtime`` on ``module``."""
    module.__dict__[_KEY] = runtime
    runtime.number = _num_models[runtime.world] = _num_models.get(runtime.world, -1) + 1
    _in_use[next(_numbers)] = runtime


def runtime_of(module: nn.Module) -> Runtime:
    """The run-time object of a sharded module.

    Raises:
        UsageError: the module was not sharded by Shardwise.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"a {type(module).__name__} in place of a model",
            why="it is one module, which parallelize has returned",
            fix="pass the model; a loss over several models needs the window of one of them only",
        )
    runtime = module.__dict__.get(_KEY)
    if runtime is None and type(module).__name__ == "OptimizedModule":
        raise UsageError(
            "torch.compile(model) of a model",
            why="the wrapper is not the module that parallelize gave back, and hooks that gather units cannot be compiled",
            fix='pass the model itself; sw.parallelize(module, world, compile="blocks") compiles its blocks',
        )
    if runtime is None:
        inner = next((name for name, child in module.named_modules() if has_runtime(child)), None)
        if inner is not None:
            raise wrapped_around(type(module).__name__, inner)
        raise UsageError(
            f"a {type(module).__name__} that was not sharded",
            why="this call needs the recipe that parallelize hangs on the root module",
            fix="call model = sw.parallelize(model, world) first, and pass its result",
        )
    return runtime


def wrapped_around(kind: str, inner: str = "module") -> UsageError:
    """The error for a wrapper of this kind around a sharded model, which is its attribute ``inner``."""
    return UsageError(
        f"a {kind} around a model that parallelize has made parallel",
        why=f"the sharded model is its {inner!r}, and sums its gradients over the ranks by itself, replicas too",
        fix=f"do not wrap it: pass what sw.parallelize returned ({kind}(...).{inner} here); a module of your own around "
        "the model is wrapped first and given to parallelize whole",
    )


def has_runtime(module: nn.Module) -> bool:
    """Whether ``module`` is the root of a sharded model."""
    return _KEY in module.__dict__


def is_parallelized(param: Tensor) -> bool:
    """Whether ``param`` is a parameter of a sharded model that is still in use."""
    return any(param is own for runtime in runtimes_in_use() for own in runtime.parameters.values())


def runtimes_in_use() -> list[Runtime]:
    """Of all sharded models that are still in use, in the order in which they were sharded."""
    return list(_in_use.values())
