"""Guessing what was meant."""

import pytest

from shardwise.config.suggest import closest, did_you_mean, listing


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("stesp", ["seed", "steps"], "steps"),
        ("STEPS", ["seed", "steps"], "steps"),
        ("max-grad-norm", ["max_grad_norm"], "max_grad_norm"),
        ("steps", ["train", "train.steps"], "train.steps"),
        ("trian.stepps", ["train.steps", "train.seed"], "train.steps"),
        ("--nporc", ["--nproc", "--help"], "--nproc"),
        ("zzzz", ["train", "data"], None),
        ("x", [], None),
    ],
)
def test_closest(word, known, near):
    assert closest(word, known) == near


def test_did_you_mean_lists_what_there_is():
    assert did_you_mean("ab", ["abc", "x"], what="names") == "did you mean 'abc'? names: abc, x"
    assert did_you_mean("q", ["abc", "x"], what="names") == "names: abc, x"


def test_a_very_long_list_is_cut():
    assert listing([]) == "(none)"
    assert listing([str(number) for number in range(20)]).endswith("18, 19")
    assert listing([str(number) for number in range(21)]).endswith("14, 15 and 5 more")
