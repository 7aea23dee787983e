"""The list of mutants fits the library as it is: what they break is there, once, and so are the tests that are to notice it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants  # where its dataclasses look their annotations up
spec.loader.exec_module(mutants)


def test_every_mutant_finds_its_place_once_and_its_tests_are_there_which_takes_no_torch():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import mutants; "
        "print(mutants.misplaced()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert len(mutants.MUTANTS) >= 60


def test_they_are_spread_over_the_rooms_that_carry_the_meaning():
    texts = mutants.sources()
    rooms = [mutants.room_of(mutant, texts) for mutant in mutants.MUTANTS]
    least = {
        "world": 6,
        "techniques": 40,
        "parallel": 8,
        "data": 3,
        "step": 20,
        "recipe": 2,
        "state": 10,
        "config": 3,
        "launch": 2,
        "verify": 2,
        "cli": 2,
    }
    assert {room: rooms.count(room) for room in least if rooms.count(room) < least[room]} == {}


def test_a_mutant_that_has_lost_its_place_is_named(monkeypatch):
    lost = mutants.Mutant("lost", "no such text in the library", "", "tests/no_such_file.py", "nothing")
    twice = mutants.Mutant("twice", "import torch\n", "", "tests/test_layout.py::no_such_test", "nothing")
    broken = mutants.Mutant("broken", "for axis in reversed(AXES):", "for axis in", "tests/test_layout.py", "nothing")
    monkeypatch.setattr(mutants, "MUTANTS", (lost, twice, broken, broken))
    found = mutants.misplaced()
    for fault in (
        "lost: its snippet is to be found once, and is nowhere",
        "lost: there is no tests/no_such_file.py",
        "twice: there is no no_such_test in tests/test_layout.py",
        "broken: two mutants of this name",
    ):
        assert fault in found
    assert any(fault.startswith("twice: its snippet is to be found once, and is src/shardwise/") for fault in found)
    assert any(fault.startswith("broken: src/shardwise/layout.py would not parse") for fault in found)
