"""One step under ``torch.profiler``, and what the logger says of it."""

import io
import logging

import torch
from torch import nn

import shardwise as sw


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 256), nn.Linear(256, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(i):
    ids = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(i))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def traced(layout, sharding=None):
    """Of the fifth step, with two micro-batches a rank: (name, microseconds from its start, microseconds) of each span, in order; and
    the lines of the logger, and how many there were before it was set to DEBUG."""
    written, logger = io.StringIO(), logging.getLogger("shardwise")
    handler = logging.StreamHandler(written)
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = sw.parallelize(Blocks, world, sharding=sharding)
        step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), foreach=True), max_grad_norm=1.0)
        windows = [[batch(10 * i + world.rank), batch(10 * i + 5 + world.rank)] for i in range(5)]
        logger.addHandler(handler)
        for window in windows[:-1]:
            step(window)
        before = len(written.getvalue())
        logger.setLevel(logging.DEBUG)
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step(windows[-1])
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    found = [e for e in profile.events() if e.name.startswith("shardwise: ")]
    start = min(event.time_range.start for event in found)
    spans = [
        (e.name.removeprefix("shardwise: "), e.time_range.start - start, e.time_range.end - e.time_range.start)
        for e in sorted(found, key=lambda event: event.time_range.start)
    ]
    return spans, written.getvalue().splitlines(), before
