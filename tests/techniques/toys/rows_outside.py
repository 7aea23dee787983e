"""On two ranks: a model with parts of gradients, outside of windows."""

import contextlib

import torch
from models import Words, batch

import shardwise as sw


def outside():
    """What a backward ends in, outside of windows, and in ``accumulate``."""
    with sw.init("pp=2", device="cpu") as world:
        model, told = sw.parallelize(Words, world, rows=True), []
        for within in (contextlib.nullcontext(), sw.accumulate(model, is_last=True)):
            try:
                with within:
                    model(batch(0)["input_ids"]).sum().backward()
                told.append("nothing was raised")
            except sw.UsageError as error:
                told.append(str(error))
        with torch.no_grad():
            model(batch(0)["input_ids"])
        return told
