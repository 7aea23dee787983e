"""One search for layers to cut for all models of a test that are built alike."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from shardwise.techniques.tp import probe

_FOUND: dict[Hashable, tuple] = {}


@contextlib.contextmanager
def searched_once(what: Hashable) -> Iterator[None]:
    """Within, on a rank: what a search has found is what the next one finds in a module of the same class and shapes. For tests of what comes
    after the search. ``what``: the function that builds the modules, and whatever they depend on."""
    search = probe._found

    def found(module: nn.Module, degree: int, allowed: frozenset[str] | None, run: Callable[[nn.Module], Any]) -> tuple:
        shapes = tuple((name, param.shape) for name, param in module.named_parameters())
        key = (what, type(module), shapes, degree, allowed)
        if key not in _FOUND:
            _FOUND[key] = search(module, degree, allowed, run)
        return _FOUND[key]

    with mock.patch.object(probe, "_found", found):
        yield


def run_searched_once(run: Callable[..., Any], what: Hashable) -> Callable[..., Any]:
    """``run`` of a pool, for ``verify``, that calls each function within :func:`searched_once`."""
    return lambda function, num_ranks, *args, **options: run(_within, num_ranks, what, function, *args, **options)


def _within(what: Hashable, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with searched_once(what):
        return function(*args, **options)
