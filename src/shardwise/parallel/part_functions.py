"""Which functions of torch may be given a part of a tensor, and what they return then."""

import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Kind(enum.Enum):
    """What a function does with a tensor that is a part."""

    ELEMENTWISE = enum.auto()  # each element by itself: the result is a part too
    ALONG = enum.auto()  # right along dims that are not cut
    VIEW = enum.auto()  # by sizes: right where those up to the dim that is cut are kept
    REFUSED = enum.auto()
    NUMEL = enum.auto()
    GRADIENT = enum.auto()  # param.grad
    GRADIENTS = enum.auto()  # torch.autograd.grad
    PASSED = enum.auto()  # looks at no value, or drops the class
    WRITE = enum.auto()  # to elements by their places
    UNKNOWN = enum.auto()  # refused if it returns a tensor


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBERS = _words(
    "item tolist numpy __array__ equal allclose is_nonzero __bool__ __float__ __int__ __complex__ __index__ "
    "__contains__ untyped_storage storage __dlpack__ __cuda_array_interface__"
)
_REDUCTIONS = _words(
    "sum nansum mean nanmean norm std var std_mean var_mean amax amin aminmax max min argmax argmin prod any all "
    "logsumexp median nanmedian quantile nanquantile count_nonzero linalg_norm linalg_vector_norm"
)
_TRANSPOSES = _words("t T mT H mH transpose permute swapaxes swapdims movedim moveaxis unsqueeze squeeze")
_VIEWS = _words("view view_as reshape reshape_as flatten unflatten")
_ALIKE = _words(
    "clone detach data real imag to float double half bfloat16 cpu cuda contiguous type_as copy fill zero "
    "masked_fill new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like isclose "
    "requires_grad long int short char byte bool "
    "cfloat cdouble chalf conj resolve_conj resolve_neg pin_memory rtruediv rdiv floordiv floor_divide mod and or "
    "xor invert truediv"
)
DRAWS = _words(
    "rand_like randn_like randint_like normal uniform bernoulli exponential random geometric cauchy log_normal poisson binomial "
    "multinomial dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu rrelu_with_noise gumbel_softmax"
)
_PASSED = frozenset(["as_subclass", "__set__", "__delete__"])


@functools.cache
def _by_name(name: str) -> Kind:
    if name in _PASSED:
        return Kind.PASSED
    if name in ("numel", "nelement"):
        return Kind.NUMEL
    if name == "__setitem__":
        return Kind.WRITE
    if name in _NUMBERS:
        return Kind.REFUSED
    if name in _REDUCTIONS or name in _TRANSPOSES:
        return Kind.ALONG
    if name in _VIEWS:
        return Kind.VIEW
    base = name.removeprefix("_foreach_").strip("_")
    if base in DRAWS:
        return Kind.REFUSED
    spelled = [base, base[1:]] if name.startswith("__") and base[:1] in ("r", "i") else [base]
    if not base.startswith("max") and any(each in _ALIKE or _is_pointwise(each) for each in spelled):
        return Kind.ELEMENTWISE
    # In place, or of many tensors, and not known: it would have been done when it is refused.
    return Kind.REFUSED if name.endswith("_") and not name.endswith("__") else Kind.UNKNOWN


def kind_of(func: Any) -> tuple[Kind, str]:
    """What a function does with parts, and its name for people."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of an attribute
        attribute = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
        if attribute == "grad":
            return Kind.GRADIENT, attribute
        is_value = attribute in _TRANSPOSES | _ALIKE | _NUMBERS
        return (_by_name(attribute) if is_value else Kind.PASSED), attribute
    if func is torch.autograd.grad:
        return Kind.GRADIENTS, "torch.autograd.grad"
    return _by_name(name), name


def whole_sizes(tensor: Tensor, cuts: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """The shape of what ``tensor`` is a part of. ``cuts``: dim, from the end -> its size here and in the whole; a dim of another size is
    no part."""
    sizes = enumerate(tensor.shape, -tensor.dim())
    return tuple(cuts[dim][1] if dim in cuts and cuts[dim][0] == size else size for dim, size in sizes)


def _is_pointwise(name: str) -> bool:
    """Whether torch says of an operator that it computes each element by itself."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None or not hasattr(operator, "overloads"):
        return False
    return any(torch.Tag.pointwise in getattr(operator, overload).tags for overload in operator.overloads())
