"""Linear layers as a forward calls them, found by what is computed and not by the classes that they are in."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Role = tuple[Literal["out", "in"] | None, ...]
"""What lies along each dim of a tensor of a layer: its outputs, its inputs, or something else."""

BUFFER: Role = ()
"""Stands for a tensor of a layer function that is no parameter: all of it is on every rank."""


class Further(NamedTuple):
    """A further parameter of a layer: it is cut as the outputs, or the inputs, of the layer are."""

    name: str
    role: Role

    def dim(self, side: Literal["out", "in"]) -> int | None:
        """The dim along which the outputs, or inputs, lie; None: there is none."""
        return self.role.index(side) if side in self.role else None


LAYER_FUNCTIONS: dict[Callable[..., Tensor], tuple[Role, ...]] = {}
"""Functions ``f(x, weight, bias, *further, how, training)`` that are linear layers with further tensors -> the role of each of these.
``how`` is a frozen dataclass: ``out_dim``, the dim of the weight along which the outputs lie; ``dropout``, of its inputs in training;
``sum_over_inputs``, which sums over ranks of which each has a part of the inputs, or None; and ``packing``, a
:class:`~shardwise.model.nf4.Packing` where the weight is bytes, two inputs in each, or None. A tensor or the bias may be None.

Given the part of all its tensors that belongs to a part of the outputs, such a function must give that part; given what belongs to a part of the
inputs, and no bias, a part of the sum. The search for cuts shows it."""


class Layer(NamedTuple):
    """A linear layer or an embedding.

    Attributes:
        weight, bias: their canonical names; None: no bias, or one that is added outside of the layer's function.
        out_dim: the dim of the weight along which the outputs lie: 0 of nn.Linear; 1 of ``x @ weight`` and embeddings.
        is_embedding: its inputs are indices.
        padding_idx: of an embedding: the row that gets no gradient.
        has_options: it is an embedding with a largest norm or the like.
        further: its further parameters.
        function: of :data:`LAYER_FUNCTIONS`, and ``how``; None: it is a plain linear layer or an embedding.

    A norm over a whole width may be taken for a layer too (see :class:`~shardwise.model.trial.Trial`): then ``weight`` is
    the name of its module with a dot behind it.
    """

    weight: str
    bias: str | None
    out_dim: int
    is_embedding: bool = False
    padding_idx: int | None = None
    has_options: bool = False
    further: tuple[Further, ...] = ()
    function: tuple[Callable[..., Tensor], Any] | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias, *(each.name for each in self.further)) if name is not None]

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm that was taken for a layer."""
        return is_norm(self.weight)

    @property
    def module(self) -> str:
        """Canonical name of the module that holds the weight."""
        return self.weight.rpartition(".")[0]


def is_norm(weight: str) -> bool:
    """Whether the layer of this name is a norm that was taken for one."""
    return weight.endswith(".")


class LayerCalls(TorchFunctionMode):
    """Within: calls of linear layers and embeddings are made by :meth:`called`, all other functions by :meth:`other`.

    Args:
        name_of: the canonical name of a parameter; None of every other object.
    """

    def __init__(self, name_of: Callable[[Any], str | None]):
        super().__init__()
        self._name_of = name_of
        self._turned: list[tuple[Tensor, str]] = []  # weights that were transposed

    def called(self, layer: Layer, x: Tensor, compute: "Compute | None") -> Any:
        """The outputs of a layer for the inputs ``x``; NotImplemented: the function is called as it is. ``compute``: of a layer function,
        calls it."""
        return NotImplemented

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that is no layer."""
        return func(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TURNS and args[0].dim() == 2 and (name := self._name_of(args[0])) is not None:
            turned = func(*args, **kwargs)
            if func not in _SWAPS or turned.shape != args[0].shape or {dim % 2 for dim in args[1:]} == {0, 1}:
                self._turned.append((turned, name))
            return turned
        found = self._layer(func, args, kwargs)
        result = NotImplemented if found is None else self.called(*found)
        return self.other(func, args, kwargs) if result is NotImplemented else result

    def weight_of(self, tensor: Tensor) -> str | None:
        """The name of a weight, also of one that was transposed; None: it is none."""
        return next((name for other, name in self._turned if other is tensor), None) or self._name_of(tensor)

    def _layer(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Layer, Tensor, "Compute | None"] | None:
        """The layer that a function call is, its input, and how it is computed; None: it is no layer."""
        if func not in _LAYERS and func not in LAYER_FUNCTIONS:
            return None
        bias, turned, padding, has_options = None, True, None, False
        function, further, compute = None, tuple[Further, ...](), None
        if func in LAYER_FUNCTIONS:
            x, weight, bias, *more, how, training = args
            turned, function = how.out_dim == 1, (func, how)
            of_each = zip(more, LAYER_FUNCTIONS[func], strict=True)
            further = tuple(
                Further(self._name_of(t) or "", role) for t, role in of_each if t is not None and role != BUFFER
            )
            compute = functools.partial(_compute, func, weight, *more, how, training)
        elif func is functional.linear:
            x, weight, bias = bound(("input", "weight", "bias"), args, kwargs)
            turned = False
        elif func is functional.embedding:
            x, weight, padding, largest_norm, _, *others = bound(_EMBEDDING, args, kwargs)
            has_options = largest_norm is not None or any(others)
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            bias, x, weight = args
        elif func in _PRODUCTS and len(args) == 2 and not kwargs:
            x, weight = args
        else:
            return None
        name = self._name_of(weight)
        for other, known in self._turned:
            if other is weight:
                name, turned = known, not turned
        if name is None or weight.dim() != 2 or not isinstance(x, Tensor) or self._name_of(x) is not None:
            return None
        if bias is not None and (self._name_of(bias) is None or bias.dim() != 1):
            return None
        padding = None if padding is None else int(padding) % weight.shape[0]
        is_embedding = func is functional.embedding
        layer = Layer(name, self._name_of(bias), int(turned), is_embedding, padding, has_options, further, function)
        return layer, x, compute


Compute = Callable[[Tensor, Tensor | None], Tensor]
"""The outputs of a layer function for an input and a bias, and all its other tensors as they were given."""


def _compute(func: Any, weight: Tensor, *given: Any) -> Tensor:
    *rest, x, bias = given
    return func(x, weight, bias, *rest)


LOOKS = frozenset({"size", "dim", "numel", "stride", "is_floating_point", "__len__", "__hash__"})
"""Names of functions that look at a tensor and not at its values."""

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm)
_SWAPS = (Tensor.transpose, torch.transpose)
_TURNS = frozenset({Tensor.t, torch.t, *_SWAPS, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))})
_LAYERS = frozenset({functional.linear, functional.embedding, torch.addmm, *_PRODUCTS})


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in tuples and lists among them."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(value)
        else:
            yield value


def bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values of parameters of these names in a call; None where it gives none."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]
