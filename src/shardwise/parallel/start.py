"""``sw.init``: the world of a run, with the mesh axes that techniques use."""

from collections.abc import Mapping

import torch

from shardwise.config.keywords import public_call
from shardwise.config.user_script import refuse_while_imported
from shardwise.layout import Layout
from shardwise.techniques import AXES_IN_USE
from shardwise.world import World
from shardwise.world import init as init_world

_DEGREES = {
    axis: f'degrees are one text, or a mapping: sw.init("{axis}=2"), sw.init({{"{axis}": 2}})' for axis in AXES_IN_USE
}


@public_call(
    {**_DEGREES, "world_size": "leave it out: the launcher says it", "rank": "leave it out: the launcher says it"}
)
def init(
    layout: str | Layout | Mapping[str, int | str] = "dp_shard=-1",
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int | None = None,
) -> World:
    """Starts or joins the process group and lays its ranks out on a mesh.

    Every rank must call it, with the same arguments. The ranks come from an existing process group, else the
    environment of torchrun, else that of a SLURM step. Otherwise there is one rank, with a real process group, so that
    one process takes the same code path as many. With torch's backend ``"fake"`` there are no peers: one process sees
    what a rank among any number of them would hold, and exchanges work as if the others had sent what this rank sends:
    ``sw.init("dp_shard=8", backend="fake")`` is rank 0 of 8, or RANK where the environment has a WORLD_SIZE of 8.

    Args:
        layout: degrees of the mesh axes, such as ``"dp_shard=4"`` or ``"dp_replicate=2,dp_shard=-1"``;
            ``"dp_replicate=-1,dp_shard=node"`` shards within each node and replicates across nodes.
        device: ``"cpu"``, ``"cuda"`` or a device; None = this rank's accelerator if there is one, else the CPU.
        backend: torch backend string such as ``"gloo"`` or ``"cuda:nccl,cpu:gloo"``; None = the value of
            ``TORCH_DISTRIBUTED_BACKEND``, else the one that suits the device, with gloo for CPU tensors. With an
            existing group: the group's own backend, or an error.
        timeout_s: seconds a collective may wait for a peer; None: 600. With an existing group: its own timeout, or an
            error.
        seed: seed of every random stream of the run, of torch's, numpy's and Python's own numbers too, which each rank draws for
            itself from here on; None: 0. One that was given to torch before is lost: a warning says so.

    Raises:
        LayoutError: the layout does not fit the number of ranks (raised before any process group starts).
        UnsupportedError: an axis that no technique uses (raised before any process group starts).
        ConfigError: an environment that contradicts itself, a device that does not exist, a backend or timeout that
            differs from the existing group's.
        UsageError: at the top level of a file that is imported for what it defines (``shardwise verify script.py:Model``).
        RankError: ranks that were started with different layouts, seeds or package versions; no process answers at the
            address.
    """
    refuse_while_imported("sw.init")
    return init_world(layout, device=device, backend=backend, timeout_s=timeout_s, seed=seed, axes=AXES_IN_USE)
