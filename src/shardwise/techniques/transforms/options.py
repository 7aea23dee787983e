"""Transforms: the user's own functions that change a module before it is read and sharded, by name and in list order.

    class Widen(sw.Options, frozen=True, kw_only=True):
        factor: int = 2

    @sw.transform("widen", Widen)
    def widen(module, config):
        ...                                # in place, or return another module

    model = sw.parallelize(build, world, transforms=[Widen(factor=4)])

They run while the module is built, on meta if it is built there, so that the tensors they add get values like those of
the constructor. A transform with a parameter ``world`` or ``device`` receives it.

Torch-free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.config.record import Options
from shardwise.config.suggest import did_you_mean
from shardwise.config.target import load_target, looks_like_target
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Function = Callable[..., "nn.Module | None"]
Entry = str | Mapping[str, Any] | Options | Function
Given = Entry | Sequence[Entry]


@dataclass(frozen=True)
class Transform:
    name: str
    config: type[Options] | None
    after: tuple[str, ...]
    function: Function


_known: dict[str, Transform] = {}


def transform(
    name: str, config: type[Options] | None = None, *, after: str | Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Registers a function ``(module)``, or ``(module, config)`` with a config, under ``name``. It changes the module
    in place, or returns another one. It must do the same on every rank.

    A parameter ``world`` or ``device`` receives the :class:`~shardwise.World` or the ``torch.device`` of this rank. The
    function may run more than once on a rank, and more often on one than on another: it must not communicate.
    :func:`shardwise.verify` has no world to pass: a ``world`` without a default is refused there.

    Args:
        name: the name in ``transforms=[...]`` and in configuration files.
        config: its options, a frozen record: ``class Widen(sw.Options, frozen=True, kw_only=True)``.
        after: names of transforms that must be before this one, if they are in the list too.

    Raises:
        ConfigError: the name is taken by another function, or there is none.
    """
    if not isinstance(name, str):
        place = getattr(name, "__qualname__", str(name))
        raise ConfigError(
            f"@transform on {place}", why="a transform needs a name", fix=f'write @sw.transform("{place}") above it'
        )

    def register(function: Function) -> Function:
        taken = _known.get(name)
        place = f"{function.__module__}.{function.__qualname__}"
        if taken is not None and f"{taken.function.__module__}.{taken.function.__qualname__}" != place:
            raise ConfigError(
                f"@transform({name!r}) on {place}",
                why=f"{taken.function.__module__}.{taken.function.__qualname__} has that name",
                fix="choose another name",
            )
        _known[name] = Transform(name, config, (after,) if isinstance(after, str) else tuple(after), function)
        return function

    return register


@dataclass(frozen=True)
class Chosen:
    """A transform with its options, as chosen in ``transforms=``."""

    transform: Transform
    config: Options | None

    def __str__(self) -> str:
        return self.transform.name if self.config is None else f"{self.transform.name}: {self.config}"


def choose(given: Given) -> list[Chosen]:
    """The transforms that a list names: by name, as ``"pkg.mod:function"``, as a mapping with ``name`` and options, as
    a config, or as the registered function itself. A single one may be given without a list.

    Raises:
        ConfigError: one that is not registered, options it does not have, or an order that an ``after=`` forbids.
    """
    alone = isinstance(given, str | Mapping | Options) or callable(given)
    chosen = [_chosen(entry) for entry in ([given] if alone else given)]
    names = [each.transform.name for each in chosen]
    for i, each in enumerate(chosen):
        late = [name for name in each.transform.after if name in names[i + 1 :]]
        if late:
            raise ConfigError(
                f"transforms={names}",
                why=f"{each.transform.name!r} must come after {late[0]!r}",
                fix=f"put {late[0]!r} before it",
            )
    return chosen


def _chosen(entry: Entry) -> Chosen:
    if isinstance(entry, Options):
        found = next((known for known in _known.values() if known.config is type(entry)), None)
        if found is None:
            raise ConfigError(
                f"transforms=[{entry}]",
                why=f"no transform is registered with the config {type(entry).__name__}",
                fix=f'@sw.transform("name", {type(entry).__name__}) on the function, in a module that is imported',
            )
        return Chosen(found, entry)
    if callable(entry):
        found = _registered(entry, f"transforms=[{getattr(entry, '__qualname__', entry)}]")
        return Chosen(found, None if found.config is None else _config(found, {}))
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    found = _named(options.pop("name", None), entry)
    if found.config is None:
        if options:
            raise ConfigError(
                f"transforms=[{entry}]", why=f"{found.name!r} has no options", fix=f"write {found.name!r} alone"
            )
        return Chosen(found, None)
    return Chosen(found, _config(found, options))


def _named(name: Any, entry: Any) -> Transform:
    if not isinstance(name, str):
        raise ConfigError(f"transforms=[{entry}]", why="it has no name", fix='give {"name": ..., and its options}')
    if looks_like_target(name):
        return _registered(load_target(name, what="transform"), f"transforms=[{name!r}]")
    if name not in _known:
        raise ConfigError(
            f"transforms=[{name!r}]",
            why="no transform of that name is registered",
            fix=(did_you_mean(name, list(_known), what="transforms") + "; or n" if _known else "n")
            + 'ame the function with its module: "pkg.mod:function"',
        )
    return _known[name]


def _registered(function: Any, given: str) -> Transform:
    found = next((known for known in _known.values() if known.function is function), None)
    if found is None:
        raise ConfigError(given, why="that function is not a transform", fix='put @sw.transform("name") on it')
    return found


def _config(found: Transform, options: dict[str, Any]) -> Options:
    assert found.config is not None
    fields = found.config.__struct_fields__
    for key in options:
        if key not in fields:
            raise ConfigError(
                f"{key} of transform {found.name!r}",
                why="it has no such option",
                fix=did_you_mean(key, fields, what="options"),
            )
    missing = [f.name for f in msgspec.structs.fields(found.config) if f.required and f.name not in options]
    if missing:
        raise ConfigError(
            f"transform {found.name!r} without {missing[0]}", why="it has no default", fix=f"give {missing[0]}"
        )
    return found.config(**options)
