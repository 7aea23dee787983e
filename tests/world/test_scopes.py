"""Groups of ranks within which a digest is to be equal, while the groups may differ."""

import pytest
import torch

from shardwise.layout import Layout
from shardwise.world.agreement import Agreement, Scope


def scopes(layout, apart):
    return [Scope.of(layout.coord(rank), apart) for rank in range(layout.size)]


def agree(values, among):
    """What each rank decides, from the sum of all entries."""
    ranks = [
        Agreement(len(values), i, group=None, device=torch.device("cpu"), timeout_s=1.0, watch=None)
        for i in range(len(values))
    ]
    entries = [torch.tensor(one.same_among(v, s)) for one, v, s in zip(ranks, values, among, strict=True)]
    summed = torch.stack(entries).sum(0)
    return {one.all_same_among(summed, scope) for one, scope in zip(ranks, among, strict=True)}


@pytest.mark.parametrize(
    ("values", "is_same"), [((7, 7, 9, 9), True), ((7, 9, 7, 9), False), ((7, 7, 9, 8), False), ((0, 0, 5, 5), True)]
)
def test_values_are_compared_within_a_group_alone_and_all_ranks_decide_the_same(values, is_same):
    assert agree(values, scopes(Layout(pp=2, dp_shard=2), ["pp"])) == {is_same}


def test_without_an_axis_all_ranks_are_one_group():
    assert scopes(Layout(dp_shard=2, tp=2), []) == [Scope(0, 1, 4)] * 4
    assert agree((3, 3, 3, 3), [Scope(0, 1, 4)] * 4) == {True} and agree((3, 3, 3, 4), [Scope(0, 1, 4)] * 4) == {False}
