"""Rank and world size from the environment of torchrun or SLURM, read and checked without torch; else one process."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError, LayoutError
from shardwise.launch.environment import given_in, has_slurm_step, number

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Env:
    """One process's ranks and address. ``source`` is ``"torchrun"``, ``"slurm"``, ``"single"`` or ``"imagined"`` (no address)."""

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


def is_distributed(environ: Mapping[str, str] | None = None) -> bool:
    """True where the environment describes a process group (also one of a single rank)."""
    return read_env(environ).source != "single"


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Reads rank, world size and address from the environment. A rank of "-1" counts as unset: some launchers set it.

    torchrun's variables come first; then those of a SLURM *step* (``srun``; a batch script alone has no step and is a
    single process); with neither, a world of one.

    Raises:
        ConfigError: some of a launcher's variables are missing, not numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    given = given_in(environ, *_TORCHRUN)
    if "RANK" in given or ("WORLD_SIZE" in given and given["WORLD_SIZE"] != "1"):
        return _torchrun(given)
    if has_slurm_step(environ):
        return _slurm(environ)
    return Env("single")


def imagined_env(num_ranks: int | None, environ: Mapping[str, str] | None = None) -> Env:
    """The rank that one process stands for on torch's fake backend, which needs no address: RANK of WORLD_SIZE where the environment
    has them, and its layout is not of another number of ranks; else rank 0 of ``num_ranks``, those of the layout.

    Raises:
        ConfigError: neither says how many ranks there are.
    """
    given = given_in(os.environ if environ is None else environ, "RANK", "WORLD_SIZE")
    size = number("WORLD_SIZE", given["WORLD_SIZE"]) if "WORLD_SIZE" in given else None
    rank = number("RANK", given.get("RANK", "0")) if num_ranks in (None, size) else 0
    size = size if num_ranks is None else num_ranks
    if size is None:
        raise ConfigError(
            'backend="fake" without a number of ranks',
            why="one process stands for a rank of any number of them, and a degree of the layout is to be inferred from it",
            fix='give each degree a number: sw.init("dp_replicate=2,dp_shard=4", backend="fake"); or set WORLD_SIZE (and RANK)',
        )
    env = Env("imagined", rank, size)
    _check_ranges(env)
    return env


def ranks_per_node(env: Env, environ: Mapping[str, str] | None = None) -> int:
    """The number of ranks per node, which a layout's ``dp_shard=node`` stands for: from LOCAL_WORLD_SIZE, or the tasks
    per node of a SLURM step; 1 where one process is the whole world.

    Raises:
        LayoutError: the environment does not say, nodes have different numbers of ranks, or the ranks of a node are not
            neighbours, so that ``dp_shard`` would span nodes.
    """
    environ = os.environ if environ is None else environ
    if env.source == "single":
        return 1
    sizes, num_nodes, place = _nodes(env, environ)
    if not sizes:
        raise LayoutError(
            f"dp_shard=node on {env.world_size} ranks",
            why="the environment does not say how many of them a node has: it has no "
            + ("SLURM_STEP_TASKS_PER_NODE" if env.source == "slurm" else "LOCAL_WORLD_SIZE for this group"),
            fix="give the number: dp_shard=8; or start with torchrun, `shardwise train` or srun, which set it",
        )
    size = sizes[0]
    if set(sizes) != {size} or (num_nodes and num_nodes * size != env.world_size > size):
        found = ", ".join(map(str, sizes)) if num_nodes is None else f"{num_nodes} nodes, {size} on this one"
        raise LayoutError(
            f"dp_shard=node on {env.world_size} ranks",
            why=f"nodes have different numbers of ranks ({found}), and the groups of dp_shard are of one size",
            fix="start as many ranks on every node, or give dp_shard a number that divides those of all nodes",
        )
    if place and size < env.world_size and env.rank % size != int(place):
        raise LayoutError(
            f"dp_shard=node: rank {env.rank} is number {place} of the {size} on its node",
            why="the ranks of a node are not neighbours, and dp_shard takes neighbours, so it would not lie within nodes",
            fix="number ranks node by node (srun --distribution=block), or give dp_shard a number",
        )
    return size


def _nodes(env: Env, environ: Mapping[str, str]) -> tuple[list[int], int | None, str]:
    """Ranks per node for the nodes that the environment names (empty if none), the number of nodes if it is given
    separately, and this rank's number on its own node."""
    local, world = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    if env.source != "slurm" and local not in ("", "0", "-1") and world in ("", "-1", str(env.world_size)):
        num_nodes = number("GROUP_WORLD_SIZE", environ.get("GROUP_WORLD_SIZE") or "0")  # torchrun's agents
        return [number("LOCAL_WORLD_SIZE", local)], num_nodes or None, environ.get("LOCAL_RANK", "")
    if env.source == "slurm" or environ.get("SLURM_STEP_NUM_TASKS") == str(env.world_size):
        return _tasks_per_node(environ), None, environ.get("SLURM_LOCALID", "")
    return [], None, ""


def _torchrun(given: dict[str, str]) -> Env:
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise ConfigError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}",
            why="a rank needs all four of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to find its peers",
            fix=f"start with torchrun or `shardwise train`, or set {', '.join(missing)}; unset RANK to run one process",
        )
    rank, size = number("RANK", given["RANK"]), number("WORLD_SIZE", given["WORLD_SIZE"])
    local_size = number("LOCAL_WORLD_SIZE", given.get("LOCAL_WORLD_SIZE", str(size)))
    local_rank = number("LOCAL_RANK", given.get("LOCAL_RANK", str(rank % max(local_size, 1))))
    env = Env(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        given["MASTER_ADDR"],
        number("MASTER_PORT", given["MASTER_PORT"]),
    )
    _check_ranges(env)
    return env


def _slurm(environ: Mapping[str, str]) -> Env:
    size = number("SLURM_STEP_NUM_TASKS", environ["SLURM_STEP_NUM_TASKS"])
    local_size = _tasks_on_node(environ, size)
    job = number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0"))
    env = Env(
        "slurm",
        number("SLURM_PROCID", environ["SLURM_PROCID"]),
        size,
        number("SLURM_LOCALID", environ.get("SLURM_LOCALID", "0")),
        local_size,
        environ.get("MASTER_ADDR") or _first_host(environ),
        # One port per job, the same on every node without communication: two jobs on a node rarely share last digits.
        number("MASTER_PORT", environ.get("MASTER_PORT") or str(20000 + job % 20000)),
    )
    _check_ranges(env)
    return env


def _tasks_on_node(environ: Mapping[str, str], size: int) -> int:
    per_node = _tasks_per_node(environ) or [size]
    node = number("SLURM_NODEID", environ.get("SLURM_NODEID", "0"))
    return per_node[node] if node < len(per_node) else per_node[0]


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Tasks of each node, from a list such as ``2(x3),1``: three nodes with two, one with one. Empty if none is set."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or ""
    per_node: list[int] = []
    for entry in filter(None, text.split(",")):
        num_tasks, _, times = entry.rstrip(")").partition("(x")
        per_node += [number("SLURM_STEP_TASKS_PER_NODE", num_tasks)] * number("SLURM_STEP_TASKS_PER_NODE", times or "1")
    return per_node


def _first_host(environ: Mapping[str, str]) -> str:
    """First host of a SLURM node list: ``node[03-07,12]-ib,other`` -> ``node03-ib``."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    # Replaces each bracket by its first number; what follows the first comma after that is other hosts.
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def _check_ranges(env: Env) -> None:
    if env.world_size < 1 or env.rank >= env.world_size:
        raise ConfigError(
            f"rank {env.rank} of world size {env.world_size}",
            why="ranks are 0 to world size - 1",
            fix="correct RANK and WORLD_SIZE in the environment",
        )
    if env.source != "imagined" and not 0 < env.master_port < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT={env.master_port}", why="a port is a number from 1 to 65535", fix="correct MASTER_PORT"
        )
    if env.local_world_size < 1 or env.local_rank >= env.local_world_size or env.local_world_size > env.world_size:
        raise ConfigError(
            f"local rank {env.local_rank} of {env.local_world_size} on a node, world size {env.world_size}",
            why="local ranks are 0 to local world size - 1, and a node has at most all ranks",
            fix="correct LOCAL_RANK and LOCAL_WORLD_SIZE in the environment",
        )
