"""Finds the stored tensor for each tensor of a model by name: as it is, renamed, without wrapper prefixes, with a
prefix.

Every change of names is counted and reported. A name that is already one of the model's is never changed.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import CheckpointError, ConfigError
from shardwise.state.hugging_face import older_name, turned_view
from shardwise.state.naming import Naming, naming_of_source
from shardwise.state.stored import Source, TensorSource
from shardwise.state.stored_parts import Assembled, View

Rename = Sequence[tuple[str, str | None]]  # (regex, replacement as re.sub takes it; None: the tensor is left out)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PREFIXES = ("model", "module", "state_dict")  # prefixes that trainers add to all names


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model that a source may hold, under its canonical name or an alias."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass
class Matched:
    """The result of matching names: model's name -> stored tensor, and what is reported to the user.

    Attributes:
        tensors: canonical name -> stored tensor.
        names: canonical name -> its name in the source.
        current: name in the source -> the name that it was given.
        doubles: canonical name of a tied tensor -> its further stored tensors, by name in the source.
        missing, unexpected, ignored, renamed: as in :class:`~shardwise.state.report.LoadReport`.
    """

    tensors: dict[str, TensorSource] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, dict[str, TensorSource]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)


def match_names(
    model: nn.Module, wanted: Mapping[str, Wanted], computed: Iterable[str], source: Source, rename: Rename = ()
) -> Matched:
    """Finds each of ``wanted`` in ``source``.

    Args:
        model: the module, whose class may have other names for its weights.
        wanted: canonical name -> shape, dtype and aliases.
        computed: names of buffers that the model computes itself; some older exports store them, and they are not
            loaded.
        rename: regular expressions that are applied first, in order, to the names in the source.
    """
    found = Matched(ignored=dict(source.left_out))
    current = _renamed({name: name for name in source.tensors}, rename, found)
    naming = naming_of_source(model, {name: want.shape for name, want in wanted.items()}, current.values())
    views = naming.views
    homes = {naming.in_files(alias): name for name, want in wanted.items() for alias in want.aliases}
    homes |= {naming.in_files(name): name for name in wanted}
    known = {**homes, **{naming.in_files(n): n for n in computed}, **{n: view.name for n, view in views.items()}}
    current = _unwrapped(current, known, found)
    newer = older_name(naming.module)
    older = {name: newer(now) for name, now in current.items() if now not in known and newer(now) != now}
    if older:
        found.renamed.append(f"{len(older)} names of an older version of the model's library")
        current |= older
    own = getattr(naming.module, "base_model_prefix", "")  # of Hugging Face classes: where the headless model is
    prefixes = [own] if isinstance(own, str) and own else []
    prefixes += [*_PREFIXES, *_shared(current.values()), *_shared(known)]
    current = _prefixed(current, known, prefixes, found)
    found.current = current
    found.unexpected = tuple(name for name, now in current.items() if now not in known)
    parts = _sort_out(current, homes, known, views, source, found)
    for home, stored in parts.items():
        _assemble(home, wanted[home], {name: view for name, view in views.items() if view.name == home}, stored, found)
    _turn(naming, wanted, found)
    for copy, home in naming.peft.copies(
        wanted
    ).items():  # PEFT trains a copy of a module, and keeps the first beside it
        if home in found.tensors and copy not in found.tensors:
            found.tensors[copy], found.names[copy] = found.tensors[home], found.names[home]
    found.missing += tuple(name for name in wanted if name not in found.tensors and name not in parts)
    _accept_allowed(naming.module, found)
    return found


def _renamed(current: dict[str, str], rename: Rename, found: Matched) -> dict[str, str]:
    for rule in rename:
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ConfigError(
                f"rename with {rule!r}",
                why="a rule is a pair: a regular expression, and what it is replaced by (None: leave the tensor out)",
                fix='write rename=[(r"^transformer\\.", "")]',
            )
        pattern, replacement = rule
        try:
            changed = {
                name: None if replacement is None else re.sub(pattern, replacement, now)
                for name, now in current.items()
                if re.search(pattern, now)
            }
        except (re.error, IndexError, TypeError) as error:
            raise ConfigError(
                f"rename with {rule!r}",
                why=f"it cannot be carried out: {error}",
                fix="see the module re of Python's library",
            ) from error
        if not changed:
            raise ConfigError(
                f"rename with {pattern!r}",
                why=f"it matches none of the {len(current)} names there: {', '.join(list(current.values())[:4])}, ...",
                fix="remove it, or correct the pattern",
            )
        for name, now in changed.items():
            if now is None:
                current.pop(name)
                found.ignored[name] = "rename leaves it out"
            else:
                current[name] = now
        found.renamed.append(f"{pattern!r} -> {replacement!r} on {len(changed)} names")
    return current


def _unwrapped(current: dict[str, str], known: Mapping[str, Any], found: Matched) -> dict[str, str]:
    """Removes what wrappers add to names, only where a name is not already one of the model's."""
    changed: dict[str, str] = {}
    all_wrapped = all(now.startswith("module.") for now in current.values())
    for name, now in current.items():
        if now in known:
            continue
        bare = ".".join(part for part in now.split(".") if part not in _WRAPPERS)
        inner = bare
        while inner not in known and inner.startswith("module."):
            inner = inner.removeprefix("module.")
        # If all names begin with it, a wrapper added it, even if the rest of the name needs another prefix.
        bare = inner if inner in known or all_wrapped else bare
        if bare != now:
            changed[name] = bare
    if changed:
        found.renamed.append(f"what wrappers add was removed from {len(changed)} names")
    return {name: changed.get(name, now) for name, now in current.items()}


def _prefixed(
    current: dict[str, str], known: Mapping[str, Any], prefixes: Iterable[str], found: Matched
) -> dict[str, str]:
    """Adds one prefix to, or removes it from, all names that do not fit: the one with which most of them fit."""
    strange = {name: now for name, now in current.items() if now not in known}
    taken = {now for now in current.values() if now in known}
    best: tuple[dict[str, str], str] = ({}, "")
    for prefix in prefixes:
        shorter = {n: now.removeprefix(f"{prefix}.") for n, now in strange.items() if now.startswith(f"{prefix}.")}
        longer = {n: f"{prefix}.{now}" for n, now in strange.items()}
        for edited, words in ((shorter, f"{prefix!r} removed from"), (longer, f"{prefix!r} put before")):
            fits = {n: now for n, now in edited.items() if now in known and now not in taken}
            if len(fits) > len(best[0]):
                best = fits, f"{words} {len(fits)} names"
    if best[0]:
        found.renamed.append(best[1])
    return {**current, **best[0]}


def _shared(names: Iterable[str]) -> list[str]:
    """The common prefixes of all names, one of which the other side may lack: ``app`` and ``app.net`` for
    ``app.net.weight`` and ``app.net.bias``."""
    paths = [name.split(".")[:-1] for name in names]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return [".".join(shared[:length]) for length in range(1, len(shared) + 1)]


def _sort_out(
    current: Mapping[str, str],
    homes: Mapping[str, str],
    known: Mapping[str, str],
    views: Mapping[str, View],
    source: Source,
    found: Matched,
) -> dict[str, dict[str, TensorSource]]:
    """Assigns each stored tensor to a tensor of the model; returns those that are only parts of one: canonical name ->
    name in files -> stored tensor."""
    seen: dict[str, str] = {}
    parts: dict[str, dict[str, TensorSource]] = {}
    for name, now in current.items():
        if now in seen:
            raise CheckpointError(
                f"{source.place}: {seen[now]} and {name}",
                why="both end under this name",
                fix="pass rename=[(pattern, None)] with a pattern that matches the one to leave out",
                name=now,
                misfit="double",
            )
        seen[now] = name
        if now in homes:
            home, stored = homes[now], source.tensors[name]
            if home in found.tensors:
                found.doubles.setdefault(home, {})[name] = stored
            else:
                found.tensors[home], found.names[home] = stored, name
        elif now in views:
            parts.setdefault(known[now], {})[now] = source.tensors[name]
            found.names[known[now]] = name
        elif now in known:
            found.ignored[name] = "the model computes it itself"
    return parts


def _assemble(
    home: str, want: Wanted, views: Mapping[str, View], stored: Mapping[str, TensorSource], found: Matched
) -> None:
    """Assembles a tensor of the model from the stored tensors that are its parts."""
    absent = tuple(name for name in views if name not in stored)
    if absent:
        found.missing += absent
        return
    kinds = {part.dtype for part in stored.values()}
    misfit = next((name for name, view in views.items() if stored[name].shape != view.shape), None)
    if misfit is not None or len(kinds) > 1:
        name = misfit or next(iter(stored))
        raise CheckpointError(
            f"{name}: {stored[name].dtype} of shape {list(stored[name].shape)}",
            why=f"it is a part of the model's {home}, of shape {list(views[name].shape)}, and of one dtype with the others",
            fix="build the model with the configuration of these weights",
            name=home,
            misfit=None if misfit is None else "shape",
        )
    found.tensors[home] = Assembled(
        want.shape, kinds.pop(), tuple((view, stored[name]) for name, view in views.items())
    )


def _turn(naming: Naming, wanted: Mapping[str, Wanted], found: Matched) -> None:
    """Permutes the dims of stored tensors whose dims are in another order, if a rule of the model's library says so."""
    turned = {}
    for home, stored in found.tensors.items():
        shape = wanted[home].shape
        fits = stored.shape == shape
        view = None if fits else turned_view(naming.module, naming.in_files(home), stored.shape, shape)
        if view is not None:
            turned[home] = Assembled(shape, stored.dtype, ((view, stored),))
    if turned:
        found.tensors |= turned
        found.renamed.append(
            f"dims of {len(turned)} tensors put in the order of today, by rules of the model's library"
        )


def _accept_allowed(model: Any, found: Matched) -> None:
    """Accepts missing and unexpected names that a Hugging Face class allows."""
    for kind, why in (
        ("missing", "it is not there, as the model's class allows"),
        ("unexpected", "the model's class says so"),
    ):
        patterns = [p for p in getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or () if isinstance(p, str)]
        excused = [name for name in getattr(found, kind) if any(re.search(pattern, name) for pattern in patterns)]
        found.ignored.update(dict.fromkeys(excused, why))
        setattr(found, kind, tuple(name for name in getattr(found, kind) if name not in excused))
