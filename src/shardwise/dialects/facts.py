"""The facts of a configuration: what it says in meanings that several systems have, which key said it, and what became of that key."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.dialects.table import Row, Table
from shardwise.dialects.values import ABSENT, RefusedError, short

_EITHER = ("offload", "compile")  # facts that several switches turn on: one that is on counts
_LATER = (
    "data",
    "model",
    "report_to",
    "optimizer_arg",
    "pin",
)  # facts of which the more particular key is the later row
_MOST_COMPARED = 200  # keys of a configuration that the nearest name is looked for


class StoppedError(Exception):
    """A key is refused, and what it belongs to is not settled further."""


def settles(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that settles facts: it ends, with None, where one of them is refused by :meth:`Facts.stop_if`."""

    @functools.wraps(function)
    def settled(*args: Any) -> Any:
        with contextlib.suppress(StoppedError):
            return function(*args)

    return settled


class Curve(NamedTuple):
    """A learning rate curve: whose it is, and which of its."""

    family: str
    kind: str


@dataclass
class Note:
    """One key of the source, and what became of it."""

    key: str  # as the source has it
    value: Any
    is_given: bool  # the source says it; else it is the default there
    verdict: str  # kept, changed, dropped or refused
    say: str = ""
    ours: dict[str, str] = field(default_factory=dict)  # our keys, and their values as they are shown
    is_used: bool = False  # something was made of it
    is_fact: bool = False  # it counts by a fact, so that something has to be made of it

    def change(self, verdict: str, text: str) -> None:
        self.verdict, self.is_used = verdict, True
        self.say = "; ".join(dict.fromkeys(part for part in (self.say, text) if part))

    def drop(self, text: str) -> None:
        self.verdict, self.say, self.is_used = "dropped", text, True


@dataclass(frozen=True)
class Fact:
    """A meaning with its value, and the key that said it."""

    value: Any
    note: Note


class Facts:
    """What was read of one configuration. ``settle`` takes facts out of it, and puts our keys in.

    Args:
        allow: keys that are left out where they would be refused.
        prefix: of all keys, in a configuration within another.
    """

    def __init__(self, table: Table, *, allow: tuple[str, ...] = (), prefix: str = ""):
        self.table, self.allow, self.prefix = table, allow, prefix
        self.known: dict[str, Fact] = {}
        self.run: dict[str, Any] = {}  # our keys, as sections
        self.notes: list[Note] = []  # what became of each key
        self.refused: list[RefusedError] = []
        self.left_out: set[str] = set()  # entries of allow that left something out
        self.off: dict[str, str] = {}  # keys and sections that another key switches off -> what it says
        self.decides = table  # whose rules say what counts of an outer configuration: of the innermost that was read
        self.is_record = False  # a record of options, not a whole configuration
        self.is_exact = False  # curves are to be theirs, whichever of ours is near
        self.nodes = 1
        self.num_compared = 0  # keys that the nearest name was looked for
        self.missing: list[str] = []  # what the source cannot say
        self.followed: set[str] = set()  # our keys that others are computed from
        self.arithmetic = ""  # how many samples a step has, and why

    # ---- what the source says ----------------------------------------------------------------------------------------

    def has(self, *names: str) -> bool:
        """Whether one of these facts has a value."""
        return any(name in self.known and self.known[name].value is not None for name in names)

    def named(self, *names: str) -> list[str]:
        """Those of these facts that were given, else those that there are."""
        return [name for name in names if self.is_given(name)] or [name for name in names if name in self.known]

    def is_given(self, name: str) -> bool:
        """Whether the source itself says it, and not only a default there."""
        return name in self.known and self.known[name].note.is_given

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a fact, whose key is used by that; ``default`` where there is none."""
        if name not in self.known:
            return default
        self.known[name].note.is_used = True
        return default if self.known[name].value is None else self.known[name].value

    def number(self, name: str) -> int | None:
        value = self.take(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def note(self, name: str) -> Note | None:
        return self.known[name].note if name in self.known else None

    def first(self, *names: str) -> str:
        """The first of these facts that was given, else the first there is."""
        return [*self.named(*names), names[0]][0]

    def key(self, *names: str) -> str:
        name = self.first(*names)
        return self.known[name].note.key if name in self.known else name

    def add(self, name: str, value: Any, note: Note) -> None:
        """A fact, as one key says it. Two keys that were given and contradict each other are refused."""
        old, is_later = self.known.get(name), name in _LATER
        if old is not None and not note.is_given and not (is_later and old.value is None):
            return
        if old is not None and value is None and is_later:
            note.is_used = True
            return
        if old is not None and old.note.is_given and old.value != value and not is_later:
            if name not in _EITHER:
                self.contradicts(note, old.note)
                return
            if old.value and not value:
                note.is_used = True
                return
        if old is not None:
            old.note.is_used = True  # another key says the same
        self.known[name] = Fact(value, note)

    def contradicts(self, note: Note, old: Note) -> None:
        self.refuse(note.key, f"it contradicts {old.key}={short(old.value)}: write one of them", note)

    # ---- what becomes of it ------------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, *names: str) -> None:
        """Our key, and the facts that it comes from."""
        place, last = self._place(key, is_made=True)
        if names and place.get(last, value) != value and not isinstance(place[last], list):
            self._end_of(key, names)
        place[last] = value
        for note in map(self.note, names):
            if note is not None and (note.is_used or len(names) == 1):
                note.is_used = True
                note.ours[key] = short(value)

    def pass_on(self, key: str, name: str, make: Callable[[Any], Any] = lambda value: value) -> None:
        """Our key as a fact says it, if it has a value."""
        if (value := self.take(name)) is not None:
            self.put(key, make(value), name)

    def _end_of(self, key: str, names: tuple[str, ...]) -> None:
        """Facts that said our key before other ones did no longer count."""
        others = [id(self.note(name)) for name in names]
        for note in self.notes:
            if key in note.ours and id(note) not in others:
                del note.ours[key]
                if not note.ours:
                    note.drop(f"{self.key(*names)} counts there")

    def put_once(self, key: str, value: Any, note: Note) -> None:
        """Our key, as a row says it by itself: a key that was given counts more than a default, two that were given and differ are
        refused, and lists are joined."""
        old = self.get(key)
        said_by = next((one for one in self.notes if one is not note and key in one.ours), None)
        if isinstance(old, list) and isinstance(value, list):
            value = list(dict.fromkeys([*old, *value]))
        elif said_by is not None and said_by.is_given and old != value:
            if note.is_given:
                self.contradicts(note, said_by)
            return
        self.put(key, value)
        note.is_used = True
        note.ours[key] = short(value)

    def drop(self, key: str) -> None:
        """Takes one of our keys out again; what said it has no effect then, unless it is used elsewhere."""
        for note in self.notes:
            left = {ours: shown for ours, shown in note.ours.items() if not f"{ours}.".startswith(f"{key}.")}
            if len(left) < len(note.ours):
                note.ours, note.is_used, note.is_fact = left, bool(left), True
        place, last = self._place(key)
        place.pop(last, None)

    def get(self, key: str) -> Any:
        place, last = self._place(key)
        return place.get(last)

    def _place(self, key: str, *, is_made: bool = False) -> tuple[dict[str, Any], str]:
        """The section of one of our keys, and its last part."""
        *sections, last = key.split(".")
        place = self.run
        for section in sections:
            if is_made and not isinstance(place.get(section), dict):
                place[section] = {}
            inner = place.get(section)
            place = inner if isinstance(inner, dict) else {}
        return place, last

    def say(self, name: str, verdict: str, text: str) -> None:
        """What is said of a key where it depends on others too."""
        note = self.note(name)
        if note is None:
            return
        if verdict == "refused":
            note.is_used = True
            self.refuse(note.key, text, note)
        else:
            note.change(verdict, text)

    def stop_if(self, is_wrong: Any, name: str, text: str) -> None:
        """Refuses the key of a fact, and ends what is being settled; see :func:`settles`."""
        if is_wrong:
            self.say(name, "refused", text)
            raise StoppedError

    def refuse(self, key: str, text: str, note: Note | None = None, *, value: Any = ABSENT) -> None:
        """Refuses a key, unless it is to be left out by name."""
        sections = ((name, name.removesuffix("*").removesuffix(".") + ".") for name in self.allow)
        left_out = next((name for name, section in sections if key == name or key.startswith(section)), None)
        value = value if note is None else note.value
        if left_out is None:
            self.refused.append(RefusedError(key, text, value, is_default=note is not None and not note.is_given))
            return
        self.left_out.add(left_out)
        if note is None:
            self.notes.append(note := Note(key, None if value is ABSENT else value, True, "dropped"))
        note.drop(f"left out, as --allow says: {text}")

    def refuse_unknown(self, shown: str, key: str, table: Table) -> None:
        """Refuses a key without a row, with the nearest there is: of so many keys that it takes no time."""
        self.num_compared += 1
        self.refuse(shown, table.unknown(key, is_compared=self.num_compared <= _MOST_COMPARED))

    def is_misspelt(self, row: Row, key: str, shown: str, value: Any) -> bool:
        """Whether a key that only a row of its whole section takes is nearly one of the section's own, which is refused."""
        self.num_compared += row.key.endswith(".*")
        if not row.key.endswith(".*") or self.num_compared > _MOST_COMPARED:
            return False
        near = self.table.misspelt(row, key)
        if near:
            self.refuse(shown, f"{self.table.name} has no such key: did you mean {near!r}?", value=value)
        return near is not None

    def refuse_error(self, error: RefusedError) -> None:
        self.refuse(error.key, error.text, value=error.value)

    def end_of_notes(self) -> None:
        """A key that was given, counts by a fact, and that nothing used, says so."""
        for note in self.notes:
            if note.is_given and note.is_fact and not note.is_used and note.verdict in ("kept", "changed"):
                note.verdict, note.say = "dropped", "it has no effect in this configuration"
