"""Activation checkpointing: a block keeps its inputs, and runs again in backward. Its names, class and hooks stay.

The block's ``forward`` is replaced on the object, inside all hooks: what DDP and FSDP2 do around a block is done once,
and the second run gets the cast inputs, and parameters gathered by the unit's own backward.

The second run must repeat the first, or gradients are wrong without an error. The first 16 times a block runs twice,
and the 32nd, 64th, 128th..., the results of both runs are compared. The second run gets the same random numbers (of
torch, numpy and Python, and of generators that its modules keep or that are passed to it) and the same buffers (a
spectral norm reads what it writes; batch norm would count a batch twice). Results that depend on equal values or on the
device's order (top-k routing, copies to the host) are kept with selective, not recomputed. In a compiled block the graph holds both
runs, and buffers cannot be restored: see :mod:`shardwise.techniques.compile.write_check`.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

from shardwise._torch.autograd import StopRecomputation, checkpointed, function_modes
from shardwise._torch.pytrees import tree_flatten, tree_unflatten
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.model import canonical_modules
from shardwise.model.adapted import adapter_switches, adapters_as
from shardwise.model.pytrees import leaves_of
from shardwise.recipe import Recipe
from shardwise.techniques.edges import gather_parts, parts_of
from shardwise.techniques.remat.block_buffers import Before, BlockBuffers, WrittenBuffers
from shardwise.techniques.remat.choice import Choice
from shardwise.techniques.remat.measure import Measurement
from shardwise.techniques.remat.operators import KeepChosen, keep_policy
from shardwise.techniques.remat.recomputation_check import digest_of_result, same_output
from shardwise.techniques.remat.selection import Selection
from shardwise.techniques.technique import Act
from shardwise.world import GlobalNumbers, World, generators_among, snapshot

_FIRST = 16  # how many runs of a block are compared with their repetition; after them only each power of two
_PLAIN = (Tensor, bool, int, float, str, type(None))  # leaves of arguments with nothing in them
_NOTHING = contextlib.nullcontext()
_STATE, _SECOND = "_shardwise_remat", "_shardwise_second_run"


class RematAct(Act):
    """Makes blocks run again in backward (activation checkpointing), as the recipe says."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        modules = dict(canonical_modules(module))
        for edit in recipe.edits_of("remat"):
            if edit.args.get("offload") and world.device.type != "cuda":
                raise UnsupportedError(
                    f"Remat(offload=True) on {world.device.type}",
                    why="what a block keeps lies in host memory already, so a copy of it would only cost memory",
                    fix="leave offload out, or run on cuda",
                    name=edit.module,
                )
            if edit.args["mode"] == "selective" and any(
                isinstance(m, nn.RNNBase) for m in modules[edit.module].modules()
            ):
                raise UnsupportedError(
                    "selective Remat of a block with a recurrent layer",
                    why="recurrent kernels write into the results of their matrix products, which are what selective keeps",
                    fix='use Remat(mode="full") for it, or name other targets',
                    name=edit.module,
                )
            if "save" in edit.args:
                _contexts(tuple(edit.args["save"]))
            own = next((n for n, child in canonical_modules(modules[edit.module]) if _checkpoints_itself(child)), None)
            if own is not None:
                raise UsageError(
                    "Remat of a block that checkpoints itself",
                    why="it would run three times: the model's own gradient checkpointing is on",
                    fix="model.gradient_checkpointing_disable(), or leave remat out",
                    name=f"{edit.module}.{own}" if own else edit.module,
                )

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        """Replaces ``forward`` of each block, in place; blocks that are checkpointed already are skipped."""
        modules = dict(canonical_modules(module))
        edits = [edit for edit in recipe.edits_of("remat") if _STATE not in vars(modules[edit.module])]
        selection = None
        if edits and (args := edits[0].args)["mode"] != "full":  # all come from one Remat
            selection = Selection([e.module for e in edits], tuple(args.get("save", ())), args.get("budget"))
        inside = {edit.module: [*modules[edit.module].modules()] for edit in edits}
        blocks = {id(each) for of_block in inside.values() for each in of_block}
        outside = [each for each in module.modules() if id(each) not in blocks]
        for edit in edits:
            target = modules[edit.module]
            siblings = [each for name, of_block in inside.items() if name != edit.module for each in of_block]
            buffers = BlockBuffers(edit.module, inside[edit.module], outside, siblings)
            target.__dict__[_STATE] = _State(target, edit.module, edit.args, selection, world.device, buffers)
            target.forward = types.MethodType(_forward, target)

    def begin(self, runtime: Any) -> None:
        modules = dict(canonical_modules(runtime.module))
        states = [modules[edit.module].__dict__[_STATE] for edit in runtime.recipe.edits_of("remat")]
        for selection in {id(state.selection): state.selection for state in states if state.selection}.values():
            runtime.before_first_step.append(functools.partial(_decide, selection, runtime))

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for a difference between a block's two runs; None for any other error."""
        runs = getattr(error, _SECOND, None) or (checkpointed(error) if isinstance(error, CheckpointError) else None)
        if not isinstance(runs, _Runs):  # a checkpoint call of the user's own code
            return None
        return UnsupportedError(
            "Remat of a block whose second run, in backward, differs from its first",
            why="what backward needs is taken from the second run, and it did not make the same tensors: the block changes what "
            "it is given (a key/value cache), or depends on something else that has changed since",
            fix="leave the block out: Remat(targets=...); for Hugging Face models, model.config.use_cache = False",
            name=runs.state.name,
        )


def _checkpoints_itself(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False))


# ---- the two runs ----------------------------------------------------------------------------------------------------


class _State:
    """What a block needs to run twice with equal results."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        args: Mapping[str, Any],
        selection: Selection | None,
        device: torch.device,
        buffers: BlockBuffers,
    ):
        self.name, self.args, self.selection, self.device = name, args, selection, device
        self.offload = bool(args.get("offload"))
        # Where the code is compiled, results are kept by name.
        self.options: dict[str, Any] = {"context_fn": _contexts(tuple(args["save"]))} if "save" in args else {}
        self.own = vars(module).get("forward")  # a forward that was set on the object
        self.modules = list(module.modules())
        self.switches = adapter_switches(self.modules)
        self.kinds: list[tuple[type, ...]] = [()] * len(self.modules)  # of attributes among which is no generator
        self.buffers = buffers
        self.num_runs = 0
        self._module = module

    def choice(self) -> Choice | None:
        """What was chosen for the block; None: nothing yet, or nothing is to be chosen."""
        return None if self.selection is None else self.selection.choice(self.name)

    @functools.cached_property
    def parts(self) -> list[nn.Module]:
        """Asked for in the first backward, when the units are made."""
        return parts_of(self._module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``module.forward``: runs the block under ``torch.utils.checkpoint``."""
    state: _State = module.__dict__[_STATE]
    if torch.compiler.is_compiling():

        def run(args: Any, kwargs: Any) -> Any:
            if state.own is not None:
                return state.own(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

        return checkpoint(run, args, kwargs, use_reentrant=False, **state.options)
    choice = state.choice()
    if not torch.is_grad_enabled() or (choice is not None and choice.keeps_all):
        return _inner(module, state)(*args, **kwargs)
    is_flat = not kwargs and all(isinstance(arg, _PLAIN) for arg in args)  # most blocks: flattening takes 50 us
    leaves, spec = (args, None) if is_flat else tree_flatten((args, kwargs))
    # Tensors inside other objects are passed too: torch finds the device, whose autocast it keeps, in its arguments only.
    within = [x for leaf in leaves if not isinstance(leaf, _PLAIN) for x in leaves_of(leaf) if isinstance(x, Tensor)]
    runs = _Runs(module, state, spec, (args, kwargs))
    if state.selection is not None:
        runs.measurement = state.selection.measurement(
            state.name, [x for x in (*leaves, *within) if isinstance(x, Tensor)]
        )
    # Torch would write the states of its generators twice for each block: `_Runs` has them among its numbers.
    options: dict[str, Any] = {"early_stop": not runs.is_checked, "preserve_rng_state": False}
    if choice is not None and choice.kept:
        options["context_fn"] = functools.partial(_chosen_contexts, choice.kept)
    elif "save" in state.args:
        options["context_fn"] = _contexts(())
    given = [(x, x._version) for x in (*leaves, *within) if isinstance(x, Tensor)] if runs.is_checked else []
    with _in_host_memory() if state.offload else _NOTHING:
        output = checkpoint(runs, *leaves, *within, use_reentrant=False, **options)
    if any(x._version != version for x, version in given):
        raise _writes_into_inputs(state.name)
    return output


def _writes_into_inputs(name: str) -> UnsupportedError:
    return UnsupportedError(
        "Remat of a block that writes into a tensor that it is given",
        why="the block runs again in backward, and would be given what its first run made of the tensor",
        fix="let the block return a new tensor (x = x + y, not x += y), or write a buffer through its module "
        "(self.stats.tokens.add_(...)); or leave the block out: Remat(targets=...)",
        name=name,
    )


def _inner(module: nn.Module, state: _State) -> Callable[..., Any]:
    return state.own or types.MethodType(type(module).forward, module)


class _Runs:
    """The first run of a block on one set of inputs, and its repetitions."""

    def __init__(self, module: nn.Module, state: _State, spec: Any, given: Any):
        self.module, self.state, self.spec = module, state, spec
        # To the first run: what a block writes into a list or dict of the caller's is for the caller.
        self.given = given
        self.before: Before | None = None  # the buffers, before the first run
        self.written: WrittenBuffers | None = None  # by the first run, as before it; None: it has not ended
        state.num_runs += 1
        is_due = state.num_runs <= _FIRST or not state.num_runs & (state.num_runs - 1)
        # Whether both runs are compared.
        self.is_checked = is_due or state.buffers.are_new
        self.digest: list[Tensor] = []
        self.numbers = GlobalNumbers(state.device)
        self.generators: list[tuple[Any, Callable[[], Any]]] = []  # with functions that restore them for the second run
        self.modes = function_modes()
        self.adapters = [getattr(*switch) for switch in state.switches]  # whether they are off
        self.measurement: Measurement | None = None  # of the first run

    def __call__(self, *leaves: Any) -> Any:
        run = _inner(self.module, self.state)
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            self.generators = [(g, snapshot(g)) for g in _generators(self.state, leaves)]
            self.before = self.state.buffers.before(self.is_checked)
            with self.measurement.watching() if self.measurement is not None else _NOTHING:
                output = run(*args, **kwargs)
            if self.measurement is not None and self.state.selection is not None:
                self.state.selection.ran(self.state.name, self.measurement)
                self.measurement = None
            self.written, self.before = self.state.buffers.written(self.before), None
            self.digest = digest_of_result(output) if self.is_checked else []
            return output
        args, kwargs = (leaves, {}) if self.spec is None else tree_unflatten(leaves[: self.spec.num_leaves], self.spec)
        has_ended = self.written is not None  # False: the block itself runs a backward, of what it has computed so far
        hooks = _hooks_on(leaves)
        with self.numbers.again(), self._surroundings():
            try:
                gather_parts(self.state.parts)
                output = run(*args, **kwargs)
                if self.is_checked and has_ended and not same_output(self.digest, digest_of_result(output)):
                    raise RuntimeError("the two runs gave different results")
                return output
            except (torch.OutOfMemoryError, ShardwiseError, StopRecomputation):
                raise
            except Exception as error:  # it did not fail in the first run
                if self.is_checked and "has been mutated" in str(error):
                    raise StopRecomputation from None  # the parent changed a result: torch reports it if it is needed
                setattr(error, _SECOND, self)
                raise
            finally:
                for kept, keys in hooks:
                    for key in kept.keys() - keys:
                        del kept[key]

    def _surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for the second run: buffers, generators, function modes and adapters as in the first."""
        written = self.state.buffers.written(self.before) if self.written is None else self.written
        if not (written or self.generators or self.modes or self.adapters):
            return _NOTHING
        with contextlib.ExitStack() as stack:
            if written:
                stack.enter_context(written.put_back())
            for generator, put_back in self.generators:
                stack.callback(snapshot(generator))
                put_back()
            active = function_modes()
            for mode in self.modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            stack.enter_context(adapters_as(self.state.switches, self.adapters))
            return stack.pop_all()


def _hooks_on(leaves: Sequence[Any]) -> list[tuple[dict[int, Any], set[int]]]:
    """The hooks on what a block is given, which has the gradient's node: those that the second run adds would be called too."""
    kept = [leaf._backward_hooks for leaf in leaves if isinstance(leaf, Tensor) and leaf._backward_hooks]
    return [(hooks, set(hooks)) for hooks in kept]


def _generators(state: _State, leaves: Sequence[Any]) -> list[Any]:
    """Random generators that the block's modules keep as attributes, or that are passed to it."""
    found: list[Any] = []
    for i, child in enumerate(state.modules):
        kinds = tuple(map(type, vars(child).values()))
        if kinds != state.kinds[i]:
            kept = generators_among(vars(child).values())
            found += kept
            state.kinds[i] = () if kept else kinds
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            found += generators_among(leaves_of(leaf))
    return found if len(found) < 2 else list({id(value): value for value in found}.values())


# ---- what is kept ----------------------------------------------------------------------------------------------------


def _in_host_memory() -> contextlib.AbstractContextManager[None]:
    """Context manager: inputs that a block keeps are moved to page-locked host memory until they are needed."""
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu" or not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _from_host(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


@functools.cache
def _contexts(save: tuple[str, ...]) -> Callable[[], Any]:
    """The ``context_fn`` of ``checkpoint`` that keeps the results of the operators in ``save``. One object for equal
    arguments, so that compiled blocks share a graph."""
    return functools.partial(create_selective_checkpoint_contexts, keep_policy(save))


def _chosen_contexts(kept: frozenset[tuple[str, int]]) -> Any:
    """The contexts of one run and its repetitions that keep the results of these calls."""
    return create_selective_checkpoint_contexts(KeepChosen(kept))


def _decide(selection: Selection, runtime: Any) -> None:
    runtime.chosen["remat"] = selection.decide(runtime)
