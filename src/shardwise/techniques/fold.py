"""Applies all techniques in the order of their rows: options to recipe, recipe to module. Names no technique."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import PlanError
from shardwise.layout import Layout
from shardwise.recipe import Anatomy, Draft, Recipe, describe_recipe
from shardwise.techniques import MESH_AXES, TECHNIQUES, Parallel
from shardwise.techniques.technique import Act, Example, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.world import World

Facts = Callable[[Technique, Draft, Mapping[str, Any]], Mapping[str, Any]]


def make_recipe(anatomy: Anatomy, layout: Layout, *, facts: Facts | None = None, **options: Any) -> Recipe:
    """The recipe of a module under a layout: the same on every rank.

    Args:
        anatomy: the structure that was read from the module.
        layout: the layout of the ranks.
        facts: returns what a technique's probe found in the module; None: there is no module to probe.
        options: keyword arguments of ``parallelize``.

    Raises:
        PlanError: options that match no module or undo each other, or a number of ranks to reshard over that does not
            divide dp_shard.
        UnsupportedError: an option that is not supported under this layout.
    """
    _refuse_unsaid_axes(layout)
    given = Parallel.of(**options).options()
    chosen = {technique.name: technique.settled(given) for technique in TECHNIQUES}
    draft = Draft(anatomy, layout)
    for technique in TECHNIQUES:
        found = facts(technique, draft, chosen[technique.name]) if facts is not None else {}
        if technique.rule is not None:
            technique.rule(draft, found, **chosen[technique.name])
    for technique in TECHNIQUES:
        if technique.edit is not None:
            technique.edit(draft, **chosen[technique.name])
    return draft.recipe()


def _refuse_unsaid_axes(layout: Layout) -> None:
    """Raises PlanError for an axis of more than one rank of which no technique says what its ranks have of a batch, or says what
    contradicts the layout: gradients would be summed over the wrong ranks, without an error."""
    for name in (axis for axis, degree in layout.all_degrees.items() if degree > 1):
        axis = MESH_AXES.get(name)
        wrong = "no technique says it" if axis is None else axis.contradiction()
        if wrong is not None:
            said = "" if axis is None else f' of which a technique says batch="{axis.batch}"'
            raise PlanError(
                f"layout {layout}: {name}={layout.degree(name)}{said}",
                why=f"what the ranks along an axis have of a batch decides over whom losses and gradients are summed, and {wrong}",
                fix=f'say it in TECHNIQUE of techniques/NAME/__init__.py: axes=(MeshAxis(name="{name}", batch="same"),), or another of its words',
            )


def probe(module: "nn.Module", world: "World", example: Example) -> Facts:
    """A function that runs each technique's probe on ``module``. ``example``: runs copies of it."""

    def facts(technique: Technique, draft: Draft, options: Mapping[str, Any]) -> Mapping[str, Any]:
        ask = technique.load("probe")
        return ask(module, example, draft, world, **options) if ask is not None else {}

    return facts


def prepared(
    module: "nn.Module", parallel: Any, world: "World | None" = None, device: "torch.device | None" = None
) -> "nn.Module":
    """``module`` after every technique has changed its structure. ``world`` is None, and ``device`` the CPU, in one
    plain process."""
    given = parallel.options()
    if not hasattr(module, "_modules"):
        return module  # what is no module is refused with what was given
    for technique in TECHNIQUES:
        prepare = technique.load("prepare")
        if prepare is not None:
            module = prepare(module, world, device, **technique.settled(given))
    return module


def with_values_of_proof(module: "nn.Module") -> "nn.Module":
    """``module``, whose tensors have values with which a comparison of two runs sees all gradients; see
    :attr:`~shardwise.techniques.technique.Technique.values_of_proof`."""
    for technique in TECHNIQUES:
        if (draw := technique.load("values_of_proof")) is not None:
            draw(module)
    return module


@dataclass(frozen=True)
class Prepared:
    """A callable that builds a module for a comparison, and applies the options that change its structure, before casts and sharding."""

    build: Callable[[], "nn.Module"]
    parallel: Any

    def __call__(self) -> "nn.Module":
        return with_values_of_proof(prepared(self.build(), self.parallel))


def adjusted(module: "nn.Module", anatomy: Anatomy, parallel: Any) -> Anatomy:
    """Lets every technique change the module's tensors, and returns the resulting anatomy."""
    given = parallel.options()
    for technique in TECHNIQUES:
        adjust = technique.load("adjust")
        if adjust is not None:
            anatomy = adjust(module, anatomy, **technique.settled(given))
    return anatomy


@cache
def acts() -> tuple[Act, ...]:
    """The :class:`Act` of each technique that has one, in order."""
    return tuple(act() for technique in TECHNIQUES if (act := technique.load("act")) is not None)


def own_names(recipe: Recipe) -> list[str]:
    """The parameters that techniques have added to the user's module."""
    return [name for act in acts() for name in act.own_names(recipe)]


def describe(recipe: Recipe) -> str:
    """A recipe as text, with the lines of each technique at its head."""
    return describe_recipe(recipe, [line for technique in TECHNIQUES for line in technique.lines(recipe)])


def meaning(recipe: Recipe) -> dict[str, Any]:
    """What the values of techniques' own parameters mean, of all techniques; see :meth:`~shardwise.techniques.technique.Act.meaning`."""
    return {key: value for act in acts() for key, value in act.meaning(recipe).items()}


def check_entries(recipe: Recipe) -> None:
    """Raises PlanError if a recipe has data for an unknown technique, or data that the technique does not accept."""
    known = {technique.name: technique.entry for technique in TECHNIQUES}
    for name, entry in recipe.techniques.items():
        cls = known.get(name)
        try:
            if cls is None:
                raise msgspec.ValidationError("this Shardwise has no such technique with an entry")
            recipe.entry(name, cls)
        except msgspec.ValidationError as error:
            raise PlanError(
                f"a recipe with techniques[{name!r}] = {entry!r}",
                why=str(error),
                fix="use the text that Recipe.to_json wrote",
            ) from None


def check_early(parallel: Any, origins: Mapping[str, str]) -> None:
    """Refuses, before any process is started, mistakes that can be found without torch. ``origins``: where each dotted
    key was given."""
    for technique in TECHNIQUES:
        technique.check_early(origins, **{option.key: getattr(parallel, option.key) for option in technique.options})


def own_draws(parallel: Any, layout: Layout) -> str:
    """Why a forward on the ranks draws other random numbers than in one process, as text; "" if it draws the same."""
    axes = [name for name, axis in MESH_AXES.items() if axis.batch != "samples" and layout.degree(name) > 1]
    words = [f"ranks along {name} draw numbers of their own for their parts" for name in axes]
    given = parallel.options()
    words += [word for each in TECHNIQUES if (word := each.own_draws(**each.settled(given)))]
    return ", ".join(words)


def options_of_proof(parallel: Any, device: str, times: int) -> tuple[Any, list[str]]:
    """The options with which a run on ``device`` (a type) is proved in float64 on the CPU, and texts about those left
    out. A number of float64 takes ``times`` the bytes that it takes in the run. :func:`prepared` has changed the module's structure already."""
    left, words = [], []
    for technique in TECHNIQUES:
        why = technique.leaves_proof(device)
        if why is None:
            continue
        left += [option.key for option in technique.options]
        if why and any(technique.settled(parallel.options()).values()):
            words.append(why)
    given, changed = parallel.options(), {}
    for technique in TECHNIQUES:
        changed |= technique.in_proof(times, **technique.settled(given))
    return msgspec.structs.replace(parallel.without(left), init=None, **changed), words
