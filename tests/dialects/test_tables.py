"""The tables of other systems: each row is well formed, says why, and names keys that we have. Patterns are no hiding place."""

import re
from collections import Counter
from pathlib import Path

import pytest

from shardwise.config.check import struct_in
from shardwise.config.loader import dotted_keys
from shardwise.config.record import hints_of
from shardwise.dialects import settle_layout
from shardwise.dialects.table import VERDICTS, exists, load, names, systems
from shardwise.run.config import RunConfig

DIALECTS = Path(settle_layout.__file__).parent
KEYS = dotted_keys(RunConfig)
LATER = ("pp", "ep", "fp8")  # techniques that rows wait for
ROWS = [
    (name, row)
    for name in names()
    for row in load(name).rows.values()
    if name != "trl" or row.key not in load("transformers").rows
]


def is_key(name: str) -> bool:
    free = any(name.startswith(f"{key}.") for key in KEYS if struct_in(hint_of(key)) is None)
    return name in KEYS or any(key.startswith(f"{name}.") for key in KEYS) or free


def hint_of(key):
    record = RunConfig
    *sections, last = key.split(".")
    for section in sections:
        record = struct_in(hints_of(record)[section])
    return hints_of(record)[last]


def words(row):
    return {
        word
        for part in (row.actions, row.verdicts, row.says)
        for word in part
        if word not in ("", "*", "file", "table")
    }


@pytest.mark.parametrize("name", names())
def test_words_of_a_row_are_ones_that_it_takes(name):
    wrong = []
    for row in load(name).rows.values():
        kinds = {kind.lower() for kind in row.takes}
        for word in words(row) if not row.is_of_all else ():
            is_number = re.fullmatch(r"-?[\d.]+", word) and {"int", "float"} & kinds
            is_dtype = "dtype" in kinds and word in ("bf16", "bfloat16", "fp16", "float16", "float32")
            is_switch = word in ("true", "false") and "bool" in kinds
            known = word in kinds or {"str", "any"} & kinds or word == "none" or (word == "[]" and "list" in kinds)
            if not (known or is_number or is_dtype or is_switch):
                wrong.append(f"{row.key}: {word} is not among {'/'.join(row.takes)}")
        wrong += [
            f"{row.key}: {verdict}"
            for verdict in row.verdicts.values()
            if verdict not in VERDICTS and not verdict.startswith("needs ")
        ]
        assert row.takes != ("",) or row.is_of_all, row.key
    assert wrong == []


@pytest.mark.parametrize("name", names())
def test_what_is_not_kept_has_its_sentence(name):
    """Of ``changed``: what is different, unless the fact says it; of ``dropped``: why; of ``refused``: what to write."""
    wrong = []
    for row in load(name).rows.values():
        for word, verdict in row.verdicts.items():
            if not verdict:
                continue
            say = row.says.get(word) or row.says.get("*" if word == "*" else "") or row.says.get("*", "")
            by_fact = verdict == "changed" and any(a.startswith("@") for a in row.action_of(word))
            if verdict != "kept" and not say and not by_fact:
                wrong.append(f"{row.key}: {word or 'it'} is {verdict}, and nothing is said")
            is_refused = verdict == "refused" or verdict.startswith("needs ")
            if is_refused and not FIX.search(say):
                wrong.append(f"{row.key}: {word or 'it'} is refused, and what to write is not said: {say}")
    assert wrong == []


FIX = re.compile(
    r": .|write |remove |set it|give |name |import |leave |unset |choose|=|say it|print |convert |cut |use |start "
)


@pytest.mark.parametrize("name", names())
def test_our_keys_exist(name):
    wrong = []
    for row in load(name).rows.values():
        for action in (action for part in row.actions.values() for action in part):
            target = action.partition("=")[0].removesuffix("+")
            if target and not target.startswith("@") and not row.within and "dialect" not in load(name).head:
                wrong += [] if is_key(target) else [f"{row.key}: {target}"]
            if row.alias:
                other = load(load(name).head.get("dialect", name)).find(row.alias)
                wrong += [] if other is not None else [f"{row.key}: {row.alias}"]
        for say in row.says.values():
            named = re.findall(rf"(?<![\w.])(?:{'|'.join(RunConfig.__struct_fields__)})\.[a-z_]+(?:\.[a-z_0-9]+)*", say)
            wrong += [
                f"{row.key} says {key}"
                for key in named
                if not is_key(key) and key not in load(name).rows and not key.endswith(("json", "_", ".py"))
            ]
    assert wrong == []


def test_each_key_is_there_once_and_cells_are_seven():
    for name in (*names(), "words"):
        lines = [
            line for line in (DIALECTS / "tables" / f"{name}.md").read_text().splitlines() if line.startswith("| ")
        ]
        keys = Counter(line.split("|")[1].strip() for line in lines)
        assert {key: count for key, count in keys.items() if count > 1} == {}, name
        assert all(line.count("|") == 8 for line in lines), [line[:60] for line in lines if line.count("|") != 8]


def test_each_fact_is_settled_and_each_that_is_settled_is_said():
    said = {
        action[1:].partition("=")[0]
        for _, row in ROWS
        for part in row.actions.values()
        for action in part
        if action.startswith("@")
    }
    code = "".join(path.read_text() for path in sorted(DIALECTS.glob("settle*.py")))
    assert {fact for fact in said if f'"{fact}"' not in code} == set()


@pytest.mark.parametrize("name", systems())
def test_a_default_is_one_of_the_values_that_a_key_takes(name):
    for _, row in load(name).defaults:
        row.coerced(row.default, row.key)


def test_rows_that_wait_for_a_technique_name_one_that_is_planned_and_say_what_it_becomes():
    for name, row in ROWS:
        for word, verdict in row.verdicts.items():
            if verdict.startswith("needs "):
                needed = verdict.removeprefix("needs ")
                assert exists(needed) or needed in LATER, (name, row.key)
                if exists(needed):
                    assert row.action_of(word) or row.within or row.is_pattern, (
                        f"{name} {row.key}: it is there, and no action"
                    )


def test_no_code_names_a_system():
    """But the face of one, and a function for each family of curves."""
    allowed = {
        "objects.py": {"deepspeed"},
        "fsdp1.py": {*systems()},
        "curves.py": FAMILIES,
        "settle_curve.py": FAMILIES,
    }
    for path in sorted(DIALECTS.glob("*.py")):
        code = path.read_text()
        found = {name for name in systems() if re.search(rf"(?<![a-z0-9_]){name}(?![a-z0-9_])", code, re.IGNORECASE)}
        assert found - allowed.get(path.name, set()) == set(), path.name


FAMILIES = {"torchtitan", "nemo", "deepspeed", "optimus", "ml", "transformers"}
