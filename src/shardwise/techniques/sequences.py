"""The sequences in the arguments of a model, and lengths at which it is run to learn how they may be cut."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.model.calling import by_name
from shardwise.model.names import own_attributes
from shardwise.model.pytrees import keyed_leaves, map_keyed
from shardwise.model.rows import Order, rows_of

_LENGTHS = 6  # of the best that are tried, and of the shortest

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences in the arguments of a model.

    Attributes:
        arguments: of one call, on the CPU.
        path: of the argument by which the length is known.
        dims: path -> dims of positions, of each argument that has some.
        length: of the sequences.
    """

    arguments: Arguments
    path: str
    dims: dict[str, tuple[int, ...]]
    length: int

    def of_length(self, length: int) -> Arguments:
        """The arguments with sequences of another length: cut off, or repeated with other values, as what is the same on all ranks would hide
        that they are mixed. Two samples at most."""

        def change(path: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            for dim in self.dims.get(path, ()):
                x = _of_length(x, dim, length)
            if 0 not in self.dims.get(path, ()) and x.dim() and x.shape[0] == self._num_samples:
                x = x[:2]
            return x.double() if x.is_floating_point() else x

        return map_keyed(change, self.arguments)  # type: ignore[no-any-return]

    @functools.cached_property
    def _num_samples(self) -> int:
        first = dict(keyed_leaves(self.arguments))[self.path]
        return int(first.shape[1 - self.dims[self.path][0]]) if first.dim() > 1 else 0


def _of_length(x: Tensor, dim: int, length: int) -> Tensor:
    """``x`` with another size of ``dim``. Each copy, or each sample where dim 0 may be that of samples, has values of its own; those of masks and
    flags are the same."""
    size = x.shape[dim]
    copies = [-(-length // size) if d == dim else 1 for d in range(x.dim())]
    x = x.repeat(copies).narrow(dim, 0, length).contiguous()  # as code may expect
    number = torch.arange(length, device=x.device) // (1 if dim == 0 else size)
    times = int(number[-1]) + 1
    if times == 1 or not x.numel() or x.dtype == torch.bool or x.is_complex():
        return x
    number = number.view([length if d == dim else 1 for d in range(x.dim())])
    if x.is_floating_point():
        is_mask = bool((x.eq(0) | x.eq(1) | x.isinf()).all())
        return x if is_mask else x * (1 + number / times).to(x.dtype)
    num = int(x.max()) + 1  # of values, from 0
    few = num // times  # values for each copy, none of which another one has
    if num <= 2:
        return x
    return torch.where(x < 0, x, x % few + few * number if few else (x + number) % num).to(x.dtype)


def sequences_in(arguments: Arguments) -> Iterator[Sequences]:
    """What the sequences in the arguments of a model may be: of its first tensor with two dims, dim 1, or dim 0."""
    tensors = [(path, x) for path, x in keyed_leaves(arguments) if isinstance(x, Tensor) and x.dim() > 1]
    for path, x in tensors[:1]:
        for dim in (1, 0):
            others = range(1, 99) if dim == 1 else range(1)
            dims = {
                name: tuple(d for d, size in enumerate(other.shape) if size == x.shape[dim] and d in others)
                for name, other in tensors
            }
            yield Sequences(arguments, path, {name: at for name, at in dims.items() if at}, x.shape[dim])


def lengths_of_proof(module: nn.Module, degree: int, order: Order, given: int, extra: int = 0) -> list[int]:
    """Lengths that no order divides, and that are no sizes of the model, so that dims of positions are known by them; the best ones first:
    some positions for each chunk, and no more than the ``given`` ones of the example, for which the model may have no place. To these the
    model adds ``extra`` ones."""
    numbers = _sizes_of(module)

    def is_apart(length: int) -> bool:
        return bool(length % (2 * degree)) and _is_no_size(length, numbers)

    def is_clear(length: int) -> bool:
        return _is_clear(length, numbers, degree, order)

    given += extra
    wanted, most = max(4 * degree + 1, 13) + extra, max(given, degree + 1 + extra)
    within = [*range(wanted, most + 1), *range(min(wanted - 1, most), degree + extra, -1)]
    beyond = range(max(wanted, most + 1), 4 * most + 40 * degree)
    found = [length for length in (*within, *beyond) if is_apart(length)]
    found.sort(key=lambda length: (not is_clear(length), length > given))  # stable
    # Behind the best, the shortest: a model may have places for few.
    return [*found[:_LENGTHS], *sorted(found[_LENGTHS:])[:_LENGTHS]]


def length_of_example(module: nn.Module, degree: int, order: Order, given: int) -> int | None:
    """The ``given`` length of the example, or the next shorter one that is no size of the model; None: there is none near it."""
    numbers = _sizes_of(module)
    lengths = range(given, max(degree, given * 3 // 4), -1)
    return next((n for n in lengths if _is_no_size(n, numbers) and _is_clear(n, numbers, degree, order)), None)


def _sizes_of(module: nn.Module) -> set[int]:
    """Sizes of a model, the samples that are run, and numbers that several modules have: not the number of a block."""
    ints = Counter(v for child in module.modules() for v in own_attributes(child).values() if type(v) is int)
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    return {*sizes, 2, *(value for value, times in ints.items() if times > 1)}


def _is_no_size(length: int, sizes: set[int]) -> bool:
    return not any(size % length == 0 for size in sizes if size)


def _is_clear(length: int, sizes: set[int], degree: int, order: Order) -> bool:
    """Whether no rank's number of rows is a size of the model."""
    return sizes.isdisjoint({len(rows) for rows in rows_of(length, degree, order)})


def constants_of(arguments: Any) -> dict[str, str]:
    """Path -> number, text or flag, as text, of the arguments of a model that are no tensors."""
    return {path: repr(x) for path, x in keyed_leaves(arguments) if isinstance(x, bool | int | float | str)}


class _Called(BaseException):
    """The model was called: with these arguments. Not an Exception, as user's code may catch those."""

    def __init__(self, args: Any, kwargs: Any):
        super().__init__()
        self.arguments = args, kwargs


def arguments_of(module: nn.Module, run: Callable[[nn.Module], Any]) -> Arguments:
    """The arguments that an example's ``run`` calls the model with. Nothing of the model is run."""

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Called(args, kwargs)

    handle = module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        run(module)
    except _Called as called:
        return by_name(module, *called.arguments)
    finally:
        handle.remove()
    raise UsageError(
        "an example with which the model was not called",
        why="what it is called with shows how its sequences may be cut",
        fix="let forward= call the model itself: model(...)",
    )
