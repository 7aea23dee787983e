"""Sums over the ranks along tp: as many as the textbook says, and of as many bytes."""

import pytest
from techniques.tp.counted import sums_of_a_window

import shardwise as sw

ACTIVATION = 2 * 6 * 16 * 4  # bytes of [batch, length, width] in float32
BLOCKS, MICRO = 2, 3


@pytest.mark.parametrize(
    ("name", "per_block", "at_the_end"),
    [
        ("linears: apart", 4, 0),  # forward: attention and MLP; backward: their inputs
        ("linears: qkv", 4, 0),
        ("linears: parallel", 3, 0),  # attention and MLP have one input
        ("linears: kv-1", 4, 1),  # the key/value head's gradients, once for the window
    ],
)
def test_sums_of_a_block(ranks, name, per_block, at_the_end):
    for layers, others, _ in ranks.run(sums_of_a_window, 2, name, "tp=2", MICRO):
        assert layers == [ACTIVATION] * (per_block * BLOCKS * MICRO)
        assert len(others) == 2 + at_the_end  # two exchanges in every window


def test_a_compiled_block_sums_as_often(ranks):
    compile = sw.Compile(backend="aot_eager", fullgraph=True)
    for layers, _, (num_graphs, num_breaks) in ranks.run(
        sums_of_a_window, 2, "linears: parallel", "tp=2", MICRO, compile=compile
    ):
        assert layers == [ACTIVATION] * (3 * BLOCKS * MICRO)
        assert num_graphs == 1 and num_breaks == 0
