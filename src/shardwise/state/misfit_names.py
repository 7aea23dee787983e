"""Refuses stored weights whose names do not fit the model's, with the ``rename`` that makes them fit where one is known."""

import re
from collections.abc import Collection, Mapping

from shardwise.errors import CheckpointError
from shardwise.state.match_names import Matched, Wanted
from shardwise.state.report import shortened
from shardwise.state.stored import Source


def refuse_misfit_names(
    matched: Matched, wanted: Mapping[str, Wanted], source: Source, *, strict: bool, drawn: Collection[str]
) -> None:
    """Raises CheckpointError for names that are missing or not the model's. Without ``strict`` only for those that would train on
    numbers drawn at random: of layers that were wrapped, and of parameters that are not trained (``drawn``)."""
    rename = _rename_of_wrapped(matched, wanted, source)
    if strict and (matched.missing or matched.unexpected):
        parts = []
        if matched.missing:
            parts.append(f"{len(matched.missing)} of {len(wanted)} tensors are missing: {shortened(matched.missing)}")
        if matched.unexpected:
            parts.append(f"{len(matched.unexpected)} there are not in the model: {shortened(matched.unexpected)}")
        raise CheckpointError(
            f"weights from {source.place}",
            why="; ".join(parts),
            fix=f"the layers were wrapped: {_as_argument(rename)}, and strict=False for what the wrappers add"
            if rename
            else 'map names with rename=[("pattern", "replacement")]'
            + ("" if drawn else ", or pass strict=False to load what fits"),
            name=(matched.missing or matched.unexpected)[0],
            misfit="drawn" if drawn and not rename else "names",
            rename=rename,
        )
    if drawn and matched.tensors:
        raise _stays_drawn(
            source,
            tuple(drawn),
            rename,
            why=f"{len(drawn)} tensors that are not there are not trained either (requires_grad is False)",
            fix=f"the layers were wrapped, so map their names: {_as_argument(rename)}"
            if rename
            else 'map their names with rename=[("pattern", "replacement")], or load first the weights that have them. Random numbers that are '
            "meant to stay belong into a buffer (register_buffer), what is to be trained gets requires_grad before parallelize",
        )
    if rename:
        raise _stays_drawn(
            source,
            matched.missing,
            rename,
            why="the model has wrapped layers, of which the tensors are there under their names from before",
            fix=f'map their names: {_as_argument(rename)}; or, where new ones are meant, leave those out: rename=[(r"{rename[0]}", None)]',
        )


def _stays_drawn(
    source: Source, names: tuple[str, ...], rename: tuple[str, str] | None, *, why: str, fix: str
) -> CheckpointError:
    return CheckpointError(
        f"weights from {source.place}, with strict=False",
        why=f"{why}, and the model would train on numbers drawn at random: {shortened(names)}",
        fix=fix,
        name=names[0],
        misfit="drawn",
        rename=rename,
    )


def _as_argument(rename: tuple[str, str]) -> str:
    return f'rename=[(r"{rename[0]}", r"{rename[1]}")]'


def _rename_of_wrapped(matched: Matched, wanted: Mapping[str, Wanted], source: Source) -> tuple[str, str] | None:
    """The one rule by which all tensors of layers that were wrapped are found: ``q_proj.weight`` is the model's
    ``q_proj.base.weight``. None: there are none, or no such rule."""
    missing: dict[str, dict[str, tuple[int, ...]]] = {}  # name without what wraps it -> what wraps it -> its shape
    for name in matched.missing:
        (layer, inner), leaf = _split(_split(name)[0]), _split(name)[1]
        if layer and name in wanted:
            missing.setdefault(f"{layer}.{leaf}", {})[inner] = wanted[name].shape
    fits: dict[str, list[str]] = {}  # what wraps -> names in the source
    for name in matched.unexpected:
        stored = source.tensors.get(name)
        for inner, shape in missing.get(matched.current.get(name, name), {}).items():
            if stored is not None and stored.shape == shape:
                fits.setdefault(inner, []).append(name)
    most = max(map(len, fits.values()), default=0)
    if [*map(len, fits.values())].count(most) != 1:
        return None
    inserted, names = next((inner, names) for inner, names in fits.items() if len(names) == most)
    pairs = dict(zip(names, map(_split, names), strict=True))
    leaves = "|".join(dict.fromkeys(re.escape(leaf) for _, leaf in pairs.values()))
    last = "|".join(dict.fromkeys(re.escape(_split(layer)[1]) for layer, _ in pairs.values()))
    full = "|".join(dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", re.escape(layer)) for layer, _ in pairs.values()))
    for pattern in (rf"\b({last})\.({leaves})$", rf"^({full})\.({leaves})$"):
        if {name for name in source.tensors if re.search(pattern, name)} == pairs.keys():
            return pattern, rf"\1.{inserted}.\2"
    return None


def _split(name: str) -> tuple[str, str]:
    before, _, after = name.rpartition(".")
    return before, after
