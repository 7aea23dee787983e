"""``sw.parallelize``: from any module and a world to the same module, sharded. The one place that knows the order.

Build (on meta, or on rank 0) -> read the anatomy -> make the recipe -> agree that all ranks made the same ->
apply it -> write the values. Everything that can be refused is refused before the first byte is moved.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._compat import DDPModule
from shardwise.anatomy import dtype_of, read_anatomy
from shardwise.config.options import Precision, Sharding, precision_of
from shardwise.errors import PlanError, UsageError
from shardwise.parallel.ddp import apply_ddp
from shardwise.parallel.fsdp2 import apply_fsdp2
from shardwise.parallel.runtime import Runtime, attach, has_runtime, runtime_of
from shardwise.parallel.stale import mark_stale
from shardwise.parallel.tape import Tape, build_on_meta
from shardwise.parallel.tensors import give_memory, hidden_tensors, tensors_of, to_meta
from shardwise.parallel.values import scatter_values, write_from_tape
from shardwise.recipe import Anatomy, Note, Recipe, describe_recipe, fingerprint_of, make_recipe
from shardwise.world import World, agree_on

__all__ = ["apply_recipe", "describe", "parallelize", "recipe_of", "world_of"]

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M | Callable[[], M],
    world: World,
    *,
    example: Mapping[str, Tensor] | None = None,
    init: str | None = None,
    precision: str | Precision | None = None,
    sharding: Sharding | None = None,
) -> M:
    """Shards a module over the ranks of ``world`` and gives it back: the same object, class, names and methods.

    All ranks must call it, with the same arguments. Build the optimizer afterwards.

    Args:
        model: a callable that builds the module (built on meta: no rank ever holds it whole), or a module.
        world: from :func:`shardwise.init`.
        example: one micro-batch, run once to see which blocks are entered. Needed only where the code of a module
            cannot be read.
        init: ``"seeded"``: values are functions of (world.seed, name), made by each rank for itself, the same under
            every layout; default for a callable. ``"rank0"``: rank 0's values, scattered; default for a module, and what
            seeded falls back to where a constructor cannot be recorded (the recipe's notes say why).
        precision: None = the module as it is; ``"fp32"``, ``"bf16"`` (stored and reduced in fp32, computed in bf16), or
            a :class:`~shardwise.config.options.Precision`.
        sharding: engine, units and resharding; None = all automatic.

    Raises:
        UsageError: the module is sharded or wrapped already, or is on meta without a callable to build it.
        PlanError: options that name no module, or a tensor that nothing initialises.
        UnsupportedError: a module that cannot be sharded safely, by name.
        RankError: ranks whose modules or options differ.

    Example:
        >>> model = parallelize(lambda: nn.Linear(8, 8), world)  # doctest: +SKIP
    """
    chosen = precision_of(precision)
    module, source = _build(model, world, init)
    _refuse_wrapped(module)
    _cast_storage(module, chosen)
    anatomy = read_anatomy(module, example=example)
    recipe = make_recipe(anatomy, world.layout, precision=chosen, sharding=sharding or Sharding())
    if source.note is not None:
        recipe = _with_note(recipe, source.note)
    _agree_on_recipe(recipe, world)
    source.release(module, recipe)
    apply_recipe(module, recipe, world)
    source.write(runtime_of(module))
    return module  # type: ignore[return-value]


def apply_recipe(module: nn.Module, recipe: Recipe, world: World) -> Runtime:
    """Carries out ``recipe`` on ``module``, in place: shards it and gives its tensors memory. Values are not written.

    Raises:
        PlanError: the recipe was made for another module or another layout.
    """
    anatomy = read_anatomy(module)
    found = fingerprint_of(anatomy)
    if found != recipe.fingerprint or recipe.layout != world.layout.degrees:
        raise PlanError(
            f"a recipe for {recipe.module_class} ({recipe.fingerprint}) on {recipe.grid}",
            why=f"this module is {type(module).__name__} ({found}) on {world.layout}: names, shapes, dtypes or ties differ",
            fix="make the recipe from this module and layout: parallelize does",
            name=_first_difference(anatomy, recipe),
        )
    before = tensors_of(module, "_parameters")
    if recipe.engine == "ddp":
        give_memory(module, world.device)
        engine: Any = apply_ddp(module, recipe, world)
    else:
        engine = apply_fsdp2(module, recipe, world)
    runtime = Runtime(module, recipe, world, engine)
    mark_stale(before, runtime.parameters)
    attach(module, runtime)
    return runtime


def describe(model: nn.Module) -> str:
    """The recipe of a sharded module as a table, with the reason of every choice. No rank needs to call it with others."""
    return describe_recipe(recipe_of(model))


def recipe_of(model: nn.Module) -> Recipe:
    """The recipe that ``model`` was sharded by."""
    return runtime_of(model).recipe


def world_of(model: nn.Module) -> World:
    """The world that ``model`` was sharded over."""
    return runtime_of(model).world


# ---- where values come from ------------------------------------------------------------------------------------


class _FromTape:
    """Values replayed by every rank from the record of the constructor."""

    note: Note | None = Note(
        name="init", why="seeded: values are functions of (seed, name), made by each rank for itself"
    )

    def __init__(self, module: nn.Module, tape: Tape):
        self.tape = tape
        # Detached: casting to the storage dtype gives a parameter other data, and the tape knows the first.
        self.on_meta = {name: tensor.detach() for name, tensor in _all_tensors(module).items()}

    def release(self, module: nn.Module, recipe: Recipe) -> None:
        pass  # the module is on meta

    def write(self, runtime: Runtime) -> None:
        write_from_tape(runtime, self.tape, self.on_meta)


class _FromRank0:
    """Rank 0's values, kept on its host until they are scattered."""

    def __init__(self, module: nn.Module, world: World, note: Note | None):
        self.note, self.world, self.values = note, world, {}
        if world.is_main:
            self.values = {name: tensor.detach() for name, tensor in _all_tensors(module).items()}

    def release(self, module: nn.Module, recipe: Recipe) -> None:
        """Drops the module's own copy of the values. DDP keeps the tensors themselves, so that an optimizer built
        on them stays right."""
        if recipe.engine == "fsdp2":
            held = {name: weakref.ref(tensor) for name, tensor in tensors_of(module, "_parameters").items()}
            to_meta(module)
            # What is still alive is held by somebody, an optimizer perhaps.
            mark_stale({name: tensor for name, ref in held.items() if (tensor := ref()) is not None}, {})

    def write(self, runtime: Runtime) -> None:
        scatter_values(runtime, self.values)
        self.values = {}


def _build(model: Any, world: World, init: str | None) -> tuple[nn.Module, "_FromTape | _FromRank0"]:
    if init not in (None, "seeded", "rank0"):
        raise UsageError(f"init={init!r}", why="there is no such way", fix='use "seeded", "rank0" or None')
    if isinstance(model, nn.Module):
        if init == "seeded":
            raise UsageError(
                'init="seeded" with a module',
                why="its constructor has run already, so there is nothing to draw again",
                fix="pass the callable that builds it: parallelize(lambda: MyModel(config), world)",
            )
        _refuse_meta(model)
        return model, _FromRank0(model, world, Note(name="init", why="rank0: values of the module given on rank 0"))
    if not callable(model):
        raise UsageError(
            f"a {type(model).__name__}",
            why="it is neither a module nor a callable that builds one",
            fix="pass one of them",
        )
    reason = "asked for"
    if init != "rank0":
        module, tape = build_on_meta(model, world.seed)
        if module is not None and tape.refused is None:
            return module, _FromTape(module, tape)
        reason = f"seeded values are not possible: {tape.refused or 'the callable gave no module'}"
    return _build_on_rank0(model, world, reason)


def _build_on_rank0(model: Callable[[], nn.Module], world: World, reason: str) -> tuple[nn.Module, "_FromRank0"]:
    """Rank 0 builds with real values; the others build on meta where they can, else for real and drop the values."""
    module: Any = None
    if not world.is_main:
        module, _ = build_on_meta(model, world.seed)
    if module is None:
        module = model()
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"a callable that gave a {type(module).__name__}", why="parallelize needs a module", fix="return the module"
        )
    source = _FromRank0(module, world, Note(name="init", why=f"rank0 ({reason})"))
    to_meta(module)
    return module, source


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {**tensors_of(module, "_parameters"), **tensors_of(module, "_buffers")}
    for name, owner, attr in hidden_tensors(module):
        found.setdefault(name, getattr(owner, attr))
    return found


# ---- checks and moves -----------------------------------------------------------------------------------------


def _refuse_wrapped(module: nn.Module) -> None:
    if has_runtime(module):
        raise UsageError(
            "a module that was sharded already",
            why="sharding twice would cut its shards again",
            fix="call parallelize once per module; build it anew for another layout",
        )
    for name, child in module.named_modules():
        kind = type(child).__name__
        if (
            isinstance(child, FSDPModule | DDPModule | nn.parallel.DistributedDataParallel)
            or kind == "FullyShardedDataParallel"
        ):
            raise UsageError(
                f"a module that holds a {kind}",
                why="another library has sharded or replicated it, so its tensors are not whole",
                fix="pass the plain module, before any fully_shard, DDP or FSDP call",
                name=name or None,
            )


def _refuse_meta(module: nn.Module) -> None:
    for name, tensor in _all_tensors(module).items():
        if tensor.device.type == "meta":
            raise UsageError(
                "a module with tensors on meta",
                why="it has no values, and its constructor is not known here",
                fix="pass the callable that builds it: parallelize(lambda: MyModel(config), world)",
                name=name,
            )


def _cast_storage(module: nn.Module, precision: Precision) -> None:
    if precision.storage is None:
        return
    dtype = dtype_of(precision.storage)
    for param in tensors_of(module, "_parameters").values():
        if param.requires_grad and param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)


def _first_difference(anatomy: Anatomy, recipe: Recipe) -> str | None:
    """The first parameter or buffer that the recipe and the module do not have alike."""

    def facts(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {n: (t.shape, t.dtype, getattr(t, "trainable", None), t.aliases) for n, t in tensors.items()}

    ours = {**facts(recipe.params), **{n: f[:2] for n, f in facts(recipe.buffers).items()}}
    theirs = {**facts(anatomy.params), **{n: f[:2] for n, f in facts(anatomy.buffers).items()}}
    return next((name for name in (*theirs, *ours) if ours.get(name) != theirs.get(name)), None)


def _agree_on_recipe(recipe: Recipe, world: World) -> None:
    facts: dict[str, Any] = {"module class": recipe.module_class, "engine": recipe.engine}
    facts |= {
        f"parameter {n}": f"{p.shape} {p.dtype} {'trained' if p.trainable else 'frozen'}"
        for n, p in recipe.params.items()
    }
    facts |= {f"buffer {n}": f"{b.shape} {b.dtype}" for n, b in recipe.buffers.items()}
    facts |= {"units": [list(unit.modules) for unit in recipe.units], "recipe": recipe.fingerprint}
    facts |= {f"dtypes of {n}": [p.storage, p.compute, p.reduce] for n, p in recipe.params.items()}
    agree_on(
        world.agreement,
        facts,
        what="the ranks' modules",
        fix="build the same module with the same options on every rank",
    )


def _with_note(recipe: Recipe, note: Note) -> Recipe:
    if note.why.startswith("rank0 (seeded"):
        warnings.warn(f"init: {note.why}", stacklevel=3)
    return msgspec.structs.replace(recipe, notes=(*recipe.notes, note))
