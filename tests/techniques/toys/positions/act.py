"""Splits micro-batches, and sets the schedule."""

from shardwise.techniques.positions.rule import PositionsEntry
from shardwise.techniques.technique import Act


def in_pairs(work):
    for i in range(0, work.num, 2):
        both = range(i, min(i + 2, work.num))
        for at in both:
            work.forward(at)
        for at in both:
            work.backward(at)


class PositionsAct(Act):
    def begin(self, runtime):
        axis = runtime.world.axis("cp")
        if axis.size == 1:
            return

        def part(batch):
            return {key: value[:, axis.rank :: axis.size] for key, value in batch.items()}

        runtime.split_batches(for_forward=part, for_loss=part)
        if runtime.recipe.entry("positions", PositionsEntry).in_pairs:
            runtime.hand_schedule(in_pairs)
