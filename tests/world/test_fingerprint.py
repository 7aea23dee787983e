"""What ranks compare reads the same in every process."""

import functools
import math

import torch

from shardwise.world import described


class Plain:
    pass


def test_addresses_and_the_order_of_sets_are_left_out():
    assert described(Plain()) == described(Plain())
    assert described({"b", "a"}) == "{'a', 'b'}" and described(frozenset({2, 1})) == "{1, 2}"
    assert described(functools.partial(torch.nn.init.trunc_normal_, std=0.5)).endswith("std=0.5)")
    assert "0x" not in described([(lambda: 1), {"key": Plain()}, functools.partial(described, Plain())])


def test_what_differs_reads_otherwise():
    assert described(torch.nn.init.normal_) == "torch.nn.init.normal_" != described(torch.nn.init.uniform_)
    values = (1, 1.0, "1", True, None, (1,), (1, 2), {1}, {1: 1}, math.nan, torch.float32, torch.tensor(1.0))
    assert len({described(value) for value in values}) == len(values)
