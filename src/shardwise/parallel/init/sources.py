"""Sources of a module's values: its recorded constructor, or rank 0.

A callable is built on meta with a tape running. If every rank can replay its tape and all tapes are equal, each rank
makes its own values from it. Otherwise, and for a module that has values already, rank 0's values are scattered.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.model import refuse_lazy
from shardwise.model.tensors import loose_tensors, replace_tensors, tensors_of, to_meta, version_of
from shardwise.parallel.init.build import build_on_meta
from shardwise.parallel.init.tape import Tape
from shardwise.parallel.init.values import scatter_values, write_from_tape
from shardwise.parallel.runtime import Runtime
from shardwise.parallel.stale import mark_stale
from shardwise.parallel.unfit_modules import refuse_to_replace
from shardwise.recipe import Note, Recipe
from shardwise.world import World
from shardwise.world.agreement import digest_of_text
from shardwise.world.rng import set_streams, streams

_CPU = torch.device("cpu")


class FromTape:
    """Values that every rank replays from the record of the constructor."""

    note: Note | None = Note(
        name="init", why="seeded: values are functions of (seed, name), made by each rank for itself", option="init"
    )

    def __init__(self, module: nn.Module, tape: Tape):
        self.tape = tape
        # Detached: casting to the storage dtype gives a parameter other data, and the tape knows the first.
        self.on_meta = {name: tensor.detach() for name, tensor in all_tensors(module).items()}

    def with_indices(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within: tensors of integers and booleans that are no parameters have their values."""
        self.tape.name_draws(self.on_meta)
        return _with_values(module, {name: self.tape.values(self.on_meta[name]) for name in _indices(module)})

    def release(self, module: nn.Module, recipe: Recipe) -> None:
        pass  # the module is on meta

    def write(self, runtime: Runtime) -> None:
        write_from_tape(runtime, self.tape, self.on_meta)
        self.note_frozen(runtime)

    def note_frozen(self, runtime: Runtime) -> None:
        """Notes the parameters that are not trained and have numbers drawn at random, until they get others."""
        for name, param in runtime.parameters.items():
            if not runtime.recipe.params[name].trainable and self.tape.has_draws(self.on_meta[name]):
                runtime.frozen_draws[name] = functools.partial(self._is_drawn, name, param, version_of(param))
        runtime.before_first_step.append(runtime.frozen_draws.clear)

    def _is_drawn(self, name: str, param: Tensor, version: int) -> bool:
        return version_of(param) == version and self.tape.is_random(self.on_meta[name])


class ForLoading(FromTape):
    """No values yet: ``load_weights`` loads them, and what it does not load is replayed then."""

    note = Note(name="init", why="load: memory without values, until load_weights", option="init")

    def write(self, runtime: Runtime) -> None:
        runtime.pending = self
        self.note_frozen(runtime)
        runtime.withhold(
            UsageError(
                "a model that has no values yet",
                why='it was made with init="load", and no weights have been loaded',
                fix="call sw.load_weights(model, path) first",
            )
        )

    def write_rest(self, runtime: Runtime, local: Mapping[str, Tensor]) -> None:
        """Writes the tensors of ``local``, which the loaded file does not contain."""
        write_from_tape(runtime, self.tape, self.on_meta, local)


class FromRank0:
    """Rank 0's values, kept on its host until they are scattered."""

    def __init__(self, module: nn.Module, world: World, note: Note | None):
        self.note, self.world, self.values = note, world, {}
        if world.is_main:
            self.values = {name: tensor.detach() for name, tensor in all_tensors(module).items()}

    def with_indices(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """As of :class:`FromTape`: rank 0's, on all ranks, which must all call it."""
        return _with_values(module, self.world.broadcast({n: v for n, v in self.values.items() if not _is_float(v)}))

    def release(self, module: nn.Module, recipe: Recipe) -> None:
        """Drops the module's own copy of the values. DDP keeps the tensors themselves, so that an optimizer built on
        them stays valid."""
        if recipe.is_cut:
            held = {name: weakref.ref(tensor) for name, tensor in tensors_of(module, "_parameters").items()}
            to_meta(module)
            # A tensor that is still alive is referenced elsewhere, perhaps by an optimizer.
            mark_stale({name: tensor for name, ref in held.items() if (tensor := ref()) is not None}, {})

    def write(self, runtime: Runtime) -> None:
        local = runtime.local_tensors()
        # DDP keeps the module's own tensors: rank 0's values are in place.
        in_place = {name for name, value in self.values.items() if value.data_ptr() == local[name].data_ptr()}
        scatter_values(runtime, lambda name, piece: self.values[name][piece.full_index], local, in_place=in_place)
        self.values = {}


def build_with_source(model: Any, world: World, init: str | None) -> tuple[nn.Module, "FromTape | FromRank0"]:
    """The module, and the source of its values. All ranks must call it.

    Raises:
        UsageError: neither a module nor a callable, a module on meta, or an invalid ``init``.
    """
    if init not in (None, "seeded", "rank0", "load"):
        raise UsageError(f"init={init!r}", why="init has no such value", fix='use "seeded", "rank0", "load" or None')
    if isinstance(model, nn.Module):
        if init in ("seeded", "load"):
            raise UsageError(
                f'init="{init}" with a module',
                why="its constructor has run already, so there is nothing to draw again",
                fix="pass the callable that builds it: parallelize(lambda: MyModel(config), world)",
            )
        refuse_lazy(model)
        _refuse_meta(model)
        return model, FromRank0(
            model, world, Note(name="init", why="rank0: values of the module given on rank 0", option="init")
        )
    if not callable(model):
        raise UsageError(
            f"a {type(model).__name__}",
            why="it is neither a module nor a callable that builds one",
            fix="pass one of them",
        )
    reason = None
    if init != "rank0":
        module, tape = build_on_meta(model, world.seed)
        if module is not None:
            refuse_lazy(module)
        kind = ForLoading if init == "load" else FromTape
        source = kind(module, tape) if module is not None else None
        refused = _refused_anywhere(source, tape, world)
        if module is not None and source is not None and refused is None:
            return module, source
        reason = refused
    return _build_on_rank0(model, world, reason)


def _refused_anywhere(source: "FromTape | None", tape: Tape, world: World) -> str | None:
    """Why some rank cannot replay its tape, or why tapes cannot be trusted, so that all ranks take the same path.

    Raises:
        OSError: the constructor's own error, if it occurred on every rank: it would occur with real values too.
    """
    refused = tape.refused or (None if source is not None else "the callable gave no module")
    digest = tape.digest(source.on_meta) if source is not None else ""
    seen = world.gather((refused, digest, tape.fault is not None))
    if tape.fault is not None and all(faulty for *_, faulty in seen):
        raise tape.fault
    first = next((reason for reason, *_ in seen if reason is not None), None)
    if first is None and len({digest for _, digest, _ in seen}) > 1:
        difference = _difference_of([] if source is None else list(tape.lines(source.on_meta)), world)
        return f"its constructor does not do the same on every rank (a generator of its own, the time, the rank, the order of a set?): {difference}"
    return first


def _difference_of(lines: list[str], world: World) -> str:
    """The first of these lines in which a rank has another one than rank 0, around the place where they differ. All ranks must call
    it."""
    digests = world.gather([digest_of_text(line) for line in lines])
    at = next(i for i, each in enumerate(zip_longest(*digests)) if len(set(each)) > 1)
    found = world.gather(lines[at] if at < len(lines) else "nothing")
    rank = next(rank for rank, line in enumerate(found) if line != found[0])
    same = next((i for i, (a, b) in enumerate(zip(found[0], found[rank], strict=False)) if a != b), 0)
    begin = max(0, same - 60)
    first, other = (("..." if begin else "") + line[begin : begin + 100] for line in (found[0], found[rank]))
    return f"line {at + 1} of its record is {first} on rank 0, and {other} on rank {rank}"


def _build_on_rank0(model: Callable[[], nn.Module], world: World, refused: str | None) -> tuple[nn.Module, "FromRank0"]:
    """Rank 0 builds with real values; the others build on meta if they can, else with real values that they drop.
    ``refused``: why seeded values are not possible; None: they were not asked for."""
    module: Any = None
    with _rng_of_rank0(world) as state:
        if not world.is_main:
            module, _ = build_on_meta(model, world.seed)
        if module is None:
            set_streams(state, _CPU)
            module = model()
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"a callable that gave a {type(module).__name__}", why="parallelize needs a module", fix="return the module"
        )
    refuse_lazy(module)
    why = "rank0 (asked for)" if refused is None else f"rank0 (seeded values are not possible: {refused})"
    source = FromRank0(module, world, Note(name="init", why=why, option="init", warns=refused is not None))
    refuse_to_replace(module)
    held = tensors_of(module, "_parameters")
    to_meta(module)
    mark_stale(held, {})
    return module, source


@contextlib.contextmanager
def _rng_of_rank0(world: World) -> Iterator[dict[str, Any]]:
    """Context manager: Python, numpy and torch draw what they would on rank 0, so that what a constructor draws itself
    (and keeps as plain attributes) is the same on every rank. Yields that state. All ranks must enter it."""
    own = streams(_CPU)
    theirs = world.broadcast(own)
    set_streams(theirs, _CPU)
    try:
        yield theirs
    finally:
        if not world.is_main:  # rank 0's generators stay advanced
            set_streams(own, _CPU)


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> every tensor that has values: parameters, buffers, and unregistered ones."""
    found = {**tensors_of(module, "_parameters"), **tensors_of(module, "_buffers")}
    for name, tensor in loose_tensors(module).items():
        found.setdefault(name, tensor)
    return found


def _indices(module: nn.Module) -> list[str]:
    """Tensors of integers and booleans that are no parameters; their values decide what a forward does."""
    parameters = tensors_of(module, "_parameters")
    return [name for name, tensor in all_tensors(module).items() if name not in parameters and not _is_float(tensor)]


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@contextlib.contextmanager
def _with_values(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within: tensors of ``module`` that are on meta have these values, by canonical name."""
    known = all_tensors(module)
    found = {name: value for name, value in values.items() if known[name].device.type == "meta"}
    given = {id(known[name]): value for name, value in found.items()}
    back = {id(value): known[name] for name, value in found.items()}
    replace_tensors(module, lambda tensor: given.get(id(tensor), tensor))
    try:
        yield
    finally:
        replace_tensors(module, lambda tensor: back.get(id(tensor), tensor))


def _refuse_meta(module: nn.Module) -> None:
    for name, tensor in all_tensors(module).items():
        if tensor.device.type == "meta":
            raise UsageError(
                "a module with tensors on meta",
                why="it has no values, and its constructor is not known here",
                fix="pass the callable that builds it: parallelize(lambda: MyModel(config), world)",
                name=name,
            )
