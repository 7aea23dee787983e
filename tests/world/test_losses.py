"""Whole runs that lose a peer, or seem to, as users start them: what is said, when, and what is left.

``tools/loss_table.py`` measures the same and writes the table."""

import pytest
from world.loss_runs import LAUNCHERS, names, run
from world.losses import CAUSES, ONLY_SLOW

# Seconds from the loss to the message, on a machine that is very busy with other things; docs/loss-table.md has those of a quiet one.
SAID_S = {"killed": 15.0, "exits": 15.0, "stopped": 30.0, "caught": 30.0}


def check(cause, lost, found):
    """One run that has lost a peer: named in time, nobody else named, ended where it ends, nothing left."""
    said = found.seconds_to(names(lost))
    assert said is not None and said < SAID_S[cause], f"{said}\n{found.text[-3000:]}"
    assert found.seconds_to(names(1 - lost)) is None, found.text[-3000:]
    if cause in ("killed", "exits"):
        assert found.seconds_to_end < 40.0 and found.left == 0 and any(found.codes), found.text[-3000:]


def lose(cause, lost, launcher, blocked):
    """A run that does so; one that would go on until its timeout is ended when it has said what it waits for. A rank that goes on is in
    an exchange: a collective of the other's own would meet it there, in the group that both are of, and gloo ends both."""
    blocked = blocked and cause != "caught"
    until = names(lost) if cause in ("stopped", "caught") else None
    return run(cause, lost, launcher, seconds=30.0, timeout_s=300.0, blocked=blocked, until=until)


@pytest.mark.soak  # by forked ranks tests/world/test_lost_ranks.py sees that a killed rank is named
def test_torchrun_does_not_end_the_survivor_before_it_names_a_killed_rank():
    check("killed", 1, lose("killed", 1, "torchrun", True))


@pytest.mark.parametrize("blocked", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.soak
def test_torchrun_does_not_end_it_where_ranks_are_not_connected_yet(blocked):
    """It ended by the signal without a word, or with one that named no rank."""
    found = run("killed", 1, "torchrun", timeout_s=300.0, blocked=blocked, unconnected=True)
    said = found.seconds_to(r"rank 1 has given no sign of life|waited in vain for rank 1|process of rank 1 has")
    assert said is not None and said < 20.0, found.text[-3000:]


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_under_every_launcher(cause, launcher, lost, turn):
    check(cause, lost, lose(cause, lost, launcher, turn % 2 == 1))


@pytest.mark.soak
@pytest.mark.parametrize(("cause", "seconds"), list(ONLY_SLOW.items()))
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_only_takes_long_is_no_alarm(cause, seconds, launcher, lost):
    found = run(cause, lost, launcher, seconds=seconds, timeout_s=300.0)
    assert found.text.count("DONE ") == 2 and "RankError" not in found.text, found.text[-3000:]
    assert not any(found.codes)
