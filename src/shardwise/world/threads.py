"""How many threads a rank computes with on the CPU."""

import os

import torch

from shardwise.launch.local import CHOSE_THREADS


def set_threads(local_world_size: int) -> None:
    """Divides the cores among the ranks of a node, unless the user has set the number of threads of a rank."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_share(local_world_size))


def threads_of_offloaded_step(local_world_size: int) -> int | None:
    """Threads for an optimizer that steps on parameters in host memory; None: as many as everything else has.

    A launcher gives each rank OMP_NUM_THREADS=1 where the user has set nothing, and the steps of billions of parameters
    would use one thread while the device waits. torchrun does not show that it set the variable: 1 under torchrun
    counts as its choice, any other number as the user's.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    if given != "1" or not ("TORCHELASTIC_RUN_ID" in os.environ or CHOSE_THREADS in os.environ):
        return None
    return _share(local_world_size)


def _share(local_world_size: int) -> int:
    """A rank's share of the node's cores: at most those that it may run on, and at most OpenMP's own limit."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return max(1, min(cores // local_world_size, usable, int(limit) if limit.isdigit() else cores))
