"""Calls by which a module makes positions itself, from the length of what it is given: where it is given some rows of a sequence,
they must be the positions of these.

A call is known by its kind and its place in the code, and not by sizes, which may be equal by chance; nor by its number among all calls, which a table
that is made in the first forward alone, or a branch, would move.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
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
    **dict.fromkeys((torch.ones, torch.zeros, torch.full), "square"),
    **dict.fromkeys((Tensor.new_ones, Tensor.new_zeros, Tensor.new_full), "square"),
    torch.tril: "triangle",
    torch.triu: "triangle",
    Tensor.tril: "triangle",
    Tensor.triu: "triangle",
}

_OTHERS = ("shardwise.", "torch.")  # modules whose frames are not the code of a model
_places: dict[tuple[tuple[Any, int], ...], str] = {}  # code and instruction of each function in a call -> where that is

Made = list[list[Any]]
"""Calls of a module that make positions, ``[kind, place, argument]`` each: the dim, or index, that has the length, of arange 0; or two of
them, ``[of queries, of keys]``: the first one gets the rows, the second all positions. None: there is none. A square of one number is made for all, or with ``[None, 0]`` of the rows and all.
A view of keys, or of queries and keys, where keys are of all positions, gets the length of these: ``[None, dim]``."""


def kind_of(func: Any) -> str | None:
    """What a function may make positions by; None: it makes none."""
    return _KINDS.get(func)


class CallPlaces:
    """Names the calls of each kind in one forward of a module: by the function and line, counted from its first one, of the model's code that
    makes the call, and of those that have called it, and how often it has made one there in this forward, ``table+1 < Attention.forward+7#1``.

    Args:
        seen: kind -> the places in the order of the calls. Where code is compiled, which has no frames, the number of a call tells its place.
    """

    def __init__(self, seen: Mapping[str, Sequence[str]] | None = None):
        self._seen = {} if seen is None else seen
        self._times: dict[tuple[str, str], int] = {}

    def take(self, kind: str) -> str:
        is_compiled = torch.compiler.is_compiling()
        place = "" if is_compiled else _place()
        times = self._times.get((kind, place), 0)
        self._times[kind, place] = times + 1
        if is_compiled:
            seen = self._seen.get(kind, ())
            return seen[times] if times < len(seen) else f"#{times}"
        return f"{place}#{times}"

    def are_as_many(self, kinds: Iterable[str]) -> bool:
        """Whether as many calls of these kinds were made, without their places, as the example made: else their numbers tell none."""
        return all(self._times.get((kind, ""), 0) == len(self._seen.get(kind, ())) for kind in kinds)


def _place() -> str:
    """Where the model's code makes the call that is looked at, up to the module that runs; "" in modules of torch itself. A module's forward that
    runs again in backward is not called as a module, but by what stands in its place here."""
    frame: FrameType | None = sys._getframe(2)
    frames: list[FrameType] = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OTHERS):
            frames.append(frame)
        elif frame.f_code.co_name in ("_call_impl", "forward"):
            break
        frame = frame.f_back
    key = tuple((each.f_code, each.f_lasti) for each in frames)
    if (found := _places.get(key)) is None:
        lines = (f"{each.f_code.co_qualname}+{each.f_lineno - each.f_code.co_firstlineno}" for each in frames)
        found = _places[key] = " < ".join(lines)
    return found


def argument_of(
    kind: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], num: int, length: int
) -> int | list[int | None] | None:
    """Which argument of a call is the number ``num`` of the rows that the code has, and stands for the first, or the last, ``num`` of ``length``
    positions; None: none is. Two are those of queries and keys, as of a table of both: a square of one number is made
    for all, and its triangle gives the rows. A shape that has all of ``length`` counts too
    (``view``)."""
    if kind == "arange":
        start, end, step = _range_of(args, kwargs)
        return 0 if (start, end, step) == (0, num, 1) else None
    if kind == "narrow":
        x, dim, start, size = (*args, *kwargs.values())
        return dim if start == 0 and size == num and x.shape[dim] >= length else None
    if kind == "getitem":
        x, index = args[0], _index_of(args)
        if not isinstance(x, Tensor) or any(i is Ellipsis or i is None for i in index):
            return None
        ends = [j for j, i in enumerate(index) if _end_of(i, x.shape[j], num)]
        if not ends or len(ends) > 2 or any(x.shape[j] < length for j in ends):
            return None
        return ends[0] if len(ends) == 1 else [*ends]
    if kind == "triangle":
        x = args[0] if args else kwargs["input"]
        return 0 if x.shape[-2:] == (length, length) else None
    if kind == "square":
        return 0 if _square_of(func, args, kwargs)[1][-2:] == (num, num) else None
    x, size = args[0], _size_of(args, kwargs)
    if num in x.shape and length not in x.shape:
        at = [j for j, n in enumerate(size) if n == length]
        return at[0] if len(at) == 1 else None
    of_x, at = [n for n in x.shape if n in (num, length)], [j for j, n in enumerate(size) if n == num]
    of_keys = [j for j, n in zip(at, of_x, strict=False) if n == length != num]
    return [None, of_keys[0]] if len(of_keys) == 1 and len(of_x) == len(at) else None


def of_rows(
    kind: str,
    argument: int | list[int | None],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: Tensor,
    length: int,
) -> Any:
    """The result of a call that makes positions for ``rows``, of ``length``; or for all of them."""
    kwargs = dict(kwargs)
    queries, keys = argument if isinstance(argument, list) else (argument, None)
    if kind == "arange":
        _refuse_other(_range_of(args, kwargs) == (0, len(rows), 1), func)
        made = rows if keys is None else torch.arange(length)
        return made.to(device=kwargs.get("device", rows.device), dtype=kwargs.get("dtype") or torch.long)
    if kind == "narrow":
        x, dim, start, size = (*args, *kwargs.values())
        _refuse_other(dim in (queries, keys) and start == 0 and size == len(rows), func)
        return x.index_select(dim, rows.to(x.device)) if keys is None else x.narrow(dim, 0, length)
    if kind == "getitem":
        x, index = args[0], list(_index_of(args))
        for dim in (queries, keys):
            if dim is None:
                continue
            end = _end_of(index[dim], x.shape[dim], len(rows)) if dim < len(index) else ""
            _refuse_other(bool(end) and x.shape[dim] >= length, func)
            first = x.shape[dim] - length if end == "last" else 0
            index[dim] = slice(None) if dim == queries else slice(first, first + length)
            if dim == queries:
                x = x.index_select(dim, rows.to(x.device) + first)
        return func(x, tuple(index))
    if kind == "triangle":  # of queries and keys
        full = func(*args, **kwargs)
        _refuse_other(full.shape[-2:] == (length, length), func)
        return full.index_select(-2, rows.to(full.device))
    if kind == "square":
        before, size, rest = _square_of(func, args, kwargs)
        _refuse_other(size[-2:] == (len(rows), len(rows)), func)
        num = length if queries is not None else len(rows)
        return func(*before, (*size[:-2], num, length), *rest, **{key: x for key, x in kwargs.items() if key != "size"})
    x, size = args[0], list(_size_of(args, kwargs))
    at, seen, num = (queries, length, len(rows)) if queries is not None else (keys or 0, len(rows), length)
    _refuse_other(at < len(size) and size[at] == seen, func)
    size[at] = num
    return func(x, tuple(size))


def _end_of(index: Any, size: int, num: int) -> str:
    """Which ``num`` places of a dim of ``size`` an index has: the ``first``, or the ``last`` ones; "": others."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        return ""
    if index.start in (None, 0) and index.stop == num:
        return "first"
    return "last" if index.start in (size - num, -num) and index.stop in (None, size) else ""


def other_way(given: str) -> UnsupportedError:
    """The error for code that takes another way than on the example."""
    return UnsupportedError(
        given,
        why="the code was run on an example to find where it makes positions itself, and compares them, and now it takes another way",
        fix="pass example= with a micro-batch as training gives it; or give the model its positions as an argument (position_ids)",
    )


def _refuse_other(is_same: bool, func: Any) -> None:
    if not is_same:
        raise other_way(
            f"a call of {getattr(func, '__name__', func)} that makes positions, and not for as many as this rank has"
        )


def _range_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    given = {"start": 0, "step": 1, **{key: kwargs[key] for key in ("start", "end", "step") if key in kwargs}}
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given |= dict(zip(names, args, strict=False))
    return given["start"], given.get("end"), given["step"]


def _index_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index of each dim; with an ellipsis only where it stands for whole dims that can be counted."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    at = [j for j, i in enumerate(index) if i is Ellipsis]
    if len(at) == 1 and isinstance(x, Tensor) and all(i is Ellipsis or isinstance(i, (int, slice)) for i in index):
        whole = (slice(None),) * (x.dim() - len(index) + 1)
        return (*index[: at[0]], *whole, *index[at[0] + 1 :])
    return index


def _square_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[int, ...], Any]:
    """The size of a tensor that is made of one number, and what is given before and behind it; () if it has less than two dims."""
    at = 0 if func in (torch.ones, torch.zeros, torch.full) else 1
    before, size, rest = args[:at], args[at:], ()
    if size and isinstance(size[0], (tuple, list)):
        size, rest = tuple(size[0]), size[1:]
    size = size or tuple(kwargs.get("size", ()))
    return before, size if len(size) > 1 and all(isinstance(n, int) for n in size) else (), rest


def _size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    size = args[1:] if len(args) > 1 else tuple(kwargs.values())
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    return size if all(isinstance(n, int) for n in size) else ()
