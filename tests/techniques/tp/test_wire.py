"""Sums over the ranks along tp: as many as the textbook says, and of as many bytes."""

import pytest
from techniques.tp.counted import sums_of_a_window

import shardwise as sw

ACTIVATION = 2 * 6 * 16 * 4  # bytes of [batch, length, width] in float32
LOGITS = 2 * 6 * 10 * 4  # of a rank: half of 19 tokens
BLOCKS, MICRO = 2, 3


@pytest.mark.quick("linears: apart-4-0")
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
    for counted, _ in ranks.run(sums_of_a_window, 2, name, "tp=2", MICRO):
        assert counted.layers == [ACTIVATION] * (
            (per_block * BLOCKS + 2) * MICRO
        )  # and the embedding's, and the head's
        assert counted.gathers == [LOGITS] * MICRO
        assert len(counted.others) == 2 + at_the_end  # two exchanges in every window


def test_no_logits_go_over_the_wire_with_a_fused_loss(ranks):
    """But four numbers of each position: the largest, then the sum of exponents, the target, and whether it was found."""
    for counted, _ in ranks.run(sums_of_a_window, 2, "linears: apart", "tp=2", MICRO, fused=True):
        assert counted.gathers == []
        positions = 2 * 6
        of_loss = sorted(size for size in counted.layers if size != ACTIVATION)
        assert sum(of_loss) == MICRO * positions * 4 * (1 + 3)
        assert counted.layers.count(ACTIVATION) == (4 * BLOCKS + 2) * MICRO


@pytest.mark.soak
def test_a_compiled_block_sums_as_often(ranks):
    compile = sw.Compile(backend="aot_eager", fullgraph=True)
    for counted, (num_graphs, num_breaks) in ranks.run(
        sums_of_a_window, 2, "linears: parallel", "tp=2", MICRO, compile=compile
    ):
        assert counted.layers == [ACTIVATION] * ((3 * BLOCKS + 2) * MICRO)
        assert num_graphs == 1 and num_breaks == 0
