"""Which combinations of a test's arguments run each time, and which in soak alone.

A test under several ``parametrize`` runs their product, and most of what a product costs finds nothing that its parts do
not: a fault comes from one value, or from two together. So a costly test names what it needs::

    @pytest.mark.combinations("values")  # each value of each argument once
    @pytest.mark.combinations("pairs")   # each two values of any two arguments once
    @pytest.mark.parametrize("rank", [0, 1])
    @every_layout(*KINDS)
    def test_a_fault_on_one_rank(ranks, layout, rank): ...

``make test`` runs a small set of combinations that has these, the same one each time; ``make soak`` runs the others.
Combinations of one list of tuples count as well. A value that is excluded by a mark of its own (soak) stays there.

Where not every value can fail by itself, a test names the variants that run each time, by their ids or by patterns of them::

    @pytest.mark.quick("llama-tp=2", "gpt2-*")
"""

import fnmatch
import itertools
from collections.abc import Callable, Sequence

import pytest

__all__ = ["pytest_collection_modifyitems"]

_SIZES = {"values": 1, "pairs": 2}


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the marks that it was asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as soak what the tests marked with ``quick`` or ``combinations`` leave out."""
    _leave_out_all_but_quick(items)
    tests: dict[Callable[..., object], tuple[int, list[pytest.Function]]] = {}
    for item in items:
        mark = item.get_closest_marker("combinations")
        if mark is None or not isinstance(item, pytest.Function) or item.get_closest_marker("soak"):
            continue
        if len(mark.args) != 1 or mark.args[0] not in _SIZES or not hasattr(item, "callspec"):
            raise pytest.UsageError(
                f'{item.nodeid}: combinations("values") or combinations("pairs"), of a parametrised test'
            )
        tests.setdefault(item.function, (_SIZES[mark.args[0]], []))[1].append(item)
    for size, variants in tests.values():
        kept = _covering([_parts(variant, size) for variant in variants])
        for number, variant in enumerate(variants):
            if number not in kept:
                variant.add_marker(pytest.mark.soak)


def _leave_out_all_but_quick(items: list[pytest.Item]) -> None:
    """Marks as soak the variants that a test's ``quick`` does not name, and refuses a name of none of them."""
    for function, group in itertools.groupby(items, key=lambda item: getattr(item, "function", None)):
        variants = list(group)
        mark = variants[0].get_closest_marker("quick")
        if function is None or mark is None:
            continue
        ids = {item: item.callspec.id for item in variants if isinstance(item, pytest.Function)}
        named = {name: [item for item in variants if _is_named(ids[item], name)] for name in mark.args}
        if lost := [name for name, found in named.items() if not found and len(variants) > len(mark.args)]:
            raise pytest.UsageError(f"{variants[0].nodeid}: quick{mark.args} names no variant by {lost}")
        kept = {item for found in named.values() for item in found}
        for item in variants:
            if item not in kept:
                item.add_marker(pytest.mark.soak)


def _is_named(variant: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(variant, pattern.replace("[", "[[]"))


def _parts(item: pytest.Function, size: int) -> frozenset[object]:
    """The values of the test's arguments, or each ``size`` of them: what is to occur once."""
    values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
    return frozenset(itertools.combinations(values, min(size, len(values))))


def _covering(variants: Sequence[frozenset[object]]) -> set[int]:
    """The numbers of few of the variants that have all parts together: always the one that adds most, the earliest of several."""
    missing, kept = set(frozenset().union(*variants)), set[int]()
    while missing:
        best = max(range(len(variants)), key=lambda number: (len(variants[number] & missing), -number))
        missing -= variants[best]
        kept.add(best)
    return kept
