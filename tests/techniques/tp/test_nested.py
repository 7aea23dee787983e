"""Sequence parallelism on the rows of context parallelism: each rank has a part of a part of the positions, and trains as in one process."""

import models
import pytest
import torch
from techniques.tp.streams import PARALLEL, Build, count, every_length, loss_of, windows

import shardwise as sw

QUICK = {("llama", "cp=2,tp=2", "gather"), ("gpt2", "cp=2,tp=2", "ulysses")}


@pytest.mark.parametrize("layout", ["cp=2,tp=2", "dp_shard=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "nanogpt"])
def test_families(ranks, name, layout):
    model = models.get(name)
    sw.verify(
        model.build,
        layout,
        batches=model.windows(2, 4 if "dp" in layout else 2),
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        run=ranks.run,
        tensor_parallel=PARALLEL,
        max_grad_norm=0.3,
    )
