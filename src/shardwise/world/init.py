"""``sw.init``: from an environment to a :class:`World` of ranks laid out on a mesh."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError, UsageError
from shardwise.layout import AXES, DERIVED_AXES, Layout, layout_of
from shardwise.world.agreement import Agreement
from shardwise.world.axis import Axis
from shardwise.world.env import Env, read_env
from shardwise.world.fingerprint import agree_on, package_versions
from shardwise.world.rng import seed_all
from shardwise.world.watch import Watch

__all__ = ["World", "init"]

_generation = itertools.count()  # worlds opened by this process so far: the same on every rank, so keys do not collide


def init(
    layout: str | Layout | Mapping[str, int] = "dp_shard=-1",
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
    seed: int = 0,
) -> "World":
    """Joins this process to its peers and lays them out. Every rank must call it, with the same arguments.

    Who the peers are comes from an existing process group, else the environment of torchrun, else that of a SLURM
    step, else there is one rank: a real process group of one, so that one process takes the same code path as many.

    Args:
        layout: degrees of the mesh axes, such as ``"dp_shard=4"`` or ``"dp_replicate=2,dp_shard=-1"``.
        device: ``"cpu"``, ``"cuda"`` or a device; None = this rank's accelerator if there is one, else the CPU.
        backend: torch backend string such as ``"gloo"`` or ``"cuda:nccl,cpu:gloo"``; None = the one that suits the
            device, with gloo for CPU tensors beside it. ``TORCH_DISTRIBUTED_BACKEND`` overrides None.
        timeout_s: seconds a collective may wait for a peer.
        seed: seed of every random stream of the run.

    Raises:
        LayoutError: the layout does not fit the number of ranks (raised before any process group starts).
        ConfigError: an environment that contradicts itself, a device that is not there.
        RankError: ranks that were started with different layouts, seeds or package versions.
    """
    existing = dist.is_initialized()
    env = _env_of_group() if existing else read_env()
    resolved = layout_of(layout, env.world_size)
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s}", why="it is a number of seconds above 0", fix="use timeout_s=600")
    chosen = _device(device, env)
    if not existing:
        _start_group(env, backend or os.environ.get("TORCH_DISTRIBUTED_BACKEND"), chosen, timeout_s)
    try:
        return World(resolved, env, chosen, timeout_s=timeout_s, seed=seed, owns_group=not existing)
    except BaseException:
        if not existing and dist.is_initialized():
            dist.destroy_process_group()
        raise


class World:
    """The ranks of a run: where this one stands, its device, and how to talk to the others.

    A context manager: leaving it closes it, after an exception too. Build one with :func:`init`.

    Attributes:
        layout: the :class:`~shardwise.layout.Layout` over the ranks.
        rank, size, local_rank: this process among all, and on its node.
        is_main: True on rank 0.
        device: where this rank computes.
        mesh: the one root DeviceMesh, with dims ``dp_replicate`` and ``dp_shard``.
        seed: seed of every random stream of the run.
        agreement: what ranks must agree on, exchanged twice per window.
    """

    def __init__(
        self, layout: Layout, env: Env, device: torch.device, *, timeout_s: float, seed: int, owns_group: bool
    ):
        self.layout, self.device, self.seed, self.timeout_s = layout, device, seed, timeout_s
        self.rank, self.size, self.local_rank = env.rank, env.world_size, env.local_rank
        self.source = env.source
        self._local_size = env.local_world_size
        self._owns_group, self.closed = owns_group, False
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(self.size)): dist.group.WORLD}
        self.watch: Watch | None = None
        prefix = f"shardwise/{next(_generation)}"
        if self.size > 1:
            self.watch = Watch(self.rank, self.size, timeout_s=timeout_s, prefix=prefix)
        try:
            small = torch.device("cpu") if _has_cpu_backend() else device
            self.agreement = Agreement(
                self.size, self.rank, group=dist.group.WORLD, device=small, timeout_s=timeout_s, watch=self.watch
            )
            facts = {"layout": str(layout), "seed": seed, "versions": package_versions()}
            agree_on(self.agreement, facts, what="the ranks' start-up", fix="start every rank with the same command")
            self.mesh = self._make_mesh()
            self._axes = {name: self._make_axis(name) for name in (*AXES, *DERIVED_AXES)}
        except BaseException:
            self._stop_watch()
            raise
        _set_threads(self._local_size)
        seed_all(seed, self.rank)

    def __repr__(self) -> str:
        return f"World(layout={str(self.layout)!r}, rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all."""
        return self.rank == 0

    def axis(self, name: str) -> Axis:
        """The view of a mesh axis (``dp_shard``) or a derived one (``dp``, ``fsdp``, ``loss``)."""
        if name not in self._axes:
            raise UsageError(f"axis({name!r})", why="there is no such axis", fix=f"use one of {', '.join(self._axes)}")
        return self._axes[name]

    def barrier(self) -> None:
        """Waits for all ranks. All ranks must call it."""
        self.agreement.sum({"barrier": 0.0}, "a barrier")

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank ``src``'s ``value`` on every rank: tensors into a tensor of the same shape on this rank's device, other
        objects by pickling (peers are trusted). All ranks must call it; a tensor must be given as a tensor everywhere."""
        if not 0 <= src < self.size:
            raise UsageError(f"broadcast(src={src})", why=f"ranks are 0 to {self.size - 1}", fix="use one of them")
        if self.size == 1:
            return value
        if isinstance(value, Tensor):
            result = value.detach().clone().to(self.device)
            dist.broadcast(result, src=src)
            return result
        box = [value]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank. All ranks must call it."""
        return self.agreement.gather(value, "a gather of objects")

    @contextlib.contextmanager
    def leader_first(self, *, local: bool = False) -> Iterator[bool]:
        """Lets rank 0 (``local=True``: local rank 0 of each node) run the block before the others; yields who leads.
        All ranks must call it."""
        leads = (self.local_rank if local else self.rank) == 0
        if not leads:
            self.barrier()
        yield leads
        if leads:
            self.barrier()

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the world: waits for the others after a clean run, leaves word of ``error`` otherwise. Idempotent."""
        if self.closed:
            return
        self.closed = True
        try:
            if self.watch is not None and error is not None:
                self.watch.failed(error)
            elif self.size > 1:
                self.agreement.sum({"close": 0.0}, "closing the world")
        finally:
            self._stop_watch()
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()

    def _stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()

    # ---- groups ----------------------------------------------------------------------------------------------

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of ``ranks``; only they take part in making it. The world's own is used again, since a
        second group of all ranks would cost memory and would not have the world's timeout."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), timeout=timedelta(seconds=self.timeout_s), use_local_synchronization=True
            )
        return self._groups[ranks]

    def _make_mesh(self) -> DeviceMesh:
        names = ("dp_replicate", "dp_shard")
        grid = torch.arange(self.size).view([self.layout.degrees[name] for name in names])
        groups = [self._group(self.layout.ranks_along(name, self.rank)) for name in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=names)

    def _make_axis(self, name: str) -> Axis:
        ranks = self.layout.ranks_along(name, self.rank)
        group = self._group(ranks) if len(ranks) > 1 else None
        return Axis(name, ranks.index(self.rank), ranks, group)


def _env_of_group() -> Env:
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Env("process group", rank, size, local_rank, local_size)


def _device(device: str | torch.device | None, env: Env) -> torch.device:
    wanted = (
        torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if wanted.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(wanted)!r}", why="only cpu and cuda are tested", fix='use "cpu" or "cuda"')
    if wanted.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = wanted.index if wanted.index is not None else env.local_rank
    if index >= count:
        raise ConfigError(
            f"device cuda:{index} for local rank {env.local_rank}",
            why=f"this node shows {count} CUDA device{'s' if count != 1 else ''}",
            fix=f"start at most {count} ranks per node, or use device='cpu'" if count else "use device='cpu'",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _start_group(env: Env, backend: str | None, device: torch.device, timeout_s: float) -> None:
    backend = backend or ("cpu:gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo")
    timeout = timedelta(seconds=timeout_s)
    device_id = device if "nccl" in backend else None
    try:
        if env.source == "single":
            store = dist.HashStore()  # no port: many worlds of one can live on a machine
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
            return
        dist.init_process_group(
            backend,
            init_method=f"tcp://{env.master_addr}:{env.master_port}" if env.source == "slurm" else "env://",
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            device_id=device_id,
        )
    except ValueError as error:
        raise ConfigError(
            f"backend={backend!r}", why=str(error).splitlines()[0], fix='use "gloo", "nccl" or "cuda:nccl,cpu:gloo"'
        ) from error


def _has_cpu_backend() -> bool:
    return "cpu:" in dist.get_backend_config()


def _set_threads(local_world_size: int) -> None:
    """Divides the cores among the ranks of a node, unless the user has said how many threads a rank takes."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
