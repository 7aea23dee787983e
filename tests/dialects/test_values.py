"""Each value that a key takes, files drawn from rows, and misspelt keys: loaded, or refused by a key of the file, and never without a word."""

import random
import time

import pytest
from dialect_files import BASE, keys_of, made_from_rows, names_a_key, outcome, unanswered, values_of, with_key

from shardwise.dialects.table import load

SOME = 12  # values of each system by default


def alone(name: str) -> list[tuple[str, object]]:
    table = load(name)
    return [(key, value) for key in keys_of(table) for value in values_of(table.rows[key])]


def check_alone(name: str, tried: list[tuple[str, object]]) -> None:
    for key, value in tried:
        values = with_key(name, key, value)
        end, got = outcome(name, values, ranks=8, ranks_per_node=4)
        if end == "refused":
            last = key.split("*")[0].rstrip(".").split(".")[-1]
            assert last in str(got), (key, value, str(got))
        else:
            assert unanswered(name, values, got) == [], (key, value)


@pytest.mark.parametrize("name", BASE)
def test_a_value_alone_is_loaded_or_refused_by_its_key(name):
    check_alone(name, random.Random(name).sample(alone(name), SOME))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BASE)
def test_each_value_alone_is_loaded_or_refused_by_its_key(name):
    check_alone(name, alone(name))


def check_drawn(count: int, seed: int) -> tuple[int, float]:
    draw, imported, took = random.Random(seed), 0, 0.0
    for _ in range(count):
        name, values = made_from_rows(draw)
        began = time.process_time()
        end, got = outcome(name, values, ranks=draw.choice([None, 1, 6, 8]))
        took += time.process_time() - began
        if end == "imported":
            imported += 1
            assert unanswered(name, values, got) == [], (name, values)
        else:
            assert names_a_key(values, got, name), (name, values, str(got))
            assert got.why and got.fix, str(got)
    return imported, took / count


def test_files_drawn_from_rows_are_loaded_or_refused_by_a_key_of_theirs():
    imported, _ = check_drawn(300, seed=1)
    assert 60 < imported < 200  # neither all nor none


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_files_drawn_from_rows():
    imported, took = check_drawn(10_000, seed=0)
    assert imported > 3_000 and took < 0.005


def slips(name: str, draw: random.Random) -> list[tuple[str, str]]:
    """Keys with one letter left out."""
    table, found = load(name), []
    for key in table.plain_keys:
        section, _, last = key.rpartition(".")
        if len(last) >= 5 and not last.startswith("_"):
            place = draw.randrange(1, len(last) - 1)
            wrong = ".".join(filter(None, (section, last[:place] + last[place + 1 :])))
            found += [(wrong, last)] if wrong not in table.rows else []
    return found


def check_slips(name: str, tried: list[tuple[str, str]]) -> int:
    named = 0
    for wrong, meant in tried:
        end, got = outcome(name, with_key(name, wrong, 1), ranks=8, ranks_per_node=4)
        assert end == "refused" and wrong in got.given, (wrong, end)
        named += f"{meant}'" in str(got)
    return named


@pytest.mark.parametrize("name", BASE)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(name):
    draw = random.Random(1)
    found = slips(name, draw)
    tried = draw.sample(found, min(10, len(found)))
    assert check_slips(name, tried) >= len(tried) - 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_misspelt_key_is_refused_with_the_one_that_was_meant():
    draw = random.Random(1)
    tried = {name: slips(name, draw) for name in BASE}
    named = sum(check_slips(name, found) for name, found in tried.items())
    assert named >= sum(map(len, tried.values())) - 3
