"""From one configuration to facts: whose it is, each key by its row, configurations within it, defaults of what is absent."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.config.sources import read_file
from shardwise.dialects.facts import Curve, Fact, Facts, Note
from shardwise.dialects.table import Row, Table, head_of, load, names, systems
from shardwise.dialects.values import ABSENT, UNRESOLVED, RefusedError, literal, short, word_of
from shardwise.errors import ConfigError

SECTIONS = ("model", "data", "parallel", "optim", "schedule", "train", "checkpoint", "log", "launch")  # of a run file
_LEAST_KNOWN = 0.3  # the part of keys that must have a row for a configuration to be of a system
_LEAST_NAMED = 0.5  # the same of a system that was named, before another is thought of
_VARIABLE = re.compile(r"\$\{([^${}]*)\}")
# What a section of the inner configuration counts instead of the outer one's: fact of its own -> facts of both.
_GROUPS = {
    "clip": ("clip",),
    "optimizer": (
        "optimizer", "optimizer_arg", "lr", "betas", "beta1", "beta2", "eps", "decay", "momentum", "amsgrad",
    ),
    "curve": ("curve", "curve_args", "warmup", "warmup_ratio", "warmup_percent", "warmup_type", "floor", "cycles"),
}  # fmt: skip
_LEVELS = "levels of values within each other"
_MOST = {"values": 10_000, "letters": 1_000_000, _LEVELS: 50}  # of a configuration
_MOST_NAMES = 21  # variables that name each other; more: one names itself, and is refused as it is
_FILLED_BY = {"curve_max": "lr"}  # "auto" that is the value of another fact of the outer configuration


def detect(values: Mapping[str, Any], *, least: float = _LEAST_KNOWN) -> str:
    """The system whose configuration this is: by its signs, then by the part of keys that have a row."""
    scores = {name: score for name in systems() if (score := _score(name, values)) is not None}
    best = max(scores.values(), default=(False, 0.0, 0))
    found = [name for name, score in scores.items() if score == best and best[1] >= least]
    for head in map(head_of, systems()):
        if {head.name, extended := head.head.get("extends", head.name)} & {*found} and extended != head.name:
            is_unclear = values.keys() & {*head.words("unclear")} and not values.keys() & {*head.words("clear")}
            # its keys are another's and some of its own, with other defaults
            is_own = values.keys() & {*head.words("signs")}
            found = [head.name] if is_own else [extended, head.name] if is_unclear else [extended]
    if len(found) == 1:
        return found[0]
    if not found and values and values.keys() <= {*SECTIONS}:
        raise ConfigError(
            f"a configuration with the sections {', '.join(values)}",
            why="it is a run file of Shardwise already",
            fix="train it: shardwise train FILE",
        )
    raise ConfigError(
        f"a configuration with the keys {', '.join(list(values)[:6]) or '(none)'}",
        why=f"it could be of {' or '.join(found)}" if found else "it has the signs of no system",
        fix=f"say whose it is: --from {found[-1] if found else 'NAME'}; known are {', '.join(systems())}",
    )


def _score(name: str, values: Mapping[str, Any]) -> tuple[bool, float, int] | None:
    """Whether it has a mark of the system, the part of its keys that have a row, and how many signs there are; None: none, or a key that no
    configuration of the system has."""
    signs = values.keys() & {*head_of(name).words("signs")}
    if values.keys() & {*head_of(name).words("never")}:
        return None
    has_mark = any(key in head_of(name).words("marks") for key in _keys_in(values))
    return (has_mark, round(_part_known(name, values, but="*"), 3), len(signs)) if signs else None


def _part_known(name: str, values: Mapping[str, Any], but: str = " ") -> float:
    keys = [key for key, _ in load(name).flatten(values)]
    return sum(_is_known(load(name), key, but) for key in keys) / max(1, len(keys))


def _is_known(table: Table, key: str, but: str) -> bool:
    """Whether a key has a row, of another system's configuration within too, that does not end in ``but``."""
    row = table.find(key)
    if row is not None and row.is_pattern and row.within in names():
        return _is_known(load(row.within), key.removeprefix(row.key[:-1]), but)
    return row is not None and not row.key.endswith(but)


def refuse_other_system(name: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError where most keys are of another system than the one that was named."""
    if not values or _part_known(name, values) >= _LEAST_NAMED:
        return
    other = name
    with suppress(ConfigError):
        other = detect(values, least=_LEAST_NAMED)
    if other != name:
        raise ConfigError(
            f"--from {name}",
            why=f"most keys of the file are not of {name}, and this looks like {other}",
            fix=f"write --from {other}, or leave it out",
        )


def _keys_in(values: Any) -> set[str]:
    if isinstance(values, Mapping):
        return {*values}.union(*map(_keys_in, values.values()))
    return set().union(*map(_keys_in, values)) if isinstance(values, list) else set()


def interpolated(values: Mapping[str, Any]) -> dict[str, Any]:
    """With ``${a.b}`` of the same file put in; what is not there, and resolvers, stay as they are."""
    left = dict(_MOST)

    def spend(what: str, number: int) -> None:
        left[what] -= number
        if left[what] < 0:
            raise ConfigError(
                "a configuration",
                why=f"it has more than {_MOST[what]} {what}, with its variables put in, and is larger than a configuration is",
                fix="write out what the run needs, and import that",
            )

    def filled(value: Any, names: int = 0) -> Any:
        spend("values", 1)
        spend(_LEVELS, 1)
        if isinstance(value, Mapping):
            spend("letters", sum(len(str(key)) for key in value))
            value = {key: filled(inner, names) for key, inner in value.items()}
        elif isinstance(value, list | tuple):
            value = [filled(inner, names) for inner in value]
        elif isinstance(value, str):
            spend("letters", len(value))
            found = ((match[0], _at(values, match[1])) for match in _VARIABLE.finditer(value) if names < _MOST_NAMES)
            for said, named in found:
                if named is not ABSENT:
                    value = filled(named if said == value else value.replace(said, str(named)), names + 1)
                    break
        left[_LEVELS] += 1
        return value

    return filled(values)


def _at(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return ABSENT
        values = values[part]
    return values


def collect(values: Mapping[str, Any], facts: Facts, folder: Path | None) -> Facts:
    """Reads each key of a configuration by its row, then the defaults there of what is absent."""
    table, whole = facts.table, interpolated(values)
    variables = {name.split(".")[0] for name in _VARIABLE.findall(str(values)) if ":" not in name}
    given: dict[str, Any] = {}
    empty: set[str] = set()
    entries = [_entry(table, written, value) for written, value in table.flatten(whole)]
    facts.off = _switched_off(table, {key: value for _, key, _, value in entries})
    # in the order of rows, so that the order of keys means nothing; configurations within come last
    places = {key: place for place, key in enumerate(table.rows)}
    entries.sort(key=lambda one: (bool(one[2].within), places[one[2].key]) if one[2] else (False, -1))
    for written, key, row, value in entries:
        shown = facts.prefix + written
        if row is None or (value == {} and not {"map", "any"} & {*row.takes}):
            if value in (None, {}) and table.has_section(key):
                empty.add(key)
                facts.notes.append(Note(shown, value, True, "dropped", "an empty section: defaults there count"))
            elif written.split(".")[0] in variables:
                facts.notes.append(Note(shown, value, True, "dropped", "a variable of the file"))
            else:
                facts.refuse_unknown(shown, written, table)
        elif key in given:
            facts.refuse(shown, f"{key} is given twice: write it once", value=value)
        else:
            given[key] = value
            _read_key(row, key, facts.prefix + key, value, facts, folder)
    _read_defaults(given, empty, facts)
    return facts


def _entry(table: Table, written: str, value: Any) -> tuple[str, str, Row | None, Any]:
    """A key as it is written and as it is called, its row, and its value."""
    row = table.find(written)
    if row is not None and row.alias:
        return written, row.alias, table.find(row.alias), value
    return written, written, row, value


def _switched_off(table: Table, given: Mapping[str, Any]) -> dict[str, str]:
    """The keys, and sections, that count under one value of another key alone, which is not given (the head's ``switches``), each with
    what is there instead."""
    off = {}
    for place, said in table.pairs("switches").items():
        key, _, wanted = said.partition(":")
        row = table.rows[key]
        value = given.get(key, None if row.default is ABSENT else row.default)
        with suppress(RefusedError):  # which is said where the key itself is read
            value = row.coerced(value, key)
        word = word_of(value)
        is_on = word == wanted.lower() if wanted else word not in ("none", "false", "", "[]")
        if not is_on and word != "auto":
            off[place] = f"{key}={short(value)}"
    return off


def _switch_of(key: str, facts: Facts) -> str | None:
    """What switches a key off; the switch itself never is."""
    found = (said for place, said in facts.off.items() if key == place or key.startswith(f"{place}."))
    return next((said for said in found if said.partition("=")[0] != key), None)


def _read_key(row: Row, key: str, shown: str, value: Any, facts: Facts, folder: Path | None) -> None:
    if facts.is_misspelt(row, key, shown, value):
        return
    switch = _switch_of(key, facts)
    if switch is not None and (not row.within or row.within in names()):  # keys of a section are dropped one by one
        facts.notes.append(Note(shown, value, True, "dropped", f"it has no effect there with {switch}"))
        return
    try:
        if row.within:
            _read_within(row, key, shown, value, facts, folder)
        else:
            _apply(row, key, shown, row.coerced(value, shown), facts, is_given=True)
    except RefusedError as error:
        facts.refuse_error(error)


def _read_defaults(given: Mapping[str, Any], empty: set[str], facts: Facts) -> None:
    """The defaults there: at the top, of sections that always count, and of those that the source has."""
    table = facts.table
    records = tuple(f"{name}." for name in table.words("records"))
    facts.is_record = bool(records and given) and all(key.startswith(records) for key in given)
    always = set() if facts.is_record else {*table.words("always")}
    present = {key[: match.start()] for key in given for match in re.finditer(r"\.", key)} | empty
    present |= {section for section in table.words("within") if section.rpartition(".")[0] in present}
    for section, row in table.defaults:
        key = row.key
        if key in given or _switch_of(key, facts) or (facts.is_record and not key.startswith(records)):
            continue
        if not section or key.partition(".")[0] in always or section in present:
            _apply(row, key, facts.prefix + key, row.usual, facts, is_given=False)


def _apply(row: Row, key: str, shown: str, value: Any, facts: Facts, *, is_given: bool) -> None:
    word = word_of(value)
    (verdict, say), actions = row.answer_of(word), row.action_of(word)
    if verdict == "refused" and not is_given:
        return
    if verdict == "refused" and value is None and "none" not in row.verdicts:
        verdict, say = "dropped", "nothing is said by it"
    note = Note(shown, value, is_given, verdict, say.replace("{}", short(value)) if "{}" in say else say)
    note.is_fact = any(action.startswith("@") for action in actions)
    note.is_used = verdict == "changed" and not actions  # nothing settles it: the default there is said too
    facts.notes.append(note)
    if is_given and "${" in str(value) and verdict != "dropped":
        facts.refuse(shown, UNRESOLVED, note)
    elif verdict == "refused":
        facts.refuse(shown, note.say or "it has no counterpart: remove it", note)
    else:
        for action in actions:
            _act(action, row, key, value, facts, note)


def _act(action: str, row: Row, key: str, value: Any, facts: Facts, note: Note) -> None:
    """One action of a row: a fact, or our key."""
    target, is_constant, constant = action.partition("=")
    if is_constant and value is None and "none" not in row.actions:
        return
    made = literal(constant) if is_constant else value
    if target == "@curve" and made is not None:
        made = Curve(facts.table.head["family"], made)
    if target == "@optimizer_arg":
        before = facts.known.get("optimizer_arg")
        made = {**(before.value if before else {}), key.rpartition(".")[2]: value}
    if target.endswith("+"):  # one more of several
        target, made = target.removesuffix("+"), [made]
    if target.startswith("@"):
        facts.add(target[1:], made, note)
    elif made is not None or is_constant:
        facts.put_once(target, made, note)


def _read_within(row: Row, key: str, shown: str, value: Any, facts: Facts, folder: Path | None) -> None:
    """A configuration within this one: another system's, or keys of a section of this one in a file of their own."""
    if value in (None, "", {}):
        facts.notes.append(Note(shown, value, True, "dropped", "nothing is said by it"))
        return
    if row.is_pattern:
        _read_section(row, row.key[:-2], {key.removeprefix(row.key[:-1]): value}, facts, folder)
        return
    inner = value
    if isinstance(value, str):  # a path from the working directory, else in the folder of the file that names it
        is_beside = folder is not None and not Path(value).exists() and (folder / value).exists()
        inner = read_file(folder / value if folder is not None and is_beside else Path(value)).values
    if not isinstance(inner, dict):
        raise RefusedError(shown, "it takes a path, or the mapping itself", value)
    if isinstance(value, str):
        facts.notes.append(Note(shown, value, True, "kept", "read as well", is_used=True))
    if row.within not in names():
        _read_section(row, key, inner, facts, folder)
        return
    within = Facts(load(row.within), allow=facts.allow, prefix=f"{shown}.")
    merge(facts, collect(inner, within, folder), is_within=True)


def _read_section(row: Row, key: str, inner: Mapping[str, Any], facts: Facts, folder: Path | None) -> None:
    """Keys of a section in a file of their own, or a section that is another system's."""
    table = load(row.within) if row.within in names() else facts.table
    section, _, prefix = table.head.get("strip", "").partition("=")
    start = f"{section}.{prefix}" if section else "\0"
    for (written, value), (shown, _) in zip(table.flatten(inner, key), facts.table.flatten(inner, key), strict=False):
        bare = f"{section}.{written.removeprefix(start)}" if written.startswith(start) else written
        tried = (one for one in (written, bare, written.removeprefix(f"{key}.")) if table.find(one) not in (None, row))
        called = next(tried, written.removeprefix(f"{key}."))
        found = table.find(called)
        if found is None:
            facts.refuse_unknown(facts.prefix + shown, written, table)
        else:
            _read_key(found, called, facts.prefix + shown, value, facts, folder)


def merge(facts: Facts, other: Facts, *, is_within: bool = False) -> None:
    """Adds a second configuration. ``auto`` in it is the first one's value; both given and different is a contradiction."""
    own, is_beside = set(), facts.table.head.get("kind") == "run" and not (is_within or other.known.get("zero"))
    if is_within:
        facts.decides = other.decides
        _refuse_mismatches(facts, other)
        own = {fact for name in other.decides.words("wins") for fact in _won(name, facts, other)}
    facts.notes += other.notes
    facts.refused += other.refused
    facts.left_out |= other.left_out
    for name, new in other.known.items():
        old = facts.known.get(name)
        if is_beside and old is not None and name in other.table.words("alone"):
            new.note.drop(f"{facts.table.name} counts by itself: {old.note.key}={short(old.value)}")
        elif new.value == "auto":
            filling = facts.known.get(_FILLED_BY.get(name, name))
            if filling is not None:
                facts.known[name] = filling
            elif facts.table.head.get("auto") == "refused":
                facts.known[name] = new  # a configuration around this one may still fill it in
                continue
            new.note.say, new.note.is_used = new.note.say or "the value of the other configuration", True
        elif new.value is None and old is not None:
            new.note.is_used = True
        elif old is None or (name in own and not (old.note.is_given and new.note.is_given)):
            facts.known[name] = new
        elif new.note.is_given:
            if is_within and old.note.verdict == new.note.verdict == "changed":
                old.note.say = f"as {new.note.key} says"
            facts.add(name, new.value, new.note)
    for key in dict.fromkeys(key for note in other.notes for key in note.ours):
        facts.put_once(key, other.get(key), next(note for note in other.notes if key in note.ours))


def _refuse_mismatches(facts: Facts, other: Facts) -> None:
    """Refuses what both configurations say in words of their own, where they have to say the same (``match``: outer=inner, or one of a
    list)."""
    for name, said in other.decides.pairs("match").items():
        inner, _, place = said.partition(".")
        if not (facts.is_given(name) and other.is_given(inner)):
            continue
        old, new = facts.known[name], other.known[inner]
        value = new.value[int(place)] if place and isinstance(new.value, list) and len(new.value) > 1 else new.value
        if value not in ("auto", None, old.value):
            facts.contradicts(new.note, old.note)


def _won(name: str, facts: Facts, other: Facts) -> tuple[str, ...]:
    """The facts that the inner configuration decides by itself, since it has a section of that meaning: what the outer one says of
    them does not count there."""
    own = other.known.get(name)
    if own is None or own.value in ("auto", None):
        return ()
    if name == "optimizer" and "one_group" in other.decides.head and (decay := facts.known.pop("decay_names", None)):
        facts.known.setdefault("decay", decay)  # its own optimizer has all parameters in one group
    for fact in _GROUPS[name]:
        old, new = facts.known.get(fact), other.known.get(fact)
        is_filled = new is not None and new.value == "auto"
        is_said_by_both = new is not None and new.note.is_given and old is not None and old.note.is_given
        if old is None or is_filled or (is_said_by_both and fact not in other.decides.words("wins")):
            continue  # what both say is refused where they differ
        if fact in ("beta1", "beta2") and other.known.get("betas", Fact("auto", own.note)).value == "auto":
            continue
        if fact == "warmup_ratio" and "warmup" in other.known and other.known["warmup"].value == "auto":
            continue  # which fills it in
        del facts.known[fact]
        if old.note.is_given:
            old.note.drop(f"{own.note.key} counts there")
    return _GROUPS[name]
