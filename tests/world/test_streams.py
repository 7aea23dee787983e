"""The stream of random numbers of a rank's parts."""

import pytest
import torch
from torch import nn

from shardwise.world.streams import PartStream


@pytest.mark.parametrize("training", [True, False])
def test_numbers_are_those_of_one_process_where_nothing_drops(training):
    """In eval mode the generator stays as it is: what samples, or draws noise, draws what one process does."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train(training)
    stream = PartStream(torch.device("cpu"), 1, "tp", model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with stream.entered():
        assert stream.is_entered == training
    assert torch.equal(torch.rand(4), expected) != training
