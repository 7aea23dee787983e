"""How a batch reaches a forward that nobody wrote for Shardwise: by name, or as the one tensor that it asks for."""

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.train.loss import call


class Echo(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    "forward",
    [
        lambda input_ids: input_ids,
        lambda input_ids, mask=None: input_ids,
        lambda idx, targets=None: idx,
        lambda **kwargs: kwargs["input_ids"],
        lambda *args, **kwargs: kwargs["input_ids"],
        lambda x, return_embeddings=False, **kwargs: x,  # x-transformers
    ],
)
def test_the_one_tensor_of_a_batch_arrives_under_any_name(forward):
    ids = torch.arange(3)
    assert call(Echo(forward), {"input_ids": ids, "labels": ids + 1}) is ids


def test_names_that_do_not_match_a_forward_of_two_tensors_are_refused():
    with pytest.raises(UsageError, match="the names do not match"):
        call(Echo(lambda x, edges, **kwargs: x), {"nodes": torch.ones(1), "edges": torch.ones(1)})
