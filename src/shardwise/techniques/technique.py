"""What a technique is: one folder in ``techniques``, and one row in its ``__init__.py``.

A folder ``techniques/NAME`` has, besides its row's declaration (:class:`Technique`) in ``__init__.py``:

``options.py``
    what a user may choose, as frozen records. Without torch.
``rule.py``
    what the recipe says because of it: dtypes, units, cuts, edits, notes. Without torch: reads the :class:`~shardwise.recipe.draft.Draft`.
``prepare.py``
    where it changes the structure of the module before anything is known of it. With torch, as all below.
``adjust.py``
    where it changes tensors that are there (a dtype that is stored).
``probe.py``
    where its rule needs to know what only the module itself can tell: facts that JSON can hold.
``act.py``
    what it does to the module, by the recipe alone: an :class:`Act`.

Files with torch are named by their places and loaded when they are first used, so that the command line starts without it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.recipe import Recipe
from shardwise.recipe.records import Record

if TYPE_CHECKING:
    from torch import nn

    from shardwise.errors import ShardwiseError
    from shardwise.world import World

__all__ = ["Act", "Option", "Technique"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword of ``parallelize``, which is a key below ``parallel`` in a file.

    Attributes:
        key: the keyword.
        hint: its type in a file, with a description: ``Annotated[..., doc(...)]``.
        default: the value of a key that is not given.
        help: what the docstring of ``parallelize`` says of it.
        takes: the types of a value in Python, as its signature shows them.
        check: what is called with a value when it is given, and raises ConfigError.
        settle: from a value to the record that it stands for, when it is used.
        from_python: turns what only Python can give (an object of torch's, a class) into what a file can hold, or leaves it.
        record: the class of which a value must be in Python, where there is no word for one; and an example of its arguments.
        holds_functions: a list of it may hold functions and records, given from Python.
    """

    key: str
    hint: Any
    default: Any = None
    help: str
    takes: str
    check: Callable[[Any], object] = lambda _: None
    settle: Callable[[Any], Any] = lambda value: value
    from_python: Callable[[Any], Any] = lambda value: value
    record: tuple[type, str] | None = None
    holds_functions: bool = False


class Act:
    """What a technique does to a module, by the recipe. All that is not needed is left as it is here."""

    def check(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """Raises what cannot be carried out, by name, before anything is changed."""

    def inside(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """Changes the module in place before it is sharded: inside the hooks that gather its parameters."""

    def around(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """The same after it is sharded: around those hooks."""

    def begin(self, runtime: Any) -> None:
        """The module is sharded: adds what runs in windows to its :class:`~shardwise.parallel.runtime.Runtime`. Parameters of which each rank
        along an axis has a part of the gradient go into ``runtime.partial``: they are summed at the end of a window, once; a forward
        that records gradients outside of one is refused then."""

    def explain(self, error: BaseException) -> "ShardwiseError | None":
        """An error of torch's own in our words, where the technique knows what it comes from; else None."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A row of ``techniques``. Functions get the technique's own options as keywords, settled.

    Attributes:
        name: of the folder, of its edits, and of its entry in a recipe.
        options: what a user may choose.
        axes: mesh axes that it lays something over.
        entry: what belongs to it alone in a recipe, as a record; None: nothing does.
        rule: ``rule(draft, facts, **options)``: what tensors become: dtypes, units, cuts. ``facts`` is what the probe gave; {} without one.
        edit: ``edit(draft, **options)``: changes in the code, when all units and cuts are known.
        lines: ``lines(recipe)``: what ``describe`` says at its head.
        prepare: place of ``prepare(module, world, device, **options) -> module``, before anything is read. World is None in the one plain
            process of ``verify``.
        adjust: place of ``adjust(module, anatomy, **options) -> anatomy``: changes tensors in place.
        probe: place of ``probe(module, draft, world, **options) -> dict``, of what JSON can hold.
        act: place of an :class:`Act`.
        check_early: ``check_early(origins, **options)``: refuses, before a process is started, what can be seen without torch.
            ``origins``: where each dotted key was given. The options are as they were given here, words among them.
        leaves_proof: from the type of a run's device to why the proof of a run, which is in float64 on the CPU, is made without it: a
            text to show, or "" if there is nothing to say; None: it is made with it.
        without: what ``shardwise verify`` says to those who give its options; "": it takes them.
    """

    name: str
    options: tuple[Option, ...]
    axes: tuple[str, ...] = ()
    entry: type[Record] | None = None
    rule: Callable[..., None] | None = None
    edit: Callable[..., None] | None = None
    lines: Callable[[Recipe], list[str]] = lambda _: []
    prepare: str = ""
    adjust: str = ""
    probe: str = ""
    act: str = ""
    check_early: Callable[..., None] = lambda _origins, **_: None
    leaves_proof: Callable[[str], str | None] = lambda _: None
    without: str = ""

    def load(self, part: str) -> Any:
        """What the attribute ``part`` ("prepare", "adjust", "probe", "act") names; None: nothing is named."""
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(module), name) if module else None

    def settled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its options out of those of all techniques, as the records that they stand for."""
        return {option.key: option.settle(given[option.key]) for option in self.options}
