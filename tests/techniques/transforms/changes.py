"""Transforms as a user writes them."""

import torch
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


class Pad(sw.Options, frozen=True, kw_only=True):
    multiple: int = 1


@sw.transform("for_world", Pad)
def for_world(module, config, world):
    """Rows for all ranks, as a vocabulary is padded to a multiple of them."""
    return nn.Sequential(module, nn.Linear(4, config.multiple * world.size * world.axis("dp").size))


@sw.transform("on_device")
def on_device(module, *, device, world=None):
    """A buffer that is made where the rank computes, in one process too."""
    module.register_buffer("scale", torch.ones(1 if world is None else world.size, device=device), persistent=False)
    module.was_given = (world is not None, str(device))
