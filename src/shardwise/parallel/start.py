"""``sw.init``: the world of a run, on the axes that techniques use."""

from collections.abc import Mapping

import torch

from shardwise.layout import Layout
from shardwise.techniques import AXES_IN_USE
from shardwise.world import World
from shardwise.world import init as init_world

__all__ = ["init"]


def init(
    layout: str | Layout | Mapping[str, int | str] = "dp_shard=-1",
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
) -> World:
    """Joins this process to its peers and lays them out. Every rank must call it, with the same arguments.

    Who the peers are comes from an existing process group, else the environment of torchrun, else that of a SLURM
    step, else there is one rank: a real process group of one, so that one process takes the same code path as many.
    A group of torch's backend ``"fake"`` has no peers: one process sees what a rank of any number of them would hold,
    and is agreed with as if they gave what it gives.

    Args:
        layout: degrees of the mesh axes, such as ``"dp_shard=4"`` or ``"dp_replicate=2,dp_shard=-1"``;
            ``"dp_replicate=-1,dp_shard=node"`` shards within each node and replicates across nodes.
        device: ``"cpu"``, ``"cuda"`` or a device; None = this rank's accelerator if there is one, else the CPU.
        backend: torch backend string such as ``"gloo"`` or ``"cuda:nccl,cpu:gloo"``; None = the one that suits the
            device, with gloo for CPU tensors beside it. ``TORCH_DISTRIBUTED_BACKEND`` overrides None. Of an existing group: the
            one that it has, or an error.
        timeout_s: seconds a collective may wait for a peer; None: 600. Of an existing group: the one that it has, or an error.
        seed: seed of every random stream of the run.

    Raises:
        LayoutError: the layout does not fit the number of ranks (raised before any process group starts).
        UnsupportedError: an axis that no technique uses (the same).
        ConfigError: an environment that contradicts itself, a device that is not there, a backend or timeout other than that of
            the existing group.
        RankError: ranks that were started with different layouts, seeds or package versions; no process that answers at
            the address.
    """
    return init_world(layout, device=device, backend=backend, timeout_s=timeout_s, seed=seed, axes=AXES_IN_USE)
