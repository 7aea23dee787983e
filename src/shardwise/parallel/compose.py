"""``sw.parallelize``: from any module and a world to the same module, sharded. The only place that knows the order.

Build (on meta, or on rank 0) and let techniques change the structure -> read the anatomy -> make the recipe -> check
that all ranks made the same -> apply it -> write the values. Everything that can be refused is refused before the first
byte is moved.
"""

import dataclasses
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from torch import nn

from shardwise._torch.wrong_rules import mend_rules
from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.config.record import Options
from shardwise.errors import ConfigError, PlanError
from shardwise.model import read_anatomy
from shardwise.model.calling import cropped, run_on
from shardwise.model.large_pages import in_large_pages
from shardwise.model.tensors import follow_parameters, tensors_of
from shardwise.parallel.backwards import watch_backwards
from shardwise.parallel.compose_checks import (
    _first_difference,
    refuse_no_world,
    refuse_other_shapes,
    refuse_wrapped,
    warn_of_unregistered,
)
from shardwise.parallel.copies import refuse_other_copies
from shardwise.parallel.init.sources import all_tensors, build_with_source
from shardwise.parallel.lost_writes import refuse_lost_writes
from shardwise.parallel.module_guards import watch_modules
from shardwise.parallel.named_gradients import watch_named_gradients
from shardwise.parallel.other_shards import watch_state_dicts
from shardwise.parallel.plain_parts import plain_parts, refuse_states_of_parts
from shardwise.parallel.runtime import Runtime, attach, runtime_of
from shardwise.parallel.same_modules import refuse_other_modules, refuse_other_recipes
from shardwise.parallel.shown_parts import show_parts
from shardwise.parallel.stale import mark_stale
from shardwise.parallel.step_checks import watch_steps
from shardwise.parallel.torch_check import check_torch
from shardwise.parallel.unfit_modules import (
    own_state_of,
    refuse_embeddings,
    refuse_held_accumulators,
    refuse_numbers_of_parts,
    refuse_unfit_parts,
)
from shardwise.recipe import Recipe, fingerprint_of
from shardwise.techniques import TECHNIQUES, Parallel, fold
from shardwise.techniques.fold import acts, adjusted, make_recipe, prepared, probe
from shardwise.techniques.technique import Example
from shardwise.world import World

M = TypeVar("M", bound=nn.Module)


@public_call({"world": 'world = sw.init("dp_shard=-1"), and sw.parallelize(module, world)'})
def parallelize(
    model: M | Callable[[], M],
    world: World,
    *,
    example: Mapping[str, Any] | None = None,
    init: str | None = None,
    **options: Any,
) -> M:
    """Shards a module over the ranks of ``world`` and returns it: the same object, names and methods.

    Under FSDP2 its class becomes a subclass of its original class. All ranks must call it, with the same arguments.
    Build the optimizer afterwards.

    Args:
        model: a callable that builds the module (built on meta: no rank ever holds all of it), or a module.
        world: from :func:`shardwise.init`.
        example: one micro-batch: by its names what forward takes, tensors, numbers, and containers of them. It is run once to see in which order blocks are entered: neighbours in that order are
            merged into units; without it, merging uses the order of their lists, and gathering the order in which the
            model first runs. With ``tp`` in the layout a copy of the model is run on it to find what can be cut, on 16
            of its samples, or 2 x 64 of its tokens (fewer if it is wide); without it, on tokens, if the forward shows that it takes some.
        init: ``"seeded"``: values are functions of (world.seed, name), made by each rank for itself, the same under
            every layout; default for a callable. ``"rank0"``: rank 0's values, scattered; default for a module, and the
            fallback of seeded where a constructor cannot be recorded (the recipe's notes say why). ``"load"``: memory
            only; :func:`~shardwise.load_weights` loads the values, and what it does not load is seeded then.
        options: those of the techniques.

    Warns:
        UserWarning: gradients that are summed in bf16 or fp16, and inputs of units that lose digits where
            ``Precision(cast_inputs="units")`` casts them, by name.

    Raises:
        ConfigError: an option that does not exist, or whose value is neither a word for it nor its record.
        UsageError: the module is sharded or wrapped already, or is on meta without a callable to build it.
        PlanError: options that name no module, or a tensor that nothing initialises.
        UnsupportedError: a module that cannot be sharded safely, by name; one that does not run on the example; a torch
            that does not do what Shardwise relies on.
        RankError: ranks whose modules or options differ.

    Example:
        >>> model = parallelize(lambda: nn.Linear(8, 8), world)  # doctest: +SKIP
    """
    refuse_no_world(world)
    if example is not None and not isinstance(example, Mapping):
        raise ConfigError(
            f"parallelize(example={type(example).__name__})",
            why="an example is one micro-batch: what forward takes, by name",
            fix='example={"x": x}, with the names that forward has; of a window or a loader the first micro-batch: next(iter(loader))[0]',
        )
    return shard(model, world, Parallel.of(**options), init=init, example=example)


def _say_options(function: Callable[..., Any]) -> None:
    """Puts the options of all techniques into a function's signature and docstring, in place of ``options``."""
    options = [option for technique in TECHNIQUES for option in technique.options]
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for option in options:
        default = None if isinstance(option.default, Options) else option.default
        named.append(
            inspect.Parameter(option.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.takes)
        )
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    told = (
        textwrap.fill(f"{o.key}: {o.help}", 128, initial_indent=" " * 8, subsequent_indent=" " * 12) for o in options
    )
    before, _, after = (function.__doc__ or "").partition("        options: those of the techniques.")
    function.__doc__ = before + "\n".join(told) + after


_say_options(parallelize)


def shard(
    model: Any,
    world: World,
    parallel: Any,
    *,
    init: str | None = None,
    example: Mapping[str, Any] | None = None,
    runs: Example | None = None,
    is_prepared: bool = False,
) -> Any:
    """:func:`parallelize` with its options as one record.

    Args:
        model: as in :func:`parallelize`.
        world: as in :func:`parallelize`.
        parallel: a ``Parallel``; its layout is not read: the world has it.
        init: as in :func:`parallelize`; None: the value in ``parallel``.
        example: as in :func:`parallelize`.
        runs: runs copies of the module, for probes; None: on ``example``, or on tokens.
        is_prepared: the techniques have changed the structure of the module already.
    """
    check_torch(world)
    given = parallel.options()
    for technique in TECHNIQUES:
        technique.settled(given)  # raises for invalid options before the module is built
    module, source = build_with_source(
        model if is_prepared else _with_prepared(model, parallel, world), world, init or parallel.init
    )
    refuse_wrapped(module)
    if world.size > 1:
        refuse_embeddings(module)  # before a technique runs a copy
    if world.is_main:
        warn_of_unregistered(module)
    read = read_anatomy(module, example=example)
    refuse_other_modules(module, read, example, world)
    anatomy = adjusted(module, read, parallel)
    runs = dataclasses.replace(runs or _runs_on(example, module), within=functools.partial(source.with_indices, module))
    recipe = make_recipe(anatomy, world.layout, facts=probe(module, world, runs), **given)
    for act in acts():
        act.check(module, recipe, world)
    if source.note is not None:
        recipe = msgspec.structs.replace(recipe, notes=(*recipe.notes, source.note))
    refuse_unfit_parts(module, recipe, world)
    refuse_other_recipes(recipe, world)
    source.release(module, recipe)
    without_memory = {name for name, tensor in all_tensors(module).items() if tensor.device.type == "meta"}
    for note in recipe.notes:
        if note.warns and world.is_main:
            warnings.warn(
                f"{note.option.partition('.')[0] if note.option else note.name}: {note.why}",
                stacklevel=level_of_caller(),
            )
    runtime = apply_recipe(module, recipe, world)
    in_large_pages(tensor for name, tensor in runtime.local_tensors().items() if name in without_memory)
    source.write(runtime)
    return module


def _runs_on(example: Mapping[str, Any] | None, module: nn.Module) -> Example:
    """Runs on a part of the example, or on all of it where the module does not run on the part."""
    part = None if example is None else cropped(example, module)
    return Example(run_on(example)) if part is None else Example(run_on(part), otherwise=run_on(example))


def apply_recipe(module: nn.Module, recipe: Recipe, world: World) -> Runtime:
    """Applies ``recipe`` to ``module``, in place: shards it and allocates its tensors. Values are not written.

    Raises:
        PlanError: the recipe was made for another module or another layout.
    """
    anatomy = read_anatomy(module)
    found = fingerprint_of(anatomy)
    if found != recipe.fingerprint or recipe.layout != world.layout.all_degrees:
        raise PlanError(
            f"a recipe for {recipe.module_class} ({recipe.fingerprint}) on {recipe.grid}",
            why=f"this module is {type(module).__name__} ({found}) on {world.layout}: names, shapes, dtypes or ties differ",
            fix="make the recipe from this module and layout: parallelize does",
            name=_first_difference(anatomy, recipe),
        )
    fold.check_entries(recipe)
    refuse_wrapped(module)
    for act in acts():
        act.check(module, recipe, world)
    refuse_unfit_parts(module, recipe, world)
    own_state = own_state_of(module, recipe)
    given_parameters = tensors_of(module, "_parameters")
    for act in acts():
        act.inside(module, recipe, world)
    before = tensors_of(module, "_parameters")
    engine = next(engine for act in acts() if (engine := act.shard(module, recipe, world)) is not None)
    if recipe.is_cut:
        watch_state_dicts(module)
        refuse_numbers_of_parts(world)
        refuse_lost_writes(world)
        mend_rules()
    for act in acts():
        act.around(module, recipe, world)
    runtime = Runtime(module, recipe, world, engine)
    refuse_other_shapes(runtime)
    runtime.explainers += [act.explain for act in acts()]
    follow_parameters(module, before, runtime.parameters)
    for replaced in (given_parameters, before):
        mark_stale(replaced, runtime.parameters)
    watch_steps(runtime)
    watch_backwards()
    watch_named_gradients()
    attach(module, runtime)
    watch_modules(runtime)
    refuse_states_of_parts(module, recipe)
    show_parts(runtime, plain_parts(recipe))
    runtime.before_first_step.append(functools.partial(refuse_held_accumulators, runtime))
    runtime.before_first_step.append(functools.partial(refuse_other_copies, runtime))
    for act in acts():
        act.begin(runtime)
    if own_state is not None:
        own_state.begin(module)
        runtime.own_state = own_state
    return runtime


@public_call()
def describe(model: nn.Module) -> str:
    """The recipe of a sharded module as a table, with the reason of every choice, and what was chosen since training
    began. Any rank may call it alone.

    Args:
        model: from :func:`parallelize`.
    """
    return fold.describe(recipe_of(model)) + "".join(
        f"{name}: {text}\n" for name, value in runtime_of(model).chosen.items() if (text := str(value))
    )


@public_call()
def recipe_of(model: nn.Module) -> Recipe:
    """The recipe by which a model was sharded.

    Args:
        model: from :func:`parallelize`.
    """
    return runtime_of(model).recipe


@public_call()
def world_of(model: nn.Module) -> World:
    """The world over which a model was sharded.

    Args:
        model: from :func:`parallelize`.
    """
    return runtime_of(model).world


# ---- checks and moves -----------------------------------------------------------------------------------------


def _with_prepared(model: Any, parallel: Any, world: World) -> Any:
    """``model`` with its structure changed by the techniques; a callable stays one, so that it is built on meta."""
    if isinstance(model, nn.Module):
        return prepared(model, parallel, world, world.device)
    return (lambda: prepared(model(), parallel, world, world.device)) if callable(model) else model
