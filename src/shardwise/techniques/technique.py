"""What a technique is: one folder in ``techniques``, and one row in its ``__init__.py``.

A folder ``techniques/NAME`` has a declaration (:class:`Technique`) in ``__init__.py``, and those of these files that it
needs:

``options.py``
    the options for users, as frozen records. Without torch.
``rule.py``
    what it adds to the recipe: dtypes, units, cuts, edits, notes. Without torch: reads the
    :class:`~shardwise.recipe.draft.Draft`.
``prepare.py``
    if it changes the structure of the module before the module is read. With torch, like all files below.
``adjust.py``
    if it changes existing tensors (their storage dtype).
``probe.py``
    if its rule needs facts that only the module itself can give, as JSON data.
``act.py``
    what it does to the module, by the recipe alone: an :class:`Act`.

Files with torch are named by text and loaded when they are first used, so that the command line starts without torch.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from shardwise.errors import UnsupportedError, UsageError
from shardwise.layout import CARVED, DERIVED_AXES, Layout
from shardwise.recipe import Recipe
from shardwise.recipe.records import Record

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.errors import ShardwiseError
    from shardwise.recipe import Slice
    from shardwise.recipe.boxes import Box
    from shardwise.world import World

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword of ``parallelize``, which is a key below ``parallel`` in a file.

    Attributes:
        key: the keyword.
        hint: its type in a file, with a description: ``Annotated[..., doc(...)]``.
        default: the value if the key is not given.
        help: its text in the docstring of ``parallelize``.
        takes: the types of a value in Python, as the signature shows them.
        settle: converts a value to the record that it stands for, when it is given (raises ConfigError) and when it is used.
        from_python: converts what only Python can give (an object of torch's, a class) to what a file can hold; other
            values unchanged.
        record: the class that a value must have in Python, if there are no words for one; and an example of its
            arguments.
        holds_functions: a list of it may hold functions and records, given from Python.
    """

    key: str
    hint: Any
    default: Any = None
    help: str
    takes: str
    settle: Callable[[Any], Any] = lambda value: value
    from_python: Callable[[Any], Any] = lambda value: value
    record: tuple[type, str] | None = None
    holds_functions: bool = False

    def check(self, value: Any) -> None:
        """Raises ConfigError for a value that stands for no record; functions may not be registered yet."""
        if not self.holds_functions:
            self.settle(value)


Batch = Literal["samples", "positions", "same", "stage"]


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """A mesh axis that a technique uses, and what its ranks are to each other.

    Attributes:
        name: of the axis.
        batch: what the ranks along it have of a batch: other ``"samples"``; other ``"positions"`` of the same samples; all of it, the
            ``"same"``; or a ``"stage"``, the same samples in other layers. It says over which ranks gradients and the loss are summed
            (``shardwise.layout.DERIVED_AXES``), so a layout with several ranks on an axis of which nothing says it is refused.
            None: an axis that is carved out of another, which says it.
        cuts_matrices: a rank has a part of a matrix, so that an optimizer that mixes the elements of one cannot be used.
    """

    name: str
    batch: Batch | None
    cuts_matrices: bool = False

    def contradiction(self) -> str | None:
        """What is wrong with ``batch``, given over which axes the layout reads samples and sums the loss; None: nothing."""
        if self.name in CARVED:
            return None if self.batch is None else f"it is carved out of {CARVED[self.name][0]}, whose ranks say it"
        is_read, is_summed = (self.name in DERIVED_AXES[of] for of in ("dp", "loss"))
        fit = ("samples",) if is_read else ("positions",) if is_summed else ("same", "stage")
        return None if self.batch in fit else f"of its ranks the layout takes {' or '.join(map(repr, fit))}"


@dataclass(frozen=True)
class Example:
    """Runs copies of a module, for probes that look at what its code does.

    Attributes:
        run: ``run(copy)`` runs a copy of the module on an example, and returns its output.
        otherwise: the same on another, where ``run`` does not run; None: there is no other.
        within: makes a context in which the module's integers and booleans have values, on meta too. All ranks must
            enter it.
    """

    run: Callable[["nn.Module"], Any]
    otherwise: Callable[["nn.Module"], Any] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def shows(self, look: Callable[[Callable[["nn.Module"], Any]], Found]) -> Found:
        """What ``look(run)`` finds. To be called inside of ``within()``."""
        try:
            return look(self.run)
        except (UsageError, UnsupportedError):
            if self.otherwise is None:
                raise
            return look(self.otherwise)


class Whole(Protocol):
    """Computes something of full tensors, on rank 0, for all ranks, which must all call it."""

    def __call__(self, names: Sequence[str], compute: "Callable[..., Tensor]") -> "Tensor":
        """The result of ``compute`` with the full values of these parameters, on the CPU of every rank."""


Merge = Callable[["Iterable[tuple[tuple[slice, ...], Tensor]]"], None]
"""Merges into parts of a weight in place; each with where it is in the whole."""


@dataclass(frozen=True)
class AdapterFiles:
    """How adapters are stored without the model that they are beside.

    Attributes:
        keys: key in the file -> canonical name of the tensor; a tied one may be there twice.
        config: what the file beside it says about them, as JSON.
        check: raises for a directory of other adapters than the model's.
        beside: as ``keys``, of tensors of the model that others may write, and that are loaded if they are there.
        note: what another library would make of these files that is not meant; "": nothing.
    """

    keys: Mapping[str, str]
    config: Mapping[str, Any]
    check: Callable[[Path], None]
    beside: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True)
class StoredPart:
    """What a packed weight has in a file under one name.

    Attributes:
        shape: in the file.
        key: the model's tensor that has these bytes, in their order; None: ``values`` has them.
        values: the same on every rank.
    """

    shape: tuple[int, ...]
    key: str | None
    values: "Tensor | None" = None


class PackedTensor(Protocol):
    """A weight of the user's module that is stored as other tensors, packed; of which a rank has a part. The weight itself is no parameter:
    its name is that of plain values in files.

    ``read(box)`` gives plain values of the weight, on the CPU, in any floating dtype; ``local`` has what this rank stores, by name;
    ``place`` is where the values are, for messages.
    """

    @property
    def kind(self) -> str:
        """Of the packing: files of the same kind have the same bytes."""

    @property
    def parts(self) -> Mapping[str, str]:
        """Role -> canonical name of the parameter or buffer that it is stored in."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def pieces(self, rank: int) -> "list[tuple[Slice, tuple[int, ...]]]":
        """The pieces of the weight that a rank has, each with all ranks that have it."""

    def measure(self, read: "Callable[[Box], Tensor]", local: "Mapping[str, Tensor]", place: str) -> "Tensor":
        """Packs as far as this rank's own values allow, and returns what must be known of the whole weight: the elementwise largest of
        all ranks' is given to :meth:`encode`."""

    def encode(
        self, read: "Callable[[Box], Tensor]", local: "Mapping[str, Tensor]", maxima: "Tensor", place: str
    ) -> None:
        """Writes what this rank stores of the weight."""

    def encode_whole(self, read: "Callable[[Box], Tensor]", place: str) -> "dict[str, Tensor]":
        """Canonical name -> full value of each part."""

    def decode(self, values: "Mapping[str, Tensor]") -> "Tensor":
        """The weight, of the full values of its parts by canonical name; rounded once to its dtype."""

    def values_here(self, whole: Whole, local: "Mapping[str, Tensor]") -> "Callable[[], Tensor]":
        """Computes this rank's part of the weight, on the CPU. All ranks call this; the function only those that want it."""

    def stored(self, local: "Mapping[str, Tensor]") -> Mapping[str, StoredPart]:
        """Suffix of the weight's name -> what a packed file has under it."""


@dataclass(frozen=True, eq=False)
class PackedInFile(ABC):
    """A packed weight in files of another library.

    Attributes:
        name: of the weight in the source.
        shape, dtype: of its plain values.
        kind: as of :class:`PackedTensor`.
        parts: role -> the name in the source, and the shape that these bytes have in a model.
        made: role -> values that were read already.
        beside: names in the source that belong to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    parts: Mapping[str, tuple[str, tuple[int, ...]]]
    made: "Mapping[str, Tensor]"
    beside: tuple[str, ...]

    @abstractmethod
    def decode(self, box: "Box", read: "Callable[[str, Box | None], Tensor]") -> "Tensor":
        """The plain values of a box; ``read(role, box)`` reads a box of a part (None: all)."""


class Act:
    """What a technique does to a module, by the recipe. Methods that are not overridden do nothing."""

    def check(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """Raises for what is not supported, by name, before anything is changed."""

    def inside(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """Changes the module in place before it is sharded: inside the hooks that gather its parameters."""

    def shard(self, module: "nn.Module", recipe: Recipe, world: "World") -> Any:
        """Makes the module compute with what the recipe gives each rank, in place, and returns what sums its gradients: a
        :class:`~shardwise.parallel.protocols.Engine`. None: that is for a technique after this one; ``data`` does it for all
        recipes."""
        return None

    def around(self, module: "nn.Module", recipe: Recipe, world: "World") -> None:
        """Changes the module in place after it is sharded: around those hooks."""

    def begin(self, runtime: Any) -> None:
        """Called when the module is sharded: adds what runs in windows to its
        :class:`~shardwise.parallel.runtime.Runtime`: ``schedule``, in which order forwards and backwards run; ``for_forward`` and
        ``for_loss``, what of a micro-batch this rank's forward and loss get. Parameters of which each rank along an axis has a part of the
        gradient go into ``runtime.partial``: they are summed at the end of a window, once, and a forward that records
        gradients outside of one is then refused."""

    def own_names(self, recipe: Recipe) -> Sequence[str]:
        """Parameters that the technique has added to the user's module: a source of weights need not have them, but has either all of
        them or none."""
        return ()

    def meaning(self, recipe: Recipe) -> Mapping[str, Any]:
        """What the values of its own parameters mean beside their shapes, as JSON: a checkpoint is not loaded into a model where it is
        something else."""
        return {}

    def loaded(self, runtime: Any, names: Collection[str], whole: "Whole") -> None:
        """Called on all ranks when the values of ``names`` have been loaded: sets those of its own parameters that follow from them and
        were not loaded."""

    def merged(self, runtime: Any, whole: "Whole") -> "Mapping[str, Merge]":
        """Weight of the user's module -> merges the technique's own parameters into this rank's pieces of it, in place: together they
        compute what the module computes. Called on all ranks; the functions are not."""
        return {}

    def codecs(self, runtime: Any) -> Mapping[str, PackedTensor]:
        """Weight of the user's module -> how it is stored, of those that the technique has packed."""
        return {}

    def packed_in(
        self,
        tensors: Mapping[str, Any],
        load: "Callable[[str], Tensor]",
        settings: Mapping[str, Any] | None,
        place: str,
    ) -> Mapping[str, PackedInFile]:
        """Name -> weight, of the packed weights of a source whose form it knows.

        Args:
            tensors: name -> what says ``shape``, ``dtype`` and ``num_bytes``.
            load: reads one, by name.
            settings: ``quantization_config`` of its config.json; None: there is none.
            place: where it is, for messages.
        """
        return {}

    def packed_names(self, names: Iterable[str]) -> Sequence[str]:
        """Those names of parts of packed weights, as a model has them, that no other tensor has."""
        return ()

    def packed_settings(self, runtime: Any, prefix: str) -> Mapping[str, Any]:
        """``quantization_config`` of config.json for files with packed weights; {}: it has packed none. ``prefix``: as for
        :meth:`adapter_files`."""
        return {}

    def adapter_files(self, runtime: Any, prefix: str) -> "AdapterFiles | None":
        """How its own parameters are stored without the model's; None: they are not. ``prefix``: of the names of the model within
        the module, which its files do not have."""
        return None

    def explain(self, error: BaseException) -> "ShardwiseError | None":
        """The ShardwiseError for an error of torch, if the technique knows its cause; else None."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A row of ``techniques``. Its functions get the technique's own options as keywords, settled to records.

    Attributes:
        name: of the folder, of its edits, and of its entry in a recipe.
        options: the options for users.
        axes: mesh axes that it uses, each with what its ranks have of a batch. A bare name says nothing of it.
        layout_text: ``layout_text(layout)``: what its axes do with the model under a layout, for people; "" if nothing.
        entry: the record with its own data in a recipe; None: it has none.
        rule: ``rule(draft, facts, **options)``: sets dtypes, units, cuts. ``facts`` is what the probe returned; {}
            without one.
        edit: ``edit(draft, **options)``: adds changes to modules, when all units and cuts are known.
        lines: ``lines(recipe)``: its lines at the head of ``describe``.
        prepare: place of ``prepare(module, world, device, **options) -> module``, called before anything is read. World
            is None in the one plain process of ``verify``.
        values_of_proof: place of ``values_of_proof(module)``: draws what the technique lets begin at 0, in place, where two runs are to be
            compared: a gradient that is multiplied by it would be 0 in both.
        adjust: place of ``adjust(module, anatomy, **options) -> anatomy``: changes tensors in place.
        probe: place of ``probe(module, example, draft, world, **options) -> dict``, of JSON data. ``example`` is an
            :class:`Example`.
        act: place of an :class:`Act`.
        check_early: ``check_early(origins, **options)``: refuses, before a process is started, mistakes that can be
            found without torch. ``origins``: where each dotted key was given. The options are as given, words among
            them.
        leaves_proof: from the type of a run's device to the reason why the proof of a run, in float64 on the CPU, is
            made without this technique: a text to show, or "" if there is nothing to show; None: it is made with it.
        in_proof: ``in_proof(times, **options)``: its options that are others in that proof, because they are in bytes:
            a number of float64 takes ``times`` as many as in the run.
        without: the text of ``shardwise verify`` for users who give its options; "": verify accepts them.
    """

    name: str
    options: tuple[Option, ...]
    axes: tuple[MeshAxis | str, ...] = ()
    layout_text: Callable[[Layout], str] = lambda _: ""
    entry: type[Record] | None = None
    rule: Callable[..., None] | None = None
    edit: Callable[..., None] | None = None
    lines: Callable[[Recipe], list[str]] = lambda _: []
    prepare: str = ""
    values_of_proof: str = ""
    adjust: str = ""
    probe: str = ""
    act: str = ""
    check_early: Callable[..., None] = lambda _origins, **_: None
    leaves_proof: Callable[[str], str | None] = lambda _: None
    in_proof: Callable[..., Mapping[str, Any]] = lambda _times, **_: {}
    without: str = ""

    def load(self, part: str) -> Any:
        """The object that the attribute ``part`` ("prepare", "values_of_proof", "adjust", "probe", "act") names; None: it is empty."""
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(module), name) if module else None

    def settled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its own options, taken from those of all techniques, as the records that they stand for."""
        return {option.key: option.settle(given[option.key]) for option in self.options}
