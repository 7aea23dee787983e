"""What a step does is read by name, in a trace and in the log; without either it costs next to nothing."""

import logging

from step.spans_of import traced

import shardwise as sw
from shardwise._torch.spans import span

BEFORE, AFTER = "exchange window 5, before forward", "exchange window 5, before the step"


def test_units_micro_batches_exchanges_and_the_optimizer_are_read_by_name(ranks):
    spans, lines, before = ranks.run(traced, 2, "dp_shard=2", sw.Sharding(units=("Block",)))[0]
    names = [name for name, _, _ in spans]
    assert before == 0 and lines == names  # in the order in which they begin
    assert names[:3] == [BEFORE, "micro-batch 0", "forward of micro-batch 0"]
    first, second = names.index("backward of micro-batch 0"), names.index("backward of micro-batch 2")
    for unit in ("(root)", "blocks.0", "blocks.1", "blocks.2"):
        assert f"gather {unit}" in names[:first] and f"accumulate {unit}" in names[first:second]
        assert f"gather {unit}" in names[second:] and f"reduce {unit}" in names[second:]
    assert [name for name in names if name.startswith("reduce")] == [
        "reduce blocks.2",
        "reduce blocks.1",
        "reduce blocks.0",
        "reduce (root)",
    ]
    assert names[-2:] == [AFTER, "step of AdamW"]


def test_spans_lie_within_those_that_they_are_a_part_of(ranks):
    spans, _, _ = ranks.run(traced, 2, "dp_shard=2", sw.Sharding(units=("Block",)))[0]
    at = {name: (start, start + length) for name, start, length in spans}
    outer = at["micro-batch 2"]
    for name in ("forward of micro-batch 2", "backward of micro-batch 2", "reduce blocks.1"):
        assert outer[0] <= at[name][0] and at[name][1] <= outer[1]
    assert at["forward of micro-batch 2"][1] <= at["backward of micro-batch 2"][0]


def test_replicas_name_their_buckets(ranks):
    spans, lines, _ = ranks.run(traced, 2, "dp_replicate=2")[0]
    names = [name for name, _, _ in spans]
    assert "reduce bucket 0" in names and lines == names and names[-2:] == [AFTER, "step of AdamW"]


def test_off_it_is_one_object_that_does_nothing():
    """By count, not by time: the same context for every name, and no text is made."""

    class Loud:
        def __format__(self, _spec):
            raise AssertionError("its text was made")

    assert logging.getLogger("shardwise").getEffectiveLevel() > logging.DEBUG
    assert span("gather", Loud()) is span("reduce", Loud())
