"""The tensors that a conversion writes: those of the source, renamed, cast, and with reordered rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.config.keymap import Rule
from shardwise.config.suggest import first_few
from shardwise.config.tokenizer import json_object
from shardwise.errors import CheckpointError, ConfigError, errors_about
from shardwise.model import dtype_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import Box
from shardwise.state.changed_rows import Reordered
from shardwise.state.files import OpenFiles
from shardwise.state.stored import Source, TensorSource, is_rounded
from shardwise.state.targets.plan import Fact


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the source as the conversion writes it."""

    name: str
    source: str
    stored: TensorSource
    dtype: str

    @property
    def fact(self) -> Fact:
        return Fact(self.stored.shape, self.dtype)

    def block(self, box: Box, buffer: Tensor, files: OpenFiles) -> Tensor:
        """Reads ``box`` into ``buffer``, and returns its bytes as they are written."""
        memory = buffer[: box.numel * DTYPE_BYTES[self.dtype]]
        with errors_about(self.source):
            self.stored.read(box, memory.view(dtype_of(self.dtype)).view(box.sizes), files)
        return memory


def converted_tensors(
    source: Source, rules: Sequence[Rule], config: Mapping[str, Any], dtype: str | None, keep: Sequence[str]
) -> tuple[list[ConvertedTensor], list[str]]:
    """The tensors to write, in the source's order, and notes for the user.

    Args:
        rules: of a key map; a name that no rule matches is kept.
        config: the model's ``config.json``, for numbers of heads.
        dtype: for floating-point tensors; None: as they are.
        keep: regular expressions for (new) names that keep their dtype.
    """
    if not source.tensors:
        raise CheckpointError(source.place, why=f"{source.kind} without a tensor in it", fix="name another source")
    notes: list[str] = []
    found = _renamed(source, rules, config, notes)
    patterns = [re.compile(pattern) for pattern in keep]
    for pattern in patterns:
        if not any(pattern.search(name) for name in found):
            raise ConfigError(
                f"--keep {pattern.pattern}", why="no tensor has such a name", fix=f"names look like {next(iter(found))}"
            )
    result = []
    for name, (origin, stored) in found.items():
        cast = dtype is not None and is_rounded(stored.dtype) and not any(pattern.search(name) for pattern in patterns)
        result.append(ConvertedTensor(name, origin, stored, dtype if cast and dtype is not None else stored.dtype))
    if dtype is not None and all(item.dtype == item.stored.dtype for item in result):
        notes.append(f"--dtype {dtype} changes nothing: every tensor that it is for has that dtype")
    return result, notes


def _renamed(
    source: Source, rules: Sequence[Rule], config: Mapping[str, Any], notes: list[str]
) -> dict[str, tuple[str, TensorSource]]:
    found: dict[str, tuple[str, TensorSource]] = {}
    left: list[str] = []
    dropped: list[str] = []
    for name, stored in source.tensors.items():
        rule = next((rule for rule in rules if re.fullmatch(rule.pattern, name)), None)
        if rule is None:
            left.append(name)
        elif rule.drop:
            dropped.append(name)
            continue
        new = name if rule is None or rule.to is None else re.sub(rule.pattern, rule.to, name, count=1)
        if new in found:
            raise ConfigError(
                f"the key map: {found[new][0]} and {name}",
                why=f"both would be called {new}",
                fix="give the rules different replacements, or leave one of the two out (drop: true)",
                name=new,
            )
        found[new] = (name, stored if rule is None or rule.permute is None else _reordered(name, stored, rule, config))
    if rules and len(left) == len(source.tensors):
        raise ConfigError(
            "the key map",
            why=f"no rule matches any of the {len(left)} names of {source.place}",
            fix=f"names there look like {left[0]}; is it the map of the other direction?",
        )
    if rules and left:
        notes.append(f"{first_few(left)}: no rule of the map matches, so the name stays")
    if dropped:
        notes.append(f"{first_few(dropped)}: left out, as the map says")
    return found


def _reordered(name: str, stored: TensorSource, rule: Rule, config: Mapping[str, Any]) -> Reordered:
    keys = (rule.heads,) if isinstance(rule.heads, int | str) else rule.heads or ()
    number = next(
        (key if isinstance(key, int) else config[key] for key in keys if isinstance(key, int) or config.get(key)), None
    )
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(
            f"the key map: the number of heads of {name}",
            why=f"the model's configuration has none of {', '.join(map(str, keys))}"
            if number is None
            else f"it is {number!r}",
            fix="put the model's config.json next to the weights, or name it: --config path/to/config.json",
            name=name,
        )
    if not stored.shape or stored.shape[0] % (2 * number):
        raise ConfigError(
            f"the key map: {number} heads in shape {list(stored.shape)}",
            why="the rows of each head are taken in pairs, and these do not divide so",
            fix="check the number of heads in config.json",
            name=name,
        )
    return Reordered(stored.shape, stored.dtype, stored, number, rule.permute == "halves-to-pairs")


def config_of(home: Path, path: Path | None) -> dict[str, Any]:
    """The model's configuration: from ``path``, else ``config.json`` or ``params.json`` in ``home``, else empty."""
    places = [path] if path is not None else [home / "config.json", home / "params.json"]
    for place in places:
        if path is not None or place.is_file():
            content = json_object(place, f"the configuration {place}", "give the model's config.json")
            inner = content.get("text_config")  # of a vision-language model: the numbers of its language model
            return {**inner, **content} if isinstance(inner, dict) else content
    return {}


def places_of(stored: TensorSource) -> tuple[Any, ...]:
    """The places of a tensor's bytes, in the order in which they are read."""
    order = (stored.heads, stored.to_pairs) if isinstance(stored, Reordered) else ()
    return (*order, stored.shape, stored.dtype, *stored.origins)


def ties_among(items: Sequence[ConvertedTensor]) -> dict[str, str]:
    """Tied tensors, which are at one place in the source: name -> the first name of the same values."""
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for item in items:
        if item.stored.origins and item.stored.num_bytes:
            key = (item.dtype, places_of(item.stored))
            if first.setdefault(key, item.name) != item.name:
                ties[item.name] = first[key]
    return ties
