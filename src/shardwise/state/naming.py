"""What a model's tensors are called in its files: as its modules are, or as its library or the task around it has
it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from shardwise.model.names import unwrap_module
from shardwise.parallel import Runtime
from shardwise.state.hugging_face import stored_views
from shardwise.state.views import View, view_of_all

__all__ = ["Naming", "naming_of", "naming_of_source", "shapes_of"]

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Naming:
    """How names in files and canonical names go together.

    Attributes:
        module: whose files these are: the root, or the model in a module that only adds a loss to it.
        prefix: what the canonical names of ``module``'s tensors begin with; "" for the root.
        views: name in files -> which part of which tensor, by canonical name; of every tensor.
    """

    module: nn.Module
    prefix: str
    views: Mapping[str, View]

    def in_files(self, name: str) -> str:
        """The name of ``module``'s own for a canonical name."""
        return name.removeprefix(self.prefix)


def naming_of(root: nn.Module, shapes: Shapes) -> Naming:
    """How the tensors of ``shapes`` are called in the files that are written.

    A ``TaskModel`` is trained so that its model can be used without it: its files are the model's, and what the loss
    owns lies beside under names of its own. Where two tensors would share a name, they keep their canonical ones.
    """
    return next(_namings(root, shapes))


def naming_of_source(root: nn.Module, shapes: Shapes, names: Iterable[str]) -> Naming:
    """The same for files that are there, in which a task's tensors may have canonical names too."""
    there = set(names)
    # The first of equals: the one that is written.
    return max(_namings(root, shapes), key=lambda naming: len(there & naming.views.keys()))


def _namings(root: nn.Module, shapes: Shapes) -> Iterator[Naming]:
    within, prefix = root, ""
    while isinstance(path := getattr(type(within), "_weights_of", None), str):
        within, prefix = unwrap_module(within.get_submodule(path)), f"{prefix}{path}."
    if prefix and (naming := _naming(within, prefix, shapes)) is not None:
        yield naming
    naming = _naming(root, "", shapes)
    assert naming is not None  # nothing lies beside the root
    yield naming


def _naming(module: nn.Module, prefix: str, shapes: Shapes) -> Naming | None:
    """None if a tensor outside of ``module`` has the name of one of its own."""
    own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    views = stored_views(module, own) or {name: view_of_all(name, shape) for name, shape in own.items()}
    if prefix:
        views = {name: replace(view, name=prefix + view.name) for name, view in views.items()}
    beside = {n: view_of_all(n, shape) for n, shape in shapes.items() if not n.startswith(prefix)}
    return None if beside.keys() & (views.keys() | own.keys()) else Naming(module, prefix, {**views, **beside})


def shapes_of(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """Of every parameter and persistent buffer, in the recipe's order."""
    recipe = runtime.recipe
    found = {name: param.shape for name, param in recipe.params.items()}
    return found | {name: buffer.shape for name, buffer in recipe.buffers.items() if buffer.persistent}
