"""The table of one system: for each key of its configuration what it takes, its default there, what it becomes here. Torch-free.

A table is a page of ``tables/``: a head of ``word: value`` lines, then one row for each key::

    | key | takes | default | meaning there | ours | verdict | say |

``ours`` names our key (``optim.lr``), a fact that several systems have (``@micro``), a constant (``@mp=bf16``), another key
of the same system (``= other.key``), a configuration within this one (``file: NAME``), or nothing (``-``). ``ours``, ``verdict``
and ``say`` have an entry for the row, and entries for single values: ``kept ; no: dropped``. ``*`` is any value but the default.
"""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from shardwise.dialects.values import ABSENT, coerced, literal, word_of
from shardwise.techniques import TECHNIQUES

TABLES = Path(__file__).parent / "tables"
VERDICTS = ("kept", "changed", "dropped", "refused")  # and "needs NAME": refused until there is such a technique
_COMPOSED = ("defaults", "hydra")  # of a file that is a part of a configuration
_HEAD_LINE = re.compile(r"(\w+): ?(.*)")


@dataclass(frozen=True)
class Row:
    key: str  # dotted; a ``*`` in the middle is one part, at the end the rest; ``(loss)`` is a meaning that no key has
    takes: tuple[str, ...]  # the words and kinds of values
    default: Any  # its value there where it is not given; ABSENT: none
    meaning: str  # there
    actions: Mapping[str, tuple[str, ...]]  # value -> what it becomes; "": of other values
    verdicts: Mapping[str, str]  # value -> kept, changed, dropped, refused or ``needs NAME``
    says: Mapping[str, str]  # value -> the sentence

    @cached_property
    def is_pattern(self) -> bool:
        return "*" in self.key

    @cached_property
    def is_of_all(self) -> bool:
        """Whether it is a meaning of every configuration of the system, without a key."""
        return self.key.startswith("(")

    @cached_property
    def usual(self) -> Any:
        return self.coerced(self.default, self.key)

    @cached_property
    def default_word(self) -> str:
        return word_of(self.default)

    @cached_property
    def alias(self) -> str:
        """The other key that this one is a name of; empty: none."""
        first = self.actions.get("", ())
        return first[0][1:] if first and first[0].startswith("=") else ""

    @cached_property
    def within(self) -> str:
        """What the configuration within is: the name of a table, or a section of this one; empty: there is none."""
        return next((self.actions[kind][0] for kind in ("file", "table") if kind in self.actions), "")

    def action_of(self, word: str) -> tuple[str, ...]:
        return self._entry(self.actions, word)

    def answer_of(self, word: str) -> tuple[str, str]:
        """The verdict and the sentence; of what waits for a technique, those that hold with or without it."""
        verdict, say = self._entry(self.verdicts, word), self._entry(self.says, word)
        if say == self.says.get("*") and verdict != self.verdicts.get("*", verdict):
            say = self.says[""]  # that of the rest is of its verdict
        if verdict.startswith("needs "):
            return ("kept", "") if exists(verdict.removeprefix("needs ")) else ("refused", say)
        return verdict, say

    def _entry(self, entries: Mapping[str, Any], word: str) -> Any:
        """The entry of a value: its own, that of a class's bare name, that of any but the default, that of the row."""
        word = word.lower()
        own = entries.get(word)
        if own is None and "." in word and "/" not in word and "*" not in word:
            own = entries.get(word.rpartition(".")[2])
        if own is None and "*" in entries and word != self.default_word:
            own = entries["*"]
        return entries[""] if own is None else own

    def coerced(self, value: Any, key: str) -> Any:
        """The value as its own type; see :func:`shardwise.dialects.values.coerced`."""
        return coerced(value, self.takes, key, may_be_infinite="@clip" in self.action_of(""))


@dataclass(frozen=True)
class Table:
    name: str
    head: Mapping[str, str]
    rows: Mapping[str, Row] = field(repr=False)

    def words(self, line: str) -> tuple[str, ...]:
        return tuple(_split(self.head.get(line, ""), ","))

    def pairs(self, line: str) -> dict[str, str]:
        """The ``name=value`` words of a line of the head."""
        return dict(word.split("=") for word in self.words(line))

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        rows = sorted((row for row in self.rows.values() if row.is_pattern), key=lambda row: -len(row.key))
        texts = (re.sub(r"\\\.\\\*$", r"\\..+", re.escape(row.key)).replace(r"\*", "[^.]+") for row in rows)
        return [(re.compile(text), row) for text, row in zip(texts, rows, strict=True)]

    @cached_property
    def plain_keys(self) -> list[str]:
        return [key for key, row in self.rows.items() if not row.is_pattern and not key.startswith(("(", "@"))]

    @cached_property
    def defaults(self) -> list[tuple[str, Row]]:
        """The rows of keys that have a default, each with its section."""
        return [
            (key.rpartition(".")[0], self.rows[key]) for key in self.plain_keys if self.rows[key].default is not ABSENT
        ]

    def find(self, key: str) -> Row | None:
        """The row of a key: its own, else the longest pattern that it fits."""
        return self.rows.get(key) or next((row for pattern, row in self._patterns if pattern.fullmatch(key)), None)

    def has_section(self, key: str) -> bool:
        return any(known.startswith(f"{key}.") for known in self.rows)

    def unknown(self, key: str, *, is_compared: bool = True) -> str:
        """What is said of a key without a row, with the nearest that there is."""
        if key.split(".")[0] in _COMPOSED:
            return "other files are put together by it: print the resolved configuration first, and import that"
        near = difflib.get_close_matches(key, self.plain_keys, 1, 0.6) if is_compared else []
        if is_compared and not near:
            last = {known.rpartition(".")[2]: known for known in reversed(self.plain_keys)}
            near = [last[word] for word in difflib.get_close_matches(key.rpartition(".")[2], [*last], 1, 0.75)]
        what = f"did you mean {near[0]!r}?" if near else "remove it"
        return f"{self.name} ({self.version}) has no such key: {what}"

    @property
    def version(self) -> str:
        """The versions whose definitions the rows follow, without the files that they are in."""
        return re.sub(r" \([^()]*\)", "", self.head.get("version", "")).partition(";")[0]

    def misspelt(self, row: Row, key: str) -> str | None:
        """For a key that only a pattern of its section takes: one of the section's own that it nearly is."""
        section = row.key.removesuffix("*")
        own = [known.removeprefix(section) for known in self.plain_keys if known.startswith(section)]
        near = difflib.get_close_matches(key.removeprefix(section), own, 1, 0.85)
        return f"{section}{near[0]}" if near and _places(near[0]) == _places(key.removeprefix(section)) else None

    def flatten(self, values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
        """Nested values as dotted keys. Items of a list of mappings are named by the key that the head's ``lists`` says, else by
        their place; a section whose keys may be written without their prefix (``prefix``) gets it."""
        prefix, by = self.pairs("prefix").get(path, ""), self.pairs("lists")
        for name, value in values.items():
            key = f"{path}.{name}" if path else str(name)
            if prefix and (longer := f"{path}.{prefix}{name}".removeprefix(".")) in self.rows:
                key = longer
            if isinstance(value, list) and value and all(isinstance(v, dict) for v in value) and key not in self.rows:
                for place, item in enumerate(value):
                    yield from self.flatten(item, f"{key}.{item.get(by.get(key, ''), place)}")
            elif isinstance(value, dict) and value and not self._is_leaf(key):
                yield from self.flatten(value, key)
            else:
                yield key, value

    def _is_leaf(self, key: str) -> bool:
        row = self.rows.get(key)
        takes_any = row is not None and bool({"map", "table", "any"} & {*row.takes})
        return row is not None and (bool(row.within) or (takes_any and not self.has_section(key)))


def _places(key: str) -> list[str]:
    return [part for part in key.split(".") if part.isdigit()]


def exists(technique: str) -> bool:
    """Whether there is a technique of this name, for rows that wait for it."""
    return any(technique == one.name for one in TECHNIQUES)


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in TABLES.glob("*.md") if path.stem != "words"))


@cache
def head_of(name: str) -> Table:
    """A table without its rows: what says whether a configuration is of the system."""
    with (TABLES / f"{name}.md").open(encoding="utf-8") as page:
        lines = itertools.takewhile(lambda line: not line.startswith("| "), page)
        return Table(name, {match[1]: match[2].strip() for match in map(_HEAD_LINE.match, lines) if match}, {})


def systems() -> list[str]:
    """The systems whose files are read; variables of an environment are read by another's."""
    return [name for name in names() if "dialect" not in head_of(name).head]


@cache
def load(name: str) -> Table:
    head = head_of(name).head
    rows = dict(load(head["extends"]).rows) if "extends" in head else {}
    for line in (TABLES / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| key "):
            row = _row(line)
            rows[row.key] = row
    return Table(name, head, rows)


def _row(line: str) -> Row:
    key, takes, default, meaning, ours, verdict, say = (cell.strip() for cell in line.strip()[1:-1].split("|"))
    return Row(
        key,
        tuple(takes.split("/")),
        ABSENT if default in ("-", "req", "") else literal(default),
        meaning,
        _actions(ours),
        _by_word(verdict, ";"),
        _by_word(say, "‖"),
    )


def _split(cell: str, separator: str) -> list[str]:
    return [part.strip() for part in cell.split(separator) if part.strip()]


def _by_word(cell: str, separator: str) -> dict[str, str]:
    """``kept ; no: dropped`` -> ``{"": "kept", "no": "dropped"}``."""
    found = {"": ""}
    for place, part in enumerate(cell.split(separator)):
        word, colon, rest = part.strip().partition(":")
        has_word = colon and (place or separator == ";") and (" " not in word.strip() or separator == "‖")
        found |= {word.strip().lower(): rest.strip()} if has_word else {"": part.strip()}
    return found


def _actions(cell: str) -> dict[str, tuple[str, ...]]:
    if cell.startswith("= "):
        return {"": (f"={cell[2:].strip()}",)}
    by_word = _by_word(cell, ";") if re.match(r"[^\s@:=]*: ", cell) else {"": cell}
    return {word: () if text == "-" else tuple(_split(text, "&")) for word, text in by_word.items()}
