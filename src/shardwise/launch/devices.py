"""The devices of this machine for ranks: how many ranks to start by default, and whether they compute on the CPU."""

import os
from pathlib import Path

from shardwise.errors import ConfigError

_MAX_CPU_RANKS = 2


def default_nproc(device: str = "auto") -> int:
    """Default number of ranks: one per visible accelerator, else ``min(2, cores)`` on the CPU.

    torch is imported only on a machine that has an accelerator's device file, to count what this process may use.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" where torch sees no device, or another word.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r}", why="it is not a kind of device", fix="use auto, cpu or cuda")
    count = 0 if device == "cpu" else _num_cuda()
    if device == "cuda" and not count:
        raise ConfigError(
            "device='cuda'", why="torch sees no CUDA device here", fix="use device='cpu', or a CUDA build"
        )
    return count or min(_MAX_CPU_RANKS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def is_cpu(device: str) -> bool:
    """Whether ranks of ``device`` ("auto", "cpu" or "cuda") compute on the CPU here and may be forked: CUDA may not."""
    return device == "cpu" or (device == "auto" and not _num_cuda())


def _num_cuda() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(Path(p).exists() for p in ("/dev/kfd", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()
