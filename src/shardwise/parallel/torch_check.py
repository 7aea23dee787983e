"""Checks a torch that is newer than the tested ones before it is used: once per process, by rank 0, on the CPU."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from shardwise._torch.version import TESTED, is_newer, is_older
from shardwise.config.caller import level_of_caller
from shardwise.errors import UnsupportedError
from shardwise.world import World

RUNS = "SHARDWISE_TORCH_CHECK_RUNS"
"""Environment variable of the processes that run the check: they do not start others."""

_PROGRAM = "shardwise.verify.torch_check"
_TIMEOUT_S = 300.0
_OF_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_outcome: list[str] = []  # of this process; "": torch behaves as expected


def check_torch(world: World) -> None:
    """Warns of a torch that is newer than the tested ones, if it passes a short check of gathering order, unused
    parameters, identity of parameters and mixed dtypes. All ranks must call it.

    Raises:
        UnsupportedError: it does not pass; or it is older than the tested ones.
    """
    if is_older():
        raise UnsupportedError(
            f"torch {torch.__version__}",
            why="what is used of FSDP2 and autograd is not there, or does something else: this was not tried",
            fix=f'pip install "torch>={".".join(map(str, min(TESTED)))}"',
        )
    if not is_newer() or RUNS in os.environ:
        return
    if not _outcome:
        _outcome.append(world.broadcast(_try() if world.is_main else ""))
        newest = ".".join(map(str, max(TESTED)))
        if not _outcome[0] and world.is_main:
            warnings.warn(
                f"torch {torch.__version__} is newer than {newest}, on which Shardwise's tests ran. A short check of what it relies on "
                f"passed (python -m {_PROGRAM}); compare your own model too: sw.verify, or shardwise verify",
                stacklevel=level_of_caller(),
            )
    if _outcome[0]:
        raise UnsupportedError(
            f"torch {torch.__version__}",
            why=f"it is newer than what Shardwise was tested on, and does not do what it relies on: {_outcome[0]}",
            fix=f'pip install "torch=={".".join(map(str, max(TESTED)))}.*", or a newer Shardwise; python -m {_PROGRAM} shows the whole check',
        )


def _try() -> str:
    """What differs from the tested versions, as text; "": nothing."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH")]))
    env |= {RUNS: "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM], env=env, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"the check did not end within {_TIMEOUT_S:g} s"
    if not done.returncode:
        return ""
    return (done.stdout.strip() or done.stderr.strip() or f"the check ended with status {done.returncode}")[-2000:]
