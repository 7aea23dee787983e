"""Transforms as a user writes them."""

from torch import nn

import shardwise as sw


class Widen(sw.Options, frozen=True, kw_only=True):
    factor: int = 2


@sw.transform("widen", Widen)
def widen(module, config):
    """Replaces the first tower by a wider one."""
    module.image = nn.Sequential(nn.Linear(4, 4 * config.factor), nn.Tanh(), nn.Linear(4 * config.factor, 4))


@sw.transform("wrapped", after="widen")
def wrapped(module):
    """Another module around it."""
    return nn.Sequential(module, nn.Linear(4, 3))


@sw.transform("broken")
def broken(module):
    module.nowhere.weight  # noqa: B018


@sw.transform("wrong")
def wrong(module):
    return 3
