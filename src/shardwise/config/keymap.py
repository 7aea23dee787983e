"""Key maps: rules that rename tensors between the names of two libraries. Torch-free.

A map is YAML: a list of ``{from: <regular expression>, to: <replacement>}``, tried in order; the first that matches a
whole name renames it. ``permute`` reorders rows between two conventions of rotary embeddings; ``drop: true`` leaves a
tensor out. Maps that are often needed are in ``maps/`` next to this file, under their names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from shardwise.config.record import Options, doc
from shardwise.config.sources import parse_yaml_value
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

_HOME = Path(__file__).parent / "maps"
_KEYS = ("from", "to", "permute", "heads", "drop")


class Rule(Options, frozen=True, kw_only=True):
    """One rule of a key map. ``pattern`` is ``from`` in YAML, which is a reserved word in Python."""

    pattern: Annotated[str, doc("a regular expression that matches the whole name")]
    to: Annotated[str | None, doc(r"the new name; \1 is what the first pair of brackets matched")] = None
    permute: Annotated[
        Literal["halves-to-pairs", "pairs-to-halves"] | None,
        doc("rows of each attention head: from real parts, then imaginary ones, to pairs of both; or back"),
    ] = None
    heads: Annotated[
        int | str | tuple[str, ...] | None, doc("how many heads: a number, or keys of config.json, the first there is")
    ] = None
    drop: Annotated[bool, doc("leave the tensor out")] = False

    def check(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
            if self.to is not None:
                re.sub(self.pattern, self.to, "")
        except (re.error, IndexError) as error:
            given = f"a rule from {self.pattern!r} to {self.to!r}"
            raise ConfigError(
                given, why=f"not a valid regular expression: {error}", fix=r"write dots as \.; quote it in YAML"
            ) from None
        if (self.to is None) == (not self.drop):
            raise ConfigError(
                f"a rule from {self.pattern!r} with {groups} groups",
                why="a tensor is either renamed or left out",
                fix="give it 'to: new.name' or 'drop: true', one of them",
            )
        if (self.permute is None) != (self.heads is None) or (self.drop and self.heads is not None):
            raise ConfigError(
                f"a rule from {self.pattern!r}",
                why="rows are permuted within each head, so both are needed; of what is left out, neither",
                fix="write both: permute: halves-to-pairs, heads: num_attention_heads",
            )


def map_names() -> list[str]:
    return sorted(path.stem for path in _HOME.glob("*.yaml"))


def load_map(name: str | Path) -> tuple[Rule, ...]:
    """The rules of a map, by its name or from a YAML file."""
    path = _HOME / f"{name}.yaml" if str(name) in map_names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if path.exists():
            why = f"reading failed: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(f"--map {name}", why=why, fix="give a YAML file in UTF-8 that you may read") from None
        raise ConfigError(
            f"--map {name}",
            why="there is no such map, and no such file",
            fix=did_you_mean(str(name), map_names(), what="maps"),
        ) from None
    return rules_of(parse_yaml_value(text, str(path)), str(path))


def rules_of(values: object, where: str) -> tuple[Rule, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(
            where, why="a map is a list of rules", fix=r"write: - {from: 'model\.(.*)', to: '\1'}, one line per rule"
        )
    return tuple(_rule(value, f"{where}, rule {number}") for number, value in enumerate(values, start=1))


def _rule(value: object, where: str) -> Rule:
    if not isinstance(value, Mapping) or "from" not in value:
        why = "it has no 'from'" if isinstance(value, Mapping) else "a rule is a mapping"
        raise ConfigError(where, why=why, fix=r"write: - {from: 'model\.(.*)', to: '\1'}")
    unknown = next((key for key in value if key not in _KEYS), None)
    if unknown is not None:
        fix = did_you_mean(str(unknown), _KEYS, what="keys of a rule")
        raise ConfigError(f"{where}: {unknown}", why="a rule has no such key", fix=fix)
    try:
        return Rule(**{"pattern" if key == "from" else str(key): part for key, part in value.items()})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.given}", why=error.why, fix=error.fix) from None
