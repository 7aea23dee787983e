"""Iterators that a module keeps (``itertools.count``): where one is, and another that goes on from there."""

import contextlib
import itertools
import types
import warnings
from ast import literal_eval
from functools import cache
from typing import Any

from torch import nn

from shardwise.errors import UnsupportedError


@cache
def is_iterator(kind: type) -> bool:
    """Whether a class is one of Python's iterators, which objects of other classes may contain."""
    return kind.__module__ in ("itertools", "builtins") and hasattr(kind, "__next__")


class Iteration:
    def __init__(self, iterator: Any):
        self._iterator, self._place = iterator, _place(iterator)
        try:
            self._copy = _copied(iterator)
        except TypeError:  # a generator, or one over it; those of itertools from Python 3.14 on
            self._copy = None

    @property
    def may_have_run(self) -> bool:
        """False for a generator that has not."""
        return self._copy is not None or _place(self._iterator) != self._place

    def again(self, module: nn.Module) -> Any:
        """An iterator that goes on from there: a new one each time. ``module``: that keeps it, for messages.

        Raises:
            UnsupportedError: a generator that has run; another iterator that cannot be copied, which may have.
        """
        if self._copy is not None:
            return _copied(self._copy)
        if _place(self._iterator) == self._place:
            return self._iterator
        raise UnsupportedError(
            f"a {type(self._iterator).__name__} in a {type(module).__name__}",
            why="it may have run in a forward that does not count (a skipped step, a padding, a trial of the loss, the second run of a block), "
            "and Python cannot put it back to where it was",
            fix="keep a number in an attribute and count it up, or a list and the place in it",
        )


def _place(iterator: Any) -> Any:
    """Where a generator has stopped, and with which objects in its variables; of others: what equals no other."""
    if not isinstance(iterator, types.GeneratorType):
        return object()
    frame = iterator.gi_frame
    return None if frame is None else (frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()})


def _copied(iterator: Any) -> Any:
    """Another iterator over the same objects. Raises TypeError."""
    if isinstance(iterator, itertools.count):
        with contextlib.suppress(SyntaxError, ValueError):  # of numbers that are written otherwise
            return itertools.count(*literal_eval(f"[{repr(iterator)[6:-1]}]"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and 3.13, about 3.14
        make, arguments, *state = iterator.__reduce__()
        made = make(*map(_part, arguments))
        if state and state[0] is not None:
            parts = state[0] if isinstance(state[0], tuple) else state
            parts = [list(part) if isinstance(part, list) else _part(part) for part in parts]  # `cycle` adds to a list
            made.__setstate__(tuple(parts) if isinstance(state[0], tuple) else parts[0])
    return made


def _part(value: Any) -> Any:
    """What an iterator runs over: iterators in it are copied."""
    if is_iterator(type(value)):
        return _copied(value)
    if isinstance(value, tuple | list) and any(is_iterator(type(each)) for each in value):
        return type(value)(map(_part, value))
    return value
