"""Runs of a trial that are made once and looked at again, and what is compared once: never where it would be another one."""

from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.model.places import Place
from shardwise.model.positions import Rows
from shardwise.model.row_facts import Differs, Plan, Whole
from shardwise.model.trial import Trial


class Mlp(nn.Module):
    """``writes``: it counts its forwards in a buffer."""

    def __init__(self, writes=False):
        super().__init__()
        self.up, self.down, self.writes = nn.Linear(4, 8), nn.Linear(8, 4), writes
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.writes:
            self.count += 1
        hidden = self.up(x).tanh()
        return self.down(hidden * 2) + self.down(hidden)


class Changes(Mlp):
    def forward(self, x):
        hidden = self.up(x).tanh() * 2
        y = self.down(hidden)
        hidden += 1  # after a run that ends there
        return y + hidden.sum()


def trial_of(**options):
    return Trial(Mlp(**options), lambda model: model(torch.ones(2, 4, dtype=torch.float64)))


def test_a_plain_run_is_made_once_for_a_mode_and_a_draw():
    trial = trial_of()
    run = trial.plain()
    assert trial.plain() is run and trial.plain(1) is not run and trial.plain(detached="up") is not run
    assert trial.plain() is run and trial.callers() == {"up.weight": ("up",), "down.weight": ("down",)}
    trial.set_training(True)
    assert trial.plain() is not run


def test_of_a_model_that_writes_a_buffer_it_is_made_each_time():
    trial = trial_of(writes=True)
    assert trial.written and trial.plain() is not trial.plain()


def test_the_begin_of_a_run_is_that_of_a_run_that_ends_there():
    trial = trial_of()
    calls = {trial.calls[1]}
    part, ended = trial.plain(detached="up").until(calls), trial.run(detached="up", until=frozenset(calls))
    assert list(part.inputs) == list(ended.inputs) == list(trial.calls[:2]) and list(part.leaves) == list(ended.leaves)
    assert all(torch.equal(x, ended.inputs[call]) for call, x in part.inputs.items())
    assert part.arguments.keys() == ended.arguments.keys() and not part.output and not part.keeps


def test_where_code_changes_in_place_what_a_layer_got_only_a_run_shows_it():
    trial = Trial(Changes(), lambda model: model(torch.ones(2, 4, dtype=torch.float64)))
    assert trial.plain().until({trial.calls[1]}) is None


def test_a_place_holds_the_same_if_it_holds_the_same_objects():
    items, table = [1.5, (2, 3)], {"a": [1]}
    places = [Place("a list", items), Place("a dict", table)]
    assert all(place.is_same for place in places)
    items[1], table["a"] = tuple(range(2, 4)), [1]
    assert not any(place.is_same for place in places)


def test_a_tensor_is_compared_once_and_again_where_it_was_changed_in_place():
    rows = Rows(trial_of(), Whole(), Plan(), 5, torch.tensor([0, 1]))
    full = torch.randn(1, 5, 3, dtype=torch.float64)
    mine = full[:, :2].clone()
    rows._compare("block", "its output", mine, full)
    with mock.patch("torch.equal", side_effect=AssertionError("compared again")):
        rows._compare("block", "its output", mine, full)
    mine += 1
    with pytest.raises(Differs, match="is off by"):
        rows._compare("block", "its output", mine, full)
