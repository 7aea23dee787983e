"""Groups the parameters of a unit by dtype and axis: which of them are all-gathered and reduce-scattered together."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.recipe.records import Param, Record

FLOATING = ("float64", "float32", "float16", "bfloat16")
HALVES = {"bfloat16": 8, "float16": 11}  # number of significant bits


class DtypeGroup(Record, frozen=True):
    """Parameters of one unit that share one all-gather and one reduce-scatter. ``compute`` is the dtype they are cast
    to for the all-gather, ``reduce`` the dtype of the gradient sums over ranks; None: no cast. ``axis`` is the axis that they are
    gathered over."""

    names: tuple[str, ...]
    compute: str | None
    reduce: str | None
    axis: str = "fsdp"


def dtype_groups(params: Mapping[str, Param], unit: str) -> tuple[DtypeGroup, ...]:
    """The sharded parameters of ``unit``, in as few groups as their dtypes allow, trained ones first.

    Trained parameters of a group have the same stored, compute and reduce dtypes, because their gradients are reduced
    as one tensor. Frozen ones have no gradients, so they join any group that has their compute dtype. All are cut last over the
    same axis.
    """
    cut = {name: param for name, param in params.items() if param.unit == unit and param.cuts}
    groups: list[_Growing] = []
    for name in sorted(cut, key=lambda name: not cut[name].trainable):  # stable: keeps the order of the module
        home = next((group for group in groups if group.fits(cut[name])), None)
        if home is None:
            groups.append(home := _Growing(cut[name].cuts[-1].axis))
        home.add(name, cut[name])
    return tuple(group.done() for group in groups)


class _Growing:
    """A :class:`DtypeGroup` under construction."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.names: list[str] = []
        self.trained: tuple[str, str, str] | None = None  # stored, computed, reduced
        self.computes: set[str] = set()  # compute dtypes of the floating-point ones, which a cast changes
        self.casts: str | None = None

    def fits(self, param: Param) -> bool:
        if param.cuts[-1].axis != self.axis:
            return False
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
        reduced = reduce if reduce != compute else None
        return DtypeGroup(names=tuple(self.names), compute=self.casts, reduce=reduced, axis=self.axis)
