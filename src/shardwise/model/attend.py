"""Attention as models call it, apart from what it is computed over: torch's function, the registry of transformers, and kernels of the
user's own (:func:`attend`). Where a rank has some rows of a sequence, its queries are compared with the keys of all."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.config.keywords import public_call
from shardwise.errors import UnsupportedError

SDPA = functional.scaled_dot_product_attention
T = TypeVar("T")

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Attention(NamedTuple):
    """One call of attention.

    Attributes:
        q, k, v: queries, keys and values, ``[..., positions, width]``; heads before the positions.
        kernel: ``kernel(q, k, v, rows)``: what it computes for queries of these positions, and the keys of all of them; ``[..., positions,
            width]``. ``rows`` None: for all queries.
        mask: what it adds, or hides, ``[..., queries, keys]``; None: nothing.
        is_causal: a query has no use for keys behind its own position: the kernel may be given those of some rows, and the keys up to the last.
        finish: makes what the model gets of the kernel's result.
        chance: with which weights are dropped; None: it is not known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    mask: Tensor | None
    is_causal: bool = False
    finish: Callable[[Tensor], Any] = lambda result: result
    chance: float | None = None

    def has_mask_of(self, length: int) -> bool:
        """Whether its mask, if any, is for as many keys, or the same for all of them."""
        return self.mask is None or self.mask.shape[-1] in (1, length)


class Attends(Protocol):
    """Computes attention where a rank has some rows."""

    def attend(self, call: Attention) -> Any: ...


class Now:
    """What computes attention in the code that runs; one for all models, as is the mode that catches torch's function.

    Attributes:
        attends: computes it; None: everything is whole.
        rows: positions of the queries for which models of transformers make their masks; None: all.
        makes_masks: these make one also where a causal kernel needs none, as they do for other batches.
        masks: storages of masks -> what is made here, and how it is made once more; None: these are not asked for.
    """

    def __init__(self) -> None:
        self.attends: Attends | None = None
        self.rows: Tensor | None = None
        self.makes_masks = False
        self.masks: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] | None = None


now = Now()


def beside_code(hook: Callable[..., T]) -> Callable[..., T]:
    """For a hook of ours on a module: what it calls is not counted among the calls of the model's code, in which it runs."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> T:
        before, now.attends = now.attends, None
        try:
            return hook(*args, **kwargs)
        finally:
            now.attends = before

    return call


@public_call()
def attend(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by a kernel of your own, which may be cut over ``cp``: without it the same as ``kernel(q, k, v, rows=None)``.

    Args:
        kernel: ``kernel(q, k, v, rows)`` returns the attention of ``q`` to all of ``k`` and ``v``, in the shape of ``q``. ``rows``: the
            positions of the queries, ``[queries]``, for causal masks and windows: a query at position p is at ``rows == p``. None: the
            queries are those of all positions, in order.
        q: queries, ``[batch, heads, positions, width]``.
        k, v: keys and values, ``[batch, heads, positions, width]``; fewer heads if the kernel shares them.

    Returns:
        ``[batch, heads, positions, width]``.

    Example:
        >>> def kernel(q, k, v, rows):
        ...     rows = torch.arange(q.shape[-2]) if rows is None else rows
        ...     mask = rows[:, None] >= torch.arange(k.shape[-2])
        ...     return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        >>> attend(kernel, *torch.randn(3, 1, 2, 5, 8)).shape
        torch.Size([1, 2, 5, 8])
    """
    if now.attends is None:
        return kernel(q, k, v, None)
    return now.attends.attend(Attention(q, k, v, kernel, None))  # type: ignore[no-any-return]


def of_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    """A call of ``scaled_dot_product_attention``."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    q, k, v, mask = (given.pop(name, None) for name in _NAMES[:4])
    is_causal = given.pop("is_causal", False)

    def kernel(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None or rows.shape[0] != q.shape[-2]:  # queries that are no positions are whole
            return SDPA(q, k, v, attn_mask=mask, is_causal=is_causal, **given)
        shown = causal_mask(rows, k, q.dtype) if is_causal else mask_of_rows(mask, rows, k.shape[-2])
        return SDPA(q, k, v, attn_mask=shown, **given)

    return Attention(q, k, v, kernel, mask, is_causal and mask is None, chance=given.get("dropout_p", 0.0))


def causal_mask(rows: Tensor, keys: Tensor, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor:
    """What is added for a query at each of ``rows``, ``[rows, keys]``: nothing to the keys up to its own position. Not a mask of bools: torch would make one of numbers of it,
    and keep that for the backward."""

    def make(rows: Tensor) -> Tensor:
        is_hidden = rows[:, None] < torch.arange(num, device=rows.device)
        return torch.zeros(is_hidden.shape, dtype=dtype, device=rows.device).masked_fill_(is_hidden, hidden)

    num = keys.shape[-2]
    mask = make(rows)
    if now.masks is not None:
        now.masks[mask.untyped_storage().data_ptr()] = rows, make, mask
    return mask


def mask_of_rows(mask: Tensor | None, rows: Tensor, length: int) -> Tensor | None:
    """The part of a mask for these queries, of a sequence of ``length``; all of one that is the same for all queries, or for these alone."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 or mask.shape[-2] != length:
        return mask
    return mask.index_select(-2, rows)


# ---- transformers ----------------------------------------------------------------------------------------------------

_CATCHABLE = ("sdpa", "eager")


def catch_transformers(module: nn.Module) -> None:
    """Lets models of transformers call their attention, and make their masks, through :data:`now`: their keys are seen before they are repeated
    for each head. Names in configurations stay, as code asks for them. Nothing changes where :data:`now` is not set."""
    if not any(name in _CATCHABLE for name in _implementations(module)):
        return
    functions, masks = _registries()
    if not _is_caught(functions["sdpa"]):
        functions["sdpa"] = functools.partial(_of_transformers, "sdpa", functions["sdpa"])
        functions.get_interface = functools.partial(_interface_of, functions.get_interface)
    for name in _CATCHABLE:
        if not _is_caught(masks[name]):
            masks[name] = functools.partial(_mask_of_transformers, masks[name])


def _is_caught(function: Any) -> bool:
    return isinstance(function, functools.partial) and function.func in (_of_transformers, _mask_of_transformers)


def _interface_of(plain: Callable[..., Any], name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation of attention by name; eager ones are functions in the files of their models."""
    return functools.partial(_of_transformers, name, default) if name == "eager" else plain(name, default)  # type: ignore[no-any-return]


def _registries() -> tuple[Any, Any]:
    """Implementations of attention in transformers, and of their masks, by name."""
    from transformers import masking_utils, modeling_utils

    return modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS


def refuse_uncaught(module: nn.Module, what: str) -> None:
    """Raises UnsupportedError for an implementation of attention of transformers that is not caught. ``what`` was asked for."""
    for name in _implementations(module):
        if name not in _CATCHABLE:
            raise UnsupportedError(
                f"{what} of a {type(module).__name__} with attn_implementation={name!r}",
                why="that kernel looks at the keys of this rank alone, and there is no seam by which it gets all of them",
                fix='load it with attn_implementation="sdpa"',
            )


def _implementations(module: nn.Module) -> dict[str, list[Any]]:
    """Name -> the configurations within a model that name it, of transformers' implementations of attention."""
    found: dict[str, dict[int, Any]] = {}
    for child in module.modules():
        config = getattr(child, "config", None)
        name = getattr(config, "_attn_implementation_internal", None)
        if isinstance(name, str):
            found.setdefault(name, {})[id(config)] = config
    return {name: list(configs.values()) for name, configs in found.items()}


def _mask_of_transformers(plain: Callable[..., Any], **given: Any) -> Any:
    """A mask, made for the queries of :attr:`Now.rows` alone: that of all queries would grow with the square of the length. Its functions
    are not those of the model's code."""
    attends, now.attends = now.attends, None
    try:
        return _mask_for_queries(plain, given)
    finally:
        now.attends = attends


def _mask_for_queries(plain: Callable[..., Any], given: dict[str, Any]) -> Any:
    rows, padding = now.rows, given.get("attention_mask")
    if now.makes_masks:
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if rows is None or given["q_length"] != given["kv_length"] or given.get("q_offset", 0):
        return plain(**given)
    of_positions: Any = given.get("mask_function")
    if of_positions is None:
        from transformers import masking_utils

        of_positions = masking_utils.causal_mask_function

    def of_rows(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return of_positions(batch, head, rows[query], key)

    if padding is not None and not bool(padding.all()):
        # It would be judged by the number of queries, as if they were the first ones.
        given["allow_is_causal_skip"] = False
    return plain(**{**given, "q_length": rows.shape[0], "mask_function": of_rows})


def _of_transformers(
    name: str,
    plain: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    q, k, v, mask = query, key, value, attention_mask
    if now.attends is None:
        return plain(module, q, k, v, mask, **kwargs)  # type: ignore[no-any-return]
    is_causal = kwargs.get("is_causal")
    is_causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def kernel(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None or rows.shape[0] != q.shape[-2]:
            return plain(module, q, k, v, mask, **kwargs)[0].transpose(1, 2)  # type: ignore[no-any-return]
        if name == "sdpa" and is_plain:  # without repeating keys and values
            chance, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
            shown = causal_mask(rows, k, q.dtype) if is_causal else mask_of_rows(mask, rows, k.shape[-2])
            return SDPA(q, k, v, shown, chance, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        if is_causal:
            shown = causal_mask(rows, k, q.dtype, torch.finfo(q.dtype).min)[None, None]
        else:
            shown = mask_of_rows(mask, rows, k.shape[-2])
        return plain(module, q, k, v, shown, **{**kwargs, "is_causal": False})[0].transpose(1, 2)  # type: ignore[no-any-return]

    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    of_rows = bool(is_causal) and is_plain and name == "sdpa"
    chance = kwargs.get("dropout", 0.0)
    call = Attention(q, k, v, kernel, mask, of_rows, lambda result: (result.transpose(1, 2), None), chance)
    return now.attends.attend(call)  # type: ignore[no-any-return]
