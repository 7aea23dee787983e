"""Which dtypes each parameter has, and which of a unit's parameters are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.recipe.records import Param, Record

__all__ = ["FLOATING", "HALVES", "DtypeGroup", "dtype_groups"]

FLOATING = ("float64", "float32", "float16", "bfloat16")
HALVES = {"bfloat16": 8, "float16": 11}  # bits of a number's significant digits


class DtypeGroup(Record, frozen=True):
    """Parameters of one unit in one gather and one reduction: ``compute`` is the dtype they are cast to as they are
    gathered, ``reduce`` that of the sums over ranks; None: no cast."""

    names: tuple[str, ...]
    compute: str | None
    reduce: str | None


def dtype_groups(params: Mapping[str, Param], unit: str) -> tuple[DtypeGroup, ...]:
    """The parameters that are cut of ``unit``, in as few groups as their dtypes allow, trained ones first.

    Trained parameters of a group are stored, computed and reduced alike, because their gradients are one tensor on the way.
    Frozen ones have none, so they join where they are computed as they must be.
    """
    cut = {name: param for name, param in params.items() if param.unit == unit and param.cuts}
    groups: list[_Growing] = []
    for name in sorted(cut, key=lambda name: not cut[name].trainable):  # stable: the order of the module
        home = next((group for group in groups if group.fits(cut[name])), None)
        if home is None:
            groups.append(home := _Growing())
        home.add(name, cut[name])
    return tuple(group.done() for group in groups)


class _Growing:
    """A group while it is filled."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.trained: tuple[str, str, str] | None = None  # stored, computed, reduced
        self.computes: set[str] = set()  # of those that a cast means something to
        self.casts: str | None = None

    def fits(self, param: Param) -> bool:
        if param.trainable and self.trained not in (None, (param.storage, param.compute, param.reduce)):
            return False
        if param.storage not in FLOATING or self.computes <= {param.compute}:
            return True
        return self.casts is None and param.compute == param.storage

    def add(self, name: str, param: Param) -> None:
        self.names.append(name)
        if param.trainable:
            self.trained = (param.storage, param.compute, param.reduce)
        if param.storage in FLOATING:
            self.computes.add(param.compute)
        if param.compute != param.storage:
            self.casts = param.compute

    def done(self) -> DtypeGroup:
        _, compute, reduce = self.trained or ("", "", "")
        return DtypeGroup(names=tuple(self.names), compute=self.casts, reduce=reduce if reduce != compute else None)
