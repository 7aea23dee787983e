"""Which dtypes each parameter has, and which of a unit's parameters are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.recipe.records import Param, Record

__all__ = ["FLOATING", "DtypeGroup", "dtype_groups"]

FLOATING = ("float64", "float32", "float16", "bfloat16")


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
    groups: list[list[str]] = []
    for name in sorted(cut, key=lambda name: not cut[name].trainable):  # stable: the order of the module
        home = next((group for group in groups if _fits(cut[name], [cut[other] for other in group])), None)
        if home is None:
            groups.append([name])
        else:
            home.append(name)
    return tuple(_group(names, cut) for names in groups)


def _fits(param: Param, group: list[Param]) -> bool:
    trained = [other for other in group if other.trainable]
    if param.trainable and trained:
        key = (param.storage, param.compute, param.reduce)
        return key == (trained[0].storage, trained[0].compute, trained[0].reduce)
    cast = [other for other in (*group, param) if other.storage in FLOATING]
    return len({other.compute for other in cast}) < 2 or all(other.compute == other.storage for other in cast)


def _group(names: list[str], params: Mapping[str, Param]) -> DtypeGroup:
    cast = next((params[name].compute for name in names if params[name].compute != params[name].storage), None)
    trained = next((params[name] for name in names if params[name].trainable), None)
    reduce = trained.reduce if trained is not None and trained.reduce != trained.compute else None
    return DtypeGroup(names=tuple(names), compute=cast, reduce=reduce)
