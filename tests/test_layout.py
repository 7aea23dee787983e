"""Layouts as pure data: for every world size to 64 the grid is a grid."""

import math

import pytest

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.layout import AXES, DERIVED_AXES, Layout, layout_of, num_ranks_of, parse_layout
from shardwise.techniques import AXES_IN_USE


def _all_layouts(size: int):
    """Every way to write ``size`` as a product of five degrees."""

    def factor(rest: int, axes: int):
        if axes == 1:
            yield (rest,)
            return
        for d in range(1, rest + 1):
            if rest % d == 0:
                for tail in factor(rest // d, axes - 1):
                    yield (d, *tail)

    for degrees in factor(size, len(AXES)):
        yield Layout(**dict(zip(AXES, degrees, strict=True)))


@pytest.mark.parametrize("size", [pytest.param(n, marks=() if n <= 16 else pytest.mark.soak) for n in range(1, 65)])
def test_grid_is_a_bijection_and_groups_partition_the_ranks(size):
    for layout in _all_layouts(size):
        assert layout.size == size
        for rank in range(size):
            coord = layout.coord(rank)
            assert layout.rank_at(dict(zip(AXES, coord.indices, strict=True))) == rank
        for axis in (*AXES, *DERIVED_AXES):
            groups = layout.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(size))
            assert {len(group) for group in groups} == {layout.degree(axis)}
            for group in groups:
                assert [layout.coord(rank).index(axis) for rank in group] == list(range(len(group)))


def test_groups_of_the_documented_grid():
    """8 ranks, pp=2, dp=2, tp=2 with tp innermost: the groups every Megatron-style paper draws."""
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_fsdp_and_loss_join_cp():
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2)
    assert layout.degree("fsdp") == 4 and layout.degree("loss") == 8 and layout.degree("dp") == 4
    assert layout.groups("fsdp") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_carved_axis_takes_neighbours_along_fsdp_and_adds_no_ranks():
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2)
    assert layout.size == 8 and str(layout) == "dp_replicate=2,dp_shard=2,cp=2,ep=2"
    assert layout.groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("efsdp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    for axis in ("ep", "efsdp"):
        for group in layout.groups(axis):
            assert [layout.coord(rank).index(axis) for rank in group] == [0, 1] and layout.degree(axis) == 2
    assert Layout(**layout.all_degrees) == layout and Layout(dp_shard=4).groups("efsdp") == ((0, 1, 2, 3),)
    assert num_ranks_of("dp_shard=4,ep=2") == 4


def test_the_text_of_an_axis_names_the_degrees_that_a_user_has_given():
    layout = Layout(dp_shard=2, cp=2, tp=2, ep=2)
    assert layout.text_of("fsdp") == "dp_shard=2,cp=2" and layout.text_of("efsdp") == "efsdp=2"
    assert Layout(tp=2).text_of("fsdp") == "dp_shard=1" and layout.shared_axes == ("tp",)


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("dp_shard=-1,ep=2", 4, Layout(dp_shard=4, ep=2)),
        ("dp_shard=-1", 4, Layout(dp_shard=4)),
        ("dp_replicate=2,dp_shard=-1", 8, Layout(dp_replicate=2, dp_shard=4)),
        (" dp_replicate = -1 ", 3, Layout(dp_replicate=3)),
        ("", 1, Layout()),
        ("dp_shard=2,tp=1", 2, Layout(dp_shard=2)),
        ({"dp_shard": 2}, 2, Layout(dp_shard=2)),
        (Layout(dp_replicate=2), 2, Layout(dp_replicate=2)),
    ],
)
def test_layout_of(text, ranks, expected):
    assert layout_of(text, ranks) == expected


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("dp_shard=1,tp=3", 2, ["multiply to 3", 'or "tp=2", or start 3 ranks']),
        ("tp=8", 4, ['"tp=4"']),
        ("dp_shard=3", 4, ["multiply to 3", '"dp_shard=4"', "or start 3 ranks"]),
        ("dp_replicate=3,dp_shard=-1", 4, ["which does not divide 4", '"dp_replicate=2,dp_shard=2"']),
        ("dp_shrad=2", 2, ["axis 'dp_shrad'", "did you mean 'dp_shard'"]),
        ("dp_shard=0", 2, ["dp_shard=0", "1 or more, or -1"]),
        ("dp_shard=-2", 2, ["dp_shard=-2"]),
        ("dp_shard=-1,dp_replicate=-1", 4, ["only one axis"]),
        ("dp_shard=2,dp_shard=2", 4, ["dp_shard twice"]),
        ("4", 4, ["axis=degree"]),
        ("dp_shard=two", 2, ["axis=degree"]),
        ("dp_replicate=node", 2, ["dp_replicate=node", "neighbours are along dp_shard"]),
        ({"dp_shard": "nodes"}, 2, ["dp_shard=nodes", "of dp_shard also 'node'"]),
        ("dp_shard=4,ep=3", 4, ["ep=3", "of which dp_shard=4 gives 4", "ep=2 or 4"]),
        ("dp_replicate=2,ep=2", 2, ["of which dp_shard=1 gives 1", "leave ep out"]),
        ("dp_shard=4,ep=-1", 4, ["ep=-1", "no ranks of its own"]),
        ("dp_shard=node", 8, ["not known here", '"dp_replicate=-1,dp_shard=8"']),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers(text, ranks, words):
    with pytest.raises(LayoutError) as caught:
        layout_of(text, ranks)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("axis", ["pp", "ep"])
def test_axes_without_a_technique_are_refused_by_name(axis):
    with pytest.raises(UnsupportedError, match=f"{axis}=2.*\n.*does not exist yet"):
        layout_of(f"dp_shard=2,{axis}=2", 4, axes=AXES_IN_USE)
    assert layout_of(f"dp_shard=2,{axis}=2", 2 if axis == "ep" else 4).degree(axis) == 2


def test_other_axes_keep_their_degrees_in_what_is_offered():
    with pytest.raises(LayoutError) as caught:
        layout_of("dp_shard=3,tp=2", 8)
    assert 'use "dp_shard=4,tp=2" or "dp_replicate=2,dp_shard=2,tp=2"' in caught.value.fix
    with pytest.raises(LayoutError) as caught:
        layout_of("dp_shard=2,tp=3", 8)  # no layout of 8 ranks has tp=3
    assert 'use "dp_replicate=4,dp_shard=2"' in caught.value.fix


def test_the_nearest_layouts_offered_do_work():
    for ranks in range(1, 65):
        for shard in (2, 3, 5, 7, 48):
            try:
                layout_of(f"dp_shard={shard}", ranks)
            except LayoutError as error:
                offered = [part for part in error.fix.split('"') if "=" in part]
                assert offered and all(math.prod(parse_layout(o).values()) == ranks for o in offered)
                assert all(layout_of(o, ranks).size == ranks for o in offered)


def test_str_round_trips():
    for layout in _all_layouts(12):
        assert Layout(**{**Layout().degrees, **parse_layout(str(layout))}) == layout


@pytest.mark.parametrize("given", ["dp_replicate=-1,dp_shard=node", {"dp_replicate": -1, "dp_shard": "node"}])
def test_a_node_takes_the_number_of_its_ranks(given):
    assert layout_of(given, 16, 8) == layout_of(given, 16, lambda: 8) == Layout(dp_replicate=2, dp_shard=8)
    assert parse_layout(given) == {"dp_replicate": -1, "dp_shard": "node"}
    assert layout_of("dp_shard=-1", 16, lambda: pytest.fail("asked for nothing")) == Layout(dp_shard=16)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp_shard=node", ["layout 'dp_shard=node' on 8 ranks, 4 on each node", '"dp_replicate=2,dp_shard=4"']),
        ("dp_replicate=4,dp_shard=node", ["multiply to 16"]),
    ],
)
def test_a_node_that_does_not_fit_says_what_does(text, words):
    with pytest.raises(LayoutError) as caught:
        layout_of(text, 8, 4)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (
            "dp=2",
            "write dp_shard=2, which shards parameters, gradients and optimizer state (FSDP, ZeRO-3), or dp_replicate=2",
        ),
        ("DP_size=4", "write dp_shard=4"),
        ("fsdp=2", "write dp_shard=2"),
        ("data_parallel_shard_degree=-1", "write dp_shard=-1"),
        ("zero=3", "write dp_shard=-1"),  # a stage, and no number of ranks
        ("ddp=2", "write dp_replicate=2, which keeps a whole copy of parameters"),
        ("replicate=2", "write dp_replicate=2"),
        ("hsdp=4", "write dp_replicate=N,dp_shard=M"),
        ("tensor-model-parallel-size=2", "write tp=2"),
        ("mp=2", "write tp=2"),
        ("sp=2", "leave it out, and write tp=N with parallel.tensor_parallel.sequence_parallel=true"),
        ("expert_model_parallel_size=2", "leave it out: there is no expert parallelism yet"),
        ("context_parallel_size=2", "write cp=2, which cuts the positions"),
        ("pipeline_parallel_degree=2", "leave it out: there is no pipeline parallelism yet"),
        ("tpp=2", "did you mean 'tp'?"),
        ("dp_sharded=2", "did you mean 'dp_shard'?"),
    ],
)
def test_an_axis_by_its_name_in_another_tool_is_answered_with_what_to_write(text, fix):
    for given in (text, dict([text.split("=")]) | {"tp": 1}):
        with pytest.raises(LayoutError) as caught:
            layout_of(given, 2, axes=AXES_IN_USE)
        assert caught.value.fix.startswith(fix)
        assert caught.value.why == "the mesh axes are dp_replicate, dp_shard, cp, tp"
