"""Calls by which a module makes positions itself, from the length of what it is given: where it is given some rows of a sequence,
they must be the positions of these.

A call is known by its kind and its number among the calls of that kind in one forward, and not by sizes, which may be equal by chance.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UnsupportedError

_KINDS: dict[Any, str] = {
    torch.arange: "arange",
    Tensor.__getitem__: "getitem",
    Tensor.narrow: "narrow",
    torch.narrow: "narrow",
    Tensor.view: "view",
    Tensor.reshape: "view",
    torch.reshape: "view",
}

Made = list[list[Any]]
"""Calls of a module that make positions, ``[kind, number, argument]`` each: the dim, or index, that has the length; of arange 0."""


def kind_of(func: Any) -> str | None:
    """What a function may make positions by; None: it makes none."""
    return _KINDS.get(func)


class Numbers:
    """Numbers the calls of each kind in one forward of a module."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, kind: str) -> int:
        """The number of a call."""
        number = self._next.get(kind, 0)
        self._next[kind] = number + 1
        return number


def argument_of(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num: int, length: int) -> int | None:
    """Which argument of a call is the number ``num`` of the rows that the code has, and stands for the first ``num`` of ``length``
    positions; None: none is. A shape that has all of ``length`` counts too (``view``)."""
    if kind == "arange":
        start, end, step = _range_of(args, kwargs)
        return 0 if (start, end, step) == (0, num, 1) else None
    if kind == "narrow":
        x, dim, start, size = (*args, *kwargs.values())
        return dim if start == 0 and size == num and x.shape[dim] >= length else None
    if kind == "getitem":
        x, index = args[0], _index_of(args)
        if (
            not isinstance(x, Tensor)
            or Ellipsis in [i for i in index if not isinstance(i, Tensor)]
            or None in [i for i in index if not isinstance(i, Tensor)]
        ):
            return None
        heads = [
            j
            for j, i in enumerate(index)
            if isinstance(i, slice) and i.start in (None, 0) and i.stop == num and i.step in (None, 1)
        ]
        return heads[0] if len(heads) == 1 and x.shape[heads[0]] >= length else None
    x, size = args[0], _size_of(args, kwargs)
    at = [j for j, n in enumerate(size) if n == length]
    return at[0] if len(at) == 1 and num in x.shape and length not in x.shape else None


def of_rows(
    kind: str,
    argument: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: Tensor,
    length: int,
) -> Any:
    """The result of a call that makes positions for ``rows``, of ``length``.

    Raises:
        UnsupportedError: the call is another than the one that was seen.
    """
    kwargs = dict(kwargs)
    if kind == "arange":
        _refuse_other(_range_of(args, kwargs) == (0, len(rows), 1), func)
        dtype = kwargs.get("dtype") or torch.long
        return rows.to(device=kwargs.get("device", rows.device), dtype=dtype)
    if kind == "narrow":
        x, dim, start, size = (*args, *kwargs.values())
        _refuse_other(dim == argument and start == 0 and size == len(rows), func)
        return x.index_select(dim, rows.to(x.device))
    if kind == "getitem":
        x, index = args[0], _index_of(args)
        is_head = argument < len(index) and isinstance(index[argument], slice) and index[argument].stop == len(rows)
        _refuse_other(is_head and x.shape[argument] >= length, func)
        whole = tuple(slice(None) if j == argument else i for j, i in enumerate(index))
        return func(x.index_select(argument, rows.to(x.device)), whole)
    x, size = args[0], list(_size_of(args, kwargs))
    _refuse_other(argument < len(size) and size[argument] == length, func)
    size[argument] = len(rows)
    return func(x, tuple(size))


def _refuse_other(is_same: bool, func: Any) -> None:
    if not is_same:
        raise UnsupportedError(
            f"a call of {getattr(func, '__name__', func)} that makes positions, and not for as many as this rank has",
            why="the code was run on an example to find where it makes positions itself, and now it takes another way",
            fix="pass example= with a micro-batch as training gives it; or give the model its positions as an argument (position_ids)",
        )


def _range_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    given = {"start": 0, "step": 1, **{key: kwargs[key] for key in ("start", "end", "step") if key in kwargs}}
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given |= dict(zip(names, args, strict=False))
    return given["start"], given.get("end"), given["step"]


def _index_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    size = args[1:] if len(args) > 1 else tuple(kwargs.values())
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    return size if all(isinstance(n, int) for n in size) else ()
