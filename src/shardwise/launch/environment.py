"""What torchrun, SLURM and ``launch_local`` set in the environment of a rank, read without torch.

A variable that is ``""`` or ``"-1"`` counts as unset: some launchers set it so. Everything that reads these variables reads them
from here, so that all agree on who has started a process.
"""

import os
from collections.abc import Mapping

from shardwise.errors import ConfigError

_UNSET = ("", "-1")
_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def given_in(environ: Mapping[str, str] | None, *names: str) -> dict[str, str]:
    """Those of the variables that are set. ``environ``: None: that of this process."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in names if environ.get(name, "") not in _UNSET}


def number(name: str, text: str) -> int:
    """The value of a variable that is a whole number."""
    if not text.strip().isdigit():
        raise ConfigError(
            f"{name}={text!r}", why="it must be a whole number, 0 or more", fix=f"correct {name} in the environment"
        )
    return int(text)


def has_slurm_step(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a task of a SLURM *step* (``srun``); a batch script alone has no step."""
    return len(given_in(environ, *_STEP)) == len(_STEP)


def rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks: of RANK and WORLD_SIZE, else of a SLURM step; 0 of 1 without."""
    given = given_in(environ, "RANK", "WORLD_SIZE", *_STEP)
    rank, size = ("RANK", "WORLD_SIZE") if "RANK" in given else _STEP
    if rank not in given:
        return 0, 1
    return number(rank, given[rank]), number(size, given.get(size, "1"))


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number on its node; 0 where it is not known."""
    given = given_in(environ, "LOCAL_RANK", "SLURM_LOCALID")
    return number(*next(iter(given.items()))) if given else 0


def is_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether another launcher has started this process as one of several ranks, or torchrun as the only one. A SLURM step of one
    task, as of an interactive shell, is a place to start ranks from."""
    return bool(given_in(environ, "RANK")) or (has_slurm_step(environ) and rank_and_size(environ)[1] > 1)


def variables_of(rank: int, size: int) -> dict[str, str]:
    """What a rank has of them whose peers are all on this machine, but for the address of rank 0."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
