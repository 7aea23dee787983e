"""The run-time object of a sharded module: its recipe, its world, and its data-parallel engine."""

import contextlib
import copy
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import Backward, path_of
from shardwise._torch.dtensor import local_tensor
from shardwise.errors import PlanError, ShardwiseError, UnsupportedError, UsageError
from shardwise.layout import Coord
from shardwise.model import canonical_modules, dtype_name
from shardwise.model.module_state import ModuleState
from shardwise.model.own_state import OwnState
from shardwise.model.tensors import loose_tensors, tensors_of
from shardwise.parallel.protocols import CutSequence, Engine, OpenGradients, Pending, ShownClasses
from shardwise.parallel.stale import ModuleSnapshot
from shardwise.recipe import RankView, Recipe, Slice, extents
from shardwise.techniques.data.rule import DataEntry
from shardwise.world import World, is_generator
from shardwise.world.agreement import Scope

T = TypeVar("T")
_KEY = "_shardwise_runtime"  # in the module's __dict__: neither a child, a parameter nor a buffer
# By their number, so that all ranks have them in one order; not of parameters: module.to could not swap them then.
_in_use: "weakref.WeakValueDictionary[int, Runtime]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_num_models: "weakref.WeakKeyDictionary[World, int]" = weakref.WeakKeyDictionary()


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
        self.reads_loader = False  # the last window came from a Loader
        self.schedule: Callable[[Any], None] | None = None  # see :meth:`hand_schedule`
        # What of a micro-batch this rank's forward gets, and its loss; see :meth:`split_batches`.
        self.micro_batch: Any = None  # that a step or an evaluation runs the model on; None: it runs it on none
        # Of the sums of the loss, where every rank along an axis of the loss computes all of it.
        self.share_of_sums = 1.0
        self.sequence: CutSequence | None = None  # None: outputs have all positions
        self._is_cut_for_loss = False  # and nothing else is split
        self.for_forward: Callable[[Any], Any] = _whole
        self.for_loss: Callable[[Any], Any] = _whole
        # Mesh axis -> parameters of which each rank along it has a part of the gradient: summed at the end of a window.
        self.partial: dict[str, list[str]] = {}
        # Mesh axis -> what a user may do without: its ranks work on parts of the same data, so gradients of what each holds whole are
        # compared in every window.
        self.compared: dict[str, str] = {}
        # The error for an entry of the loss, by its name, that ranks have other values of which compute the same; None: no ranks do.
        self.other_loss: Callable[[str], ShardwiseError] | None = None
        self.before_first_step: list[Callable[[], None]] = []  # called by all ranks, before an optimizer first steps
        self.before_backward: list[Callable[[Backward], None]] = []  # called in a window, of what adds to gradients
        # Subject -> what was chosen or seen since training began, for people: its text.
        self.chosen: dict[str, object] = {}
        self.explainers: list[Callable[[BaseException], ShardwiseError | None]] = []  # of techniques
        # Why a forward cannot be run by itself, beside the schedule of a window; a technique sets it when it begins. None: it can.
        self.cannot_run_alone: str | None = None
        self.pending: Pending | None = None  # source of the values that loading will not bring
        # Parameter that is not trained, and that the constructor drew -> whether it still has these numbers.
        self.frozen_draws: dict[str, Callable[[], bool]] = {}
        # The tokenizer that it is trained with: its file, or the files to save, by name; False: trained without one; None: that of
        # the directory that its weights came from.
        self.tokenizer: Path | Mapping[str, bytes] | Literal[False] | None = None
        self._memory: dict[type, Any] = {}
        self._structure = ModuleSnapshot(module, num_ranks=world.size)
        self.modules = [*canonical_modules(module)]  # which the snapshot holds to be all there are
        self._withheld: ShardwiseError | None = None

    def memory(self, kind: type[T]) -> T:
        """What a file keeps of this model between its calls: the one object of this class, which is made when it is first asked for."""
        if kind not in self._memory:
            self._memory[kind] = kind()
        return self._memory[kind]

    def forget(self, *kinds: type) -> None:
        """Lets :meth:`memory` of these classes begin anew."""
        for kind in kinds:
            self._memory.pop(kind, None)

    def enter(self, what: str) -> None:
        """Notes that this thread runs ``what`` on the model, until :meth:`leave`."""
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
        """Lets a ``TrainStep`` run forwards and backwards of micro-batches by ``schedule``; see :mod:`shardwise.step.schedule`."""
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
        if for_forward is not _whole:
            self.for_forward = lambda batch: for_forward(forward(batch))
        self.for_loss = lambda batch: for_loss(loss(batch))

    def split_sequences(self, sequence: CutSequence) -> None:
        """Gives the loss this rank's positions of a micro-batch, of which the forward gets all. A loop of the user's own asks for them
        itself."""
        loss, self.sequence = self.for_loss, sequence
        self.for_loss, self._is_cut_for_loss = lambda batch: sequence.part_of(loss(batch)), loss is _whole

    def refuse_own_loop(self) -> None:
        """Raises UnsupportedError for a training loop of the user's own, where a technique splits micro-batches or has a schedule."""
        is_split = self.for_forward is not _whole or not (self.for_loss is _whole or self._is_cut_for_loss)
        if self.schedule is not None or is_split or self.share_of_sums != 1:
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

    @property
    def in_window(self) -> bool:
        return self.accumulation is not None and self.accumulation.of in ("window", "step")

    # ---- tensors ---------------------------------------------------------------------------------------------

    def other_leaf(self, tensor: Tensor) -> Tensor | None:
        """A leaf of the graph of ``tensor``, or itself, that is no parameter of a sharded model; None: there is none."""
        if tensor.is_leaf:
            return tensor
        own = {
            id(each)
            for runtime in runtimes_in_use()
            for each in (*runtime.parameters.values(), *(copy for copy, _ in runtime.engine.gathered()))
        }
        return next((leaf for leaf in path_of([tensor], past_marks=True).leaves if id(leaf) not in own), None)

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

    @functools.cached_property
    def dtensors(self) -> list[nn.Parameter]:
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


def _whole(batch: Any) -> Any:
    return batch


def attach(module: nn.Module, runtime: Runtime) -> None:
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
