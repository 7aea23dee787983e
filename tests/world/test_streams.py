"""The stream of random numbers of a rank's parts."""

import pytest
import torch
from torch import nn

from shardwise.world.streams import PartStream


def drawn(rank, *, training, draws, is_used=False):
    """What a rank draws in its stream, and behind it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train(training)
    stream = PartStream(torch.device("cpu"), rank, "tp", model)
    torch.manual_seed(3)
    with stream.entered(is_used=is_used):
        assert stream.is_entered
        inside = torch.rand(4) if draws else None
    return inside, torch.rand(4)


@pytest.mark.parametrize("training", [True, False])
def test_numbers_are_those_of_one_process_where_nothing_drops(training):
    """In eval mode the generator stays as it is: what samples, or draws noise, draws what one process does."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    for rank in (0, 1):
        assert torch.equal(drawn(rank, training=training, draws=False)[1], expected) != training


@pytest.mark.parametrize("training", [True, False])
def test_what_drops_in_eval_mode_too_drops_other_parts_on_each_rank(training):
    (one, behind), (other, its) = (drawn(rank, training=training, draws=True) for rank in (0, 1))
    assert not torch.equal(one, other) and torch.equal(behind, its)


def test_a_rank_without_a_part_stays_in_step_with_those_that_drop():
    """Where something drops for sure: a rank that has no rows draws nothing."""
    (_, behind), (_, its) = (drawn(rank, training=False, draws=rank == 0, is_used=True) for rank in (0, 1))
    assert torch.equal(behind, its)
