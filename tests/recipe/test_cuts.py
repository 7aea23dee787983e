"""extents and owners: over all ranks the pieces tile the tensor, whatever the cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.layout import Layout
from shardwise.recipe import Cut, Param, Part, check_param, extents, local_shape, owners


def _param(shape, *cuts):
    return Param(
        shape=tuple(shape), dtype="float32", trainable=True, aliases=(), unit="", cuts=tuple(cuts),
        storage="float32", compute="float32", reduce="float32",
    )  # fmt: skip


def assert_tiles(param: Param, layout: Layout) -> None:
    """Every element belongs to exactly one piece (counted once over its owners), and local tensors hold it in place."""
    count = np.zeros(param.shape, dtype=int)
    full = np.arange(int(np.prod(param.shape))).reshape(param.shape)
    for rank in range(layout.size):
        coord = layout.coord(rank)
        pieces, holders = extents(param, coord), owners(param, coord)
        local = np.full(local_shape(param, coord), -1)
        for piece, ranks in zip(pieces, holders, strict=True):
            assert rank in ranks and list(ranks) == sorted(set(ranks))
            for other in ranks:
                assert (piece.starts, piece.sizes) in {(p.starts, p.sizes) for p in extents(param, layout.coord(other))}
            local[piece.local_index] = full[piece.full_index]
            if rank == ranks[0]:
                count[piece.full_index] += 1
        assert (local != -1).all()  # the pieces fill the local tensor: nothing in it belongs to nobody
    assert (count == 1).all()


LAYOUTS = st.builds(Layout, dp_replicate=st.integers(1, 3), dp_shard=st.integers(1, 5), tp=st.integers(1, 4))
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(LAYOUTS, SHAPES, st.data())
@settings(max_examples=100, deadline=None)
def test_one_uneven_cut_tiles(layout, shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert_tiles(_param(shape, Cut(axis="fsdp", dim=dim)), layout)


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), SHAPES, st.data())
@settings(max_examples=100, deadline=None)
def test_cuts_over_an_axis_that_is_carved_out_and_what_is_left_of_it_tile(copies, left, ep, cp, shape, data):
    """Ranks that differ in dp_shard and cp alone may have one index along ep, and hold the same piece."""
    layout = Layout(dp_replicate=copies, dp_shard=left * ep, cp=cp, ep=ep)
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in range(2)]
    param = _param(shape, Cut(axis="ep", dim=dims[0]), Cut(axis="efsdp", dim=dims[1]))
    check_param("p", param, layout)
    assert_tiles(param, layout)
    assert_tiles(_param(shape, Cut(axis="ep", dim=dims[0])), layout)


@given(st.integers(1, 3), st.integers(1, 3), SHAPES, st.data())
@settings(max_examples=100, deadline=None)
def test_a_stage_that_one_index_holds_tiles(pp, dp_shard, shape, data):
    """Every rank keeps the name; the ranks of other stages hold an empty piece of it."""
    layout = Layout(pp=pp, dp_shard=dp_shard)
    holder = data.draw(st.integers(0, pp - 1))
    param = _param(shape, Cut(axis="pp", dim=0, holder=holder), Cut(axis="fsdp", dim=0))
    check_param("p", param, layout)
    assert_tiles(param, layout)
    for rank in range(layout.size):
        rows = local_shape(param, layout.coord(rank))[0]
        assert rows == 0 or layout.coord(rank).index("pp") == holder


@given(LAYOUTS, SHAPES, st.data())
@settings(max_examples=100, deadline=None)
def test_two_cuts_tile_on_one_dim_or_two(layout, shape, data):
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in range(2)]
    param = _param(shape, Cut(axis="tp", dim=dims[0]), Cut(axis="fsdp", dim=dims[1]))
    check_param("p", param, layout)
    assert_tiles(param, layout)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_parts_with_replicas_tile_and_may_be_cut_again(dp_replicate, dp_shard, tp, head, data):
    """Fused q|k|v whose k and v have fewer heads than ranks, then FSDP on the same dim: that many neighbours hold the same
    piece of k and v, and no others do."""
    layout = Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    replicas = data.draw(st.sampled_from([r for r in (1, 2, 4) if tp % r == 0]))
    q = Part(size=tp * head * data.draw(st.integers(1, 3)))
    kv = Part(size=(tp // replicas) * head, replicas=replicas)
    param = _param((q.size + 2 * kv.size, 3), Cut(axis="tp", dim=0, parts=(q, kv, kv)), Cut(axis="fsdp", dim=0))
    check_param("qkv", param, layout)
    assert_tiles(param, layout)
    for rank in range(layout.size):
        coord = layout.coord(rank)
        for piece, ranks in zip(extents(param, coord), owners(param, coord), strict=True):
            times = replicas if piece.starts[0] >= q.size else 1
            assert len(ranks) == times * dp_replicate
            neighbours = {layout.coord(other).index("tp") // times for other in ranks}
            assert neighbours == {coord.index("tp") // times}
    over_tp = _param(param.shape, param.cuts[0])
    for index in range(tp):
        assert local_shape(over_tp, Layout(tp=tp).coord(index)) == (q.size // tp + 2 * head, 3)


@given(st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_uneven_parts_tile(tp, sizes):
    parts = tuple(Part(size=size) for size in sizes)
    assert_tiles(_param((sum(sizes),), Cut(axis="tp", dim=0, parts=parts)), Layout(tp=tp))


def test_zero_dim_is_held_whole_by_every_rank():
    layout = Layout(dp_replicate=2, dp_shard=2)
    param = _param(())
    assert_tiles(param, layout)
    assert owners(param, layout.coord(3)) == ((0, 1, 2, 3),)


def test_fewer_rows_than_ranks_leaves_empty_shards():
    layout = Layout(dp_shard=4)
    param = _param((3, 2), Cut(axis="fsdp", dim=0))
    assert [local_shape(param, layout.coord(r)) for r in range(4)] == [(1, 2), (1, 2), (1, 2), (0, 2)]
    assert extents(param, layout.coord(3)) == () and owners(param, layout.coord(3)) == ()


def test_uneven_cut_is_torch_chunk():
    torch = pytest.importorskip("torch")
    for size, degree in itertools.product(range(1, 20), range(1, 8)):
        chunks = torch.arange(size).chunk(degree)
        for index in range(degree):
            pieces = extents(_param((size,), Cut(axis="fsdp", dim=0)), Layout(dp_shard=degree).coord(index))
            ours = [i for p in pieces for i in range(p.starts[0], p.starts[0] + p.sizes[0])]
            assert ours == (chunks[index].tolist() if index < len(chunks) else [])


def test_hsdp_owners_are_the_replicas():
    layout = Layout(dp_replicate=2, dp_shard=2)
    param = _param((5, 2), Cut(axis="fsdp", dim=0))
    assert [owners(param, layout.coord(r))[0] for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("shape", "cuts", "words"),
    [
        ((4,), [Cut(axis="fsdp", dim=1)], "a cut of dim 1"),
        ((4,), [Cut(axis="dq", dim=0)], "axis 'dq'"),
        ((4,), [Cut(axis="fsdp", dim=0), Cut(axis="dp_shard", dim=0)], "two cuts"),
        ((4,), [Cut(axis="ep", dim=0), Cut(axis="fsdp", dim=0)], "two cuts"),
        ((4,), [Cut(axis="efsdp", dim=0), Cut(axis="dp_shard", dim=0)], "two cuts"),
        ((4,), [Cut(axis="tp", dim=0, holder=2)], "index 2 of tp=2"),
        ((4,), [Cut(axis="tp", dim=0, parts=(Part(size=4),), holder=1)], "in parts"),
        ((4,), [Cut(axis="tp", dim=0, parts=(Part(size=3),))], "must add up to its size, 4"),
        ((6,), [Cut(axis="tp", dim=0, parts=(Part(size=3), Part(size=3, replicas=2)))], "evenly"),
    ],
)
def test_cuts_that_contradict_themselves_are_refused_by_name(shape, cuts, words):
    with pytest.raises(PlanError, match=words) as caught:
        check_param("layer.weight", _param(shape, *cuts), Layout(dp_shard=2, tp=2))
    assert caught.value.name == "layer.weight"
