"""Splits micro-batches, and sets the schedule."""

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
            ranges = [range(axis.rank, batch["input_ids"].shape[1], axis.size)]
            return {key: value[:, ranges[0]] for key, value in batch.items()}

        runtime.for_forward = runtime.for_loss = part
        if any(note.why == "in pairs: True" for note in runtime.recipe.notes):
            runtime.schedule = in_pairs
