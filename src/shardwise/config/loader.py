"""Load a configuration strictly: a file or a function, then overrides, then every value checked against its record.

Layers, weakest first: the defaults, the file (or function), the overrides. An unknown key is an error that suggests the
right one; a value of the wrong type is an error with file, line and dotted path. The result records where each value
came from.

>>> class Train(Options, frozen=True, kw_only=True):
...     steps: int = 500
...     seed: int = 0
>>> loaded = load_config(None, ["steps=20"], Train)
>>> loaded.config.steps, loaded.origins["steps"], loaded.origins["seed"]
(20, 'override --steps', 'default')
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import msgspec

from shardwise.config.check import checked, struct_in
from shardwise.config.record import Options, default_of, hints_of
from shardwise.config.sources import BareSwitch, Keys, Layer, parse_yaml_value, read_file
from shardwise.config.suggest import closest, did_you_mean, missing_blank
from shardwise.config.target import load_target, looks_like_target
from shardwise.config.torch_options import replacement_for
from shardwise.errors import ConfigError, ShardwiseError

C = TypeVar("C", bound=msgspec.Struct)
UNWRITTEN = "TO_BE_WRITTEN"  # what has to be written before a file is one of a run
SOME_MODEL, SOME_DATA = "MODEL_DIRECTORY", "DATA.jsonl"  # of an imported file that names none
_OF_TORCH = "torch has this option, and Shardwise does not: "
_OVERRIDE = re.compile(r"(?:--)?([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)


Foreign = Any
"""Answers keys of other systems, each with an error that shows what to write: :mod:`shardwise.dialects.words`."""


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[C]):
    """A configuration, and the origin of the value at each dotted path.

    Origins read ``default``, ``run.yaml:12``, ``pkg.mod:fn`` or ``override --train.steps``.
    """

    config: C
    origins: dict[str, str]


def load_config(
    path: str | Path | None, overrides: Sequence[str], cls: type[C], *, foreign: Foreign | None = None
) -> Loaded[C]:
    """Loads a configuration, applies overrides and checks every value.

    Args:
        path: a .yaml, .yml, .toml or .json file, ``pkg.mod:fn`` (a function that returns a mapping or a ``cls``), or
            None for the defaults.
        overrides: ``--train.steps=20`` or ``train.steps=20``; the value is YAML 1.2 (``3e-4``, ``null``, ``[1, 2]``)
            and replaces the value of the file.
    """
    layer = _read(path, cls)
    is_strange = foreign is not None and bool(layer.values.keys() - {*hints_of(cls)})
    error = foreign.foreign_file(layer.values, str(path)) if foreign is not None and is_strange else None
    if error is not None:
        raise error
    for key, text in _split_overrides(overrides):
        _apply_override(layer, key, text, cls, foreign)
    return _checked(cls, layer, foreign)


def with_overrides(
    values: Mapping[str, Any], overrides: Sequence[str], cls: type[msgspec.Struct], *, foreign: Foreign | None = None
) -> dict[str, Any]:
    """A configuration that is a mapping, with overrides applied to it."""
    layer = Layer(values=_plain(values))
    for key, text in _split_overrides(overrides):
        _apply_override(layer, key, text, cls, foreign)
    _drop_replaced(layer, cls)
    return layer.values


def load_values(values: Mapping[str, Any], cls: type[C], *, origin: str) -> Loaded[C]:
    """Loads a configuration that is a mapping, as :func:`load_config` loads a file; ``origin`` says where it is from."""
    layer = Layer(values=_plain(values))
    _mark(layer, layer.values, (), origin)
    return _checked(cls, layer, None)


def _checked(cls: type[C], layer: Layer, foreign: Foreign | None) -> Loaded[C]:
    _drop_replaced(layer, cls)
    _refuse_unknown_keys(cls, layer, foreign)
    _refuse_unwritten(layer)
    origins: dict[str, str] = {}
    return Loaded(config=_build(cls, layer.values, (), layer, origins), origins=origins)


def _read(path: str | Path | None, cls: type[C]) -> Layer:
    if path is None:
        return Layer(values={})
    text = str(path)
    if looks_like_target(text) and not Path(text).exists():
        return _from_function(text, cls)
    return read_file(Path(text))


def _from_function(text: str, cls: type[C]) -> Layer:
    """What ``pkg.mod:fn`` returns, with the function as the origin of each value it sets."""
    result = load_target(text, what="configuration")
    result = result() if callable(result) else result
    if isinstance(result, cls):
        values = _changed(result)
    elif isinstance(result, Mapping):
        values = _plain(result)
    else:
        raise ConfigError(
            f"configuration={text!r}",
            why=f"it returned {type(result).__name__}, and a configuration is a mapping or a {cls.__name__}",
            fix=f"return {cls.__name__}(...), or a dictionary of sections",
        )
    layer = Layer(values=values)
    _mark(layer, values, (), text)
    return layer


def _plain(value: Any) -> Any:
    """Records and mappings as dictionaries; other values unchanged: the check of their key will name the key."""
    if isinstance(value, msgspec.Struct):
        return {key: _plain(getattr(value, key)) for key in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _changed(record: msgspec.Struct) -> dict[str, Any]:
    """A record as plain values, without those that equal the (written or computed) default."""
    computed = record.computed() if isinstance(record, Options) else {}
    found: dict[str, Any] = {}
    for key in record.__struct_fields__:
        value, default = getattr(record, key), default_of(type(record), key)
        if isinstance(value, msgspec.Struct) and type(value) is type(default):
            inner = _changed(value)
            for (section, name), number in computed.items():
                if section == key and inner.get(name) == number:
                    del inner[name]
            found |= {key: inner} if inner else {}
        elif value != default:
            found[key] = _plain(value)
    return found


def _mark(layer: Layer, values: Mapping[str, Any], path: Keys, origin: str) -> None:
    for key, value in values.items():
        layer.origins[(*path, key)] = origin
        if isinstance(value, Mapping):
            _mark(layer, value, (*path, key), origin)


def _split_overrides(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"override {text!r}",
                why="an override is a dotted key, '=' and a value, in one word",
                fix="write it as --train.steps=20",
            )
        key, value = match.groups()
        if key in pairs:
            raise ConfigError(
                f"override --{key} is given twice, as {pairs[key]} and {value}",
                why="only one of them could count",
                fix="remove one of the two",
            )
        pairs[key] = value
    return list(pairs.items())


def _apply_override(
    layer: Layer, key: str, text: str, cls: type[msgspec.Struct], foreign: Foreign | None = None
) -> None:
    """Set one dotted key in ``layer``, creating the mappings above it."""
    keys, origin = tuple(key.split(".")), f"override --{key}"
    _refuse_unknown_override(key, text, keys, cls, foreign)
    place = layer.values
    for depth, part in enumerate(keys[:-1], start=1):
        inner = place.setdefault(part, {})
        layer.origins.setdefault(keys[:depth], origin)
        if not isinstance(inner, dict):
            above = ".".join(keys[:depth])
            raise ConfigError(
                f"{origin}={text}",
                why=f"{above} is {inner!r} ({layer.origins[keys[:depth]]}), which has no keys",
                fix=f"override {above} as a whole, or write it as a mapping",
            )
        place = inner
    value = parse_yaml_value(text, f"{origin}={text}")
    for known in [known for known in layer.origins if known[: len(keys)] == keys]:
        del layer.origins[known]  # replaced as a whole
    place[keys[-1]] = value
    layer.origins[keys] = origin
    if isinstance(value, dict):
        _mark(layer, value, keys, origin)


def _refuse_unknown_override(
    key: str, text: str, keys: Keys, cls: type[msgspec.Struct], foreign: Foreign | None
) -> None:
    """Raises ConfigError for an unknown key, compared with all dotted keys: ``--steps`` finds ``train.steps``."""
    record: type[msgspec.Struct] | None = cls
    for depth, part in enumerate(keys):
        if record is None:
            return  # inside a free mapping such as model.args, or reported by the type check
        hints = hints_of(record)
        if part not in hints:
            told = replacement_for(record, part, "override")
            error = foreign.override_error(key, text, inside=depth > 0) if foreign is not None and not told else None
            if error is not None:
                raise error
            near = _near_key(keys, depth, list(hints), cls)
            raise ConfigError(
                f"override --{key}={text}",
                why=f"{_OF_TORCH if told else ''}there is no key '{'.'.join(keys[: depth + 1])}'",
                fix=told or f"did you mean --{near}={text}?"
                if told or near
                else did_you_mean(part, list(hints), what="keys there"),
            )
        record = struct_in(hints[part])


def _near_key(keys: Keys, depth: int, beside: list[str], cls: type[msgspec.Struct]) -> str | None:
    """The key probably meant: one next to the unknown part, else one of that name anywhere."""
    written, meant = ".".join(keys).replace("-", "_"), _also_called(cls)
    if len(keys) == 1:  # without its section
        meant |= {word.rpartition(".")[2]: key for word, key in meant.items()}
    if written in meant:
        return meant[written]
    values = dotted_keys(cls)
    same = [key for key in values if key.rpartition(".")[2] == keys[-1]] if len(keys) == 1 else []
    near = closest(keys[depth], beside)
    if near and not same:
        return ".".join([*keys[:depth], near, *keys[depth + 1 :]])
    return same[0] if same else closest(".".join(keys[depth:]), values)


def _also_called(cls: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Dotted words that mean a key without being spelled like it -> the dotted key; see ``also_called`` of the records."""
    found = {f"{prefix}{word}": f"{prefix}{key}" for word, key in getattr(cls, "also_called", {}).items()}
    for key, hint in hints_of(cls).items():
        inner = struct_in(hint)
        found |= _also_called(inner, f"{prefix}{key}.") if inner else {}
    return found


def dotted_keys(cls: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Every key of a configuration that holds a value, as dotted overrides name them."""
    found: list[str] = []
    for key, hint in hints_of(cls).items():
        inner = struct_in(hint)
        found += [] if _is_section(hint) else [f"{prefix}{key}"]
        found += dotted_keys(inner, f"{prefix}{key}.") if inner else []
    return found


def _refuse_unknown_keys(cls: type[msgspec.Struct], layer: Layer, foreign: Foreign | None) -> None:
    """Raises ConfigError for all keys that no record has, together: each is a line of the fix."""
    found = list(_unknown_keys(cls, layer.values, (), layer, foreign))
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError(
            ", ".join(error.given for error in found),
            why="there are no such keys",
            fix="\n       ".join(e.fix if "\n" in e.fix else f"{e.given}: {e.fix}" for e in found),
        )


def _drop_replaced(layer: Layer, cls: type[msgspec.Struct]) -> None:
    """Removes what a file leaves open and ``build`` of the section makes needless: nobody has written it, so nothing contradicts."""
    for section, hint in hints_of(cls).items():
        values = layer.values.get(section)
        if not isinstance(values, dict) or values.get("build") is None:
            continue
        is_given = _is_override(layer, (section, "build"))
        for key in getattr(struct_in(hint), "needless_with_build", ()):
            is_stand_in = (
                is_given and values.get(key) in (SOME_MODEL, SOME_DATA) and not _is_override(layer, (section, key))
            )
            if values.get(key) == UNWRITTEN or is_stand_in:
                del values[key]


def _is_override(layer: Layer, path: Keys) -> bool:
    return layer.origins.get(path, "").startswith("override ")


def _refuse_unwritten(layer: Layer) -> None:
    """Raises ConfigError for all keys that a file leaves to whoever runs it."""
    found = [".".join(keys) for keys in _unwritten(layer.values, ())]
    if found:
        first = _origin(layer, tuple(found[0].split(".")))
        raise ConfigError(
            f"{', '.join(f'{key} = {UNWRITTEN}' for key in found)} ({first})",
            why="the run depends on it, and where this was written it was not known",
            fix=f"write it there, or give it: {' '.join(f'--{key}=...' for key in found)}",
        )


def _unwritten(values: Mapping[str, Any], path: Keys) -> Iterator[Keys]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _unwritten(value, (*path, key))
        elif value == UNWRITTEN and isinstance(value, str):
            yield (*path, key)


def _unknown_keys(
    cls: type[msgspec.Struct], values: Mapping[str, Any], path: Keys, layer: Layer, foreign: Foreign | None
) -> Iterator[ConfigError]:
    hints = hints_of(cls)
    unknown = {key: value for key, value in values.items() if key not in hints}
    by_torch = {key: told for key in unknown if (told := replacement_for(cls, key, "file"))}
    theirs: dict[str, Any] = {}
    if foreign is not None:
        theirs = {k: v for k, v in unknown.items() if k not in by_torch and foreign.file_error({k: v}, path, "")}
        first = _origin(layer, (*path, next(iter(theirs)))) if theirs else ""
        if theirs and (error := foreign.file_error(theirs, path, first)) is not None:
            yield error
    for key, value in unknown.items():
        if key not in theirs:
            yield _unknown_key(key, value, cls, path, layer, by_torch.get(key))
    for key, value in values.items():
        inner = struct_in(hints[key]) if key in hints else None
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(inner, value, (*path, key), layer, foreign)


def _build(cls: type[C], values: Mapping[str, Any], path: Keys, layer: Layer, origins: dict[str, str]) -> C:
    """Build one record from plain values, checking each key, so that an error can name the key's line."""
    hints = hints_of(cls)
    built: dict[str, Any] = {}
    for key, hint in hints.items():
        here = (*path, key)
        inner = struct_in(hint)
        if key not in values:
            _default_origins(default_of(cls, key), here, origins)
        elif inner is not None and (isinstance(values[key], dict) or (values[key] is None and _is_section(hint))):
            if values[key] is None:
                raise ConfigError(
                    f"{'.'.join(here)} ({_origin(layer, here)})",
                    why="the section is empty",
                    fix=f"remove it, or give it keys: {', '.join(hints_of(inner))}",
                )
            built[key] = _build(inner, values[key], here, layer, origins)
        else:
            where = f"{'.'.join(here)} = {_short(values[key])} ({_origin(layer, here)})"
            is_free = isinstance(values[key], dict) and "Any" in str(hint)
            value = _without_switches(values[key], here, layer, is_free=is_free)
            built[key] = checked(value, hint, where=where, key=key)
            _leaf_origins(values[key], here, layer, origins)
    try:
        return cls(**built)
    except ShardwiseError as error:
        raise _located(error, list(hints), path, layer) from None


def _without_switches(value: Any, path: Keys, layer: Layer, *, is_free: bool) -> Any:
    """``value`` with plain texts, for a key whose type says what they are. Raises ConfigError for a bare ``no`` or ``yes`` in free
    arguments: the user's code would take the text, which is true, for the truth value that other readers of YAML give."""
    if isinstance(value, dict):
        return {key: _without_switches(inner, (*path, key), layer, is_free=is_free) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_switches(inner, path, layer, is_free=is_free) for inner in value]
    if isinstance(value, BareSwitch) and is_free:
        meant = "true" if value.lower() in ("yes", "on") else "false"
        raise ConfigError(
            f"{'.'.join(path)} = {value} ({_origin(layer, path)})",
            why=f"without quotes it is a text here (YAML 1.2), which counts as true in Python, and {meant} for other readers (YAML 1.1)",
            fix=f'write {meant}, or "{value}" in quotes for the text',
        )
    return str(value) if isinstance(value, BareSwitch) else value


def _is_section(hint: Any) -> bool:
    """Whether a field's type is a record and nothing else, as for sections."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _unknown_key(
    key: str, value: object, cls: type[msgspec.Struct], path: Keys, layer: Layer, told: str | None
) -> ConfigError:
    section, also_called = ".".join(path), getattr(cls, "also_called", None)
    what = f"keys of {section}" if section else "sections"
    fix = missing_blank(key, value) or told
    return ConfigError(
        f"{'.'.join((*path, key))} ({_origin(layer, (*path, key))})",
        why=f"{_OF_TORCH if told and fix == told else ''}there is no key '{key}' in {section or 'a configuration'}",
        fix=fix or did_you_mean(key, list(hints_of(cls)), what=what, also_called=also_called),
    )


def _located(error: ShardwiseError, keys: list[str], path: Keys, layer: Layer) -> ShardwiseError:
    """Adds to an error that a record raised the lines of the keys it mentions."""
    mentioned = []
    for full, origin in layer.origins.items():
        names = [".".join(full), *([full[-1]] if full[:-1] == path and full[-1] in keys else [])]
        if full[: len(path)] == path and any(re.search(rf"(?<![\w.]){re.escape(n)}=", error.given) for n in names):
            mentioned.append(origin)
    if mentioned:
        error.given = f"{error.given} ({', '.join(dict.fromkeys(mentioned))})"
        error.args = (error.given,)
    return error


def _origin(layer: Layer, path: Keys) -> str:
    """Where a path was written, or, if only a mapping around it was (an inline table), where that was."""
    while path and path not in layer.origins:
        path = path[:-1]
    return layer.origins.get(path, "unknown place")


def _leaf_origins(value: Any, path: Keys, layer: Layer, origins: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _leaf_origins(inner, (*path, key), layer, origins)
    else:
        origins[".".join(path)] = _origin(layer, path)


def _default_origins(value: Any, path: Keys, origins: dict[str, str]) -> None:
    if isinstance(value, msgspec.Struct):
        for key in value.__struct_fields__:
            _default_origins(getattr(value, key), (*path, key), origins)
    else:
        origins[".".join(path)] = "default"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
