"""The names of a model's tensors in its weight files: those of its modules, or those of its library or of the
``TaskModel`` around it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from shardwise.model.names import unwrap_module
from shardwise.model.peft_names import NamesOfPeft, inner_of_peft, names_of_peft
from shardwise.parallel import Runtime
from shardwise.state.hugging_face import stored_views
from shardwise.state.stored_parts import View, view_of_all

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Naming:
    """The relation between names in files and canonical names.

    Attributes:
        module: the module that the files are of: the root, or the model in a module that only adds a loss to it.
        prefix: prefix of the canonical names of ``module``'s tensors; "" for the root.
        views: name in files -> the part of a tensor (by canonical name) that it is; for every tensor.
        peft: what PEFT has put into canonical names, and is not in those of files.
    """

    module: nn.Module
    prefix: str
    views: Mapping[str, View]
    peft: NamesOfPeft

    def in_files(self, name: str) -> str:
        """The name in ``module`` of a tensor with a canonical name."""
        return self.peft.bare(name).removeprefix(self.prefix)


def naming_of(root: nn.Module, shapes: Shapes) -> Naming:
    """The names that the tensors of ``shapes`` get in written files.

    The model of a ``TaskModel`` is to be used without it: its files have the model's names, and the loss's tensors are
    next to them under their canonical names. If two tensors would share a name, all keep their canonical names.
    """
    return next(_namings(root, shapes))


def naming_of_source(root: nn.Module, shapes: Shapes, names: Iterable[str]) -> Naming:
    """The names in existing files, in which a task's tensors may also have canonical names; those that match most."""
    there = set(names)
    # max returns the first of equals: the one that naming_of uses for writing.
    return max(_namings(root, shapes), key=lambda naming: len(there & naming.views.keys()))


def _namings(root: nn.Module, shapes: Shapes) -> Iterator[Naming]:
    peft, within, prefix = names_of_peft(root), root, ""
    while isinstance(path := getattr(type(within), "_weights_of", None) or (peft and inner_of_peft(within)), str):
        within, prefix = unwrap_module(within.get_submodule(path)), f"{prefix}{path}."
    if (prefix or peft) and (naming := _naming(within, prefix, shapes, peft)) is not None:
        yield naming
    naming = _naming(root, "", shapes, NamesOfPeft())
    assert naming is not None  # no tensor is outside the root
    yield naming


def _naming(module: nn.Module, prefix: str, shapes: Shapes, peft: NamesOfPeft) -> Naming | None:
    """The naming for files of ``module``; None if a tensor outside of it has the name of one of its own."""
    names = {peft.bare(name).removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
    own = {bare: shapes[name] for bare, name in names.items()}
    views = stored_views(module, own) or {name: view_of_all(name, shape) for name, shape in own.items()}
    if prefix or peft:
        views = {name: replace(view, name=names[view.name]) for name, view in views.items()}
    beside = {n: view_of_all(n, shape) for n, shape in shapes.items() if not n.startswith(prefix)}
    return None if beside.keys() & (views.keys() | own.keys()) else Naming(module, prefix, {**views, **beside}, peft)


def shapes_of(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """The shapes of every parameter and persistent buffer, in the recipe's order."""
    found = {name: param.shape for name, param in runtime.recipe.params.items()}
    return found | {name: shape for name, (shape, _) in runtime.saved_buffers().items()}
