"""Stored tensors that are parts of a model's tensors: some libraries' files store separately what a module has as
one."""

from dataclasses import dataclass

from torch import Tensor

from shardwise.recipe.boxes import Box, common, index_of, row_strides, whole
from shardwise.state.files import OpenFiles
from shardwise.state.stored import Chunk, TensorSource


@dataclass(frozen=True)
class View:
    """A stored tensor as a part of a model's tensor: ``box`` of tensor ``name``, with the model's ``dims`` in that
    order; the other dims have size 1 in the box."""

    name: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.box.sizes[dim] for dim in self.dims)

    def to_stored(self, box: Box) -> Box:
        """Converts a box of the model's tensor, inside the view's box, to the stored tensor's dims."""
        inner = box.within(self.box)
        return Box(tuple(inner.starts[dim] for dim in self.dims), tuple(inner.sizes[dim] for dim in self.dims))

    def turned(self, values: Tensor) -> Tensor:
        """The values of a box of the model's tensor with the stored tensor's dims: a view of ``values``."""
        others = [dim for dim in range(values.dim()) if dim not in self.dims]
        return values.permute((*self.dims, *others))[(..., *(0 for _ in others))]


def view_of_all(name: str, shape: tuple[int, ...]) -> View:
    """The view for a tensor that is stored as the model has it."""
    return View(name, whole(shape), tuple(range(len(shape))))


def view_at(
    name: str, shape: tuple[int, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> View | None:
    """The view at ``offset`` of a row-major tensor of ``shape`` with these sizes and strides, all in elements; None if
    it is not a box of that tensor."""
    steps = row_strides(shape)
    starts = []
    for step, size in zip(steps, shape, strict=True):
        starts.append(offset // step if size else 0)
        offset -= starts[-1] * step
    boxed, dims = [1] * len(shape), []
    for size, stride in zip(sizes, strides, strict=True):
        fits = [d for d, step in enumerate(steps) if step == stride and d not in dims and starts[d] + size <= shape[d]]
        if not fits:
            return None
        # A dim of size 1 has the same stride as the next one: take the longest.
        dim = max(fits, key=lambda d: shape[d])
        dims.append(dim)
        boxed[dim] = size
    return View(name, Box(tuple(starts), tuple(boxed)), tuple(dims)) if offset == 0 else None


@dataclass(frozen=True, eq=False)
class Assembled(TensorSource):
    """A tensor of the model that is stored in several parts, which tile it."""

    parts: tuple[tuple[View, TensorSource], ...]

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return tuple(chunk for _, stored in self.parts for chunk in stored.origins)

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        for view, stored in self.parts:
            part = common(box, view.box)
            if part is not None:
                stored.read(view.to_stored(part), view.turned(out[index_of(part.within(box))]), files)
