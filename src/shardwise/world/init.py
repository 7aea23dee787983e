"""``sw.init``: reads the environment and builds a :class:`World` of ranks on a mesh."""

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.dtensor import forget_meshes
from shardwise._torch.version import fake_groups_compute
from shardwise.errors import ConfigError, RankError, ShardwiseError, Stopped, UnsupportedError, UsageError
from shardwise.launch.failure import is_lost_peer
from shardwise.layout import ALL_AXES, AXES, DERIVED_AXES, GIVEN_AXES, Layout, layout_of, num_ranks_of
from shardwise.world.agreement import Agreement
from shardwise.world.axis import Axis
from shardwise.world.env import Env, imagined_env, ranks_per_node, read_env
from shardwise.world.exit_notice import owe_exit_notice, owe_no_notice
from shardwise.world.fingerprint import agree_on, package_versions
from shardwise.world.group import (
    check_group,
    choose_device,
    chosen_backend,
    env_of_group,
    host_group_of,
    is_fake_group,
    message_device,
    new_group,
    start_group,
    start_watch,
)
from shardwise.world.liveness import Watch
from shardwise.world.rng import seed_all, warn_of_lost_seed
from shardwise.world.signals import StopRequest
from shardwise.world.termination import listen, stop_listening
from shardwise.world.threads import set_threads, threads_of_offloaded_step
from shardwise.world.uncaught import note_first_rank, show_before_world


def init(
    layout: str | Layout | Mapping[str, int | str] = "dp_shard=-1",
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int | None = None,
    axes: Collection[str] = GIVEN_AXES,
) -> "World":
    """:func:`shardwise.init` with ``axes``: those that some technique uses; a degree above 1 on another is refused."""
    existing = dist.is_initialized()
    if existing:
        env = env_of_group()
    elif chosen_backend(backend) == "fake":
        env = imagined_env(num_ranks_of(layout))
    else:
        env = read_env()
    show_before_world(env)
    resolved = layout_of(layout, env.world_size, lambda: ranks_per_node(env), axes)
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s}", why="it is a number of seconds above 0", fix="use timeout_s=600")
    chosen = choose_device(device, env)
    if existing:
        check_group(backend, chosen, timeout_s)
    timeout_s = 600.0 if timeout_s is None else timeout_s
    if not existing:
        start_group(env, backend, chosen, timeout_s)
    try:
        if seed is None and env.rank == 0:
            warn_of_lost_seed(env.world_size)
        return World(resolved, env, chosen, timeout_s=timeout_s, seed=seed or 0, owns_group=not existing)
    except BaseException:
        if not existing and dist.is_initialized():
            dist.destroy_process_group()
        raise


_OTHER_WORDS = {  # name in another library -> name here
    "world_size": "size",
    "num_processes": "size",
    "local_world_size": "local_size",
    "is_master": "is_main",
    "is_main_process": "is_main",
    "is_global_zero": "is_main",
    "is_local_master": "is_local_main",
    "is_local_main_process": "is_local_main",
    "default_device": "device",
    "process_group": "group",
    "device_mesh": "mesh",
    "all_reduce": "reduce(tensor, op)",
    "all_gather": 'axis("dp").gather(tensor, dim) for one tensor, joined along dim; world.gather(tensor) for a list of them',
    "all_gather_to_list": "gather(tensor)",
    "all_gather_objects": "gather(value)",
    "all_gather_object": "gather(value)",
    "gather_object": "gather(value)",
    "broadcast_objects": "broadcast(value, src)",
    "broadcast_object": "broadcast(value, src)",
    "wait_for_everyone": "barrier()",
    "main_process_first": "leader_first()",
    "local_main_process_first": "leader_first(local=True)",
    "dp_rank": 'axis("dp").rank',
    "dp_world_size": 'axis("dp").size',
    "dp_group": 'axis("dp").group',
}


class World:
    """The ranks of a run: this rank's position and device, and collectives over all ranks or over a mesh axis.

    A context manager: leaving it closes it, after an exception too. Build one with :func:`init`.

    Attributes:
        layout: the :class:`~shardwise.layout.Layout` over the ranks.
        rank, size, local_rank, local_size: this process's rank and the number of ranks, overall and on its node.
        is_main: True on rank 0.
        device: the device this rank computes on.
        message_device: the device of tensors that one rank sends to another.
        mesh: the root DeviceMesh: ``dp_replicate``, ``dp_shard``, and every other axis of a degree above 1, outer to
            inner.
        counts: whether what this rank computes counts in sums of the loss over all ranks; of ranks that compute the same
            only the first counts.
        counts_data: whether what this rank reads counts in sums over all ranks (tokens, labels); of ranks that read the same
            samples only the first counts.
        seed: seed of every random stream of the run.
        agreement: the exchanges, two per window, by which all ranks agree.
        stop: whether the ranks were asked to stop, as of the first exchange of a window.
        step_threads: threads for the optimizer step on offloaded parameters; None: as many as everything else has.
        before_close: methods called, last added first, before the world is left in order: what uses the world ends its
            work in them.
    """

    def __init__(
        self, layout: Layout, env: Env, device: torch.device, *, timeout_s: float, seed: int, owns_group: bool
    ):
        self.layout, self.device, self.seed, self.timeout_s = layout, device, seed, timeout_s
        self.rank, self.size, self.local_rank = env.rank, env.world_size, env.local_rank
        self.source = env.source
        self.local_size = env.local_world_size
        self.owns_group, self.closed = owns_group, False
        self.stop = StopRequest()
        self.before_close: list[weakref.WeakMethod[Callable[[], object]]] = []
        self._gradients: Any = None
        # With gloo the mesh uses another group than the exchanges. If one rank is in an all-gather and another in an
        # exchange, gloo aborts both if they use one group; with two groups they get an error that says so.
        self.message_device = message_device(device)
        everyone = tuple(range(self.size))
        is_shared = self.size == 1 or self.message_device.type != "cpu" or is_fake_group()
        self._groups: dict[tuple[int, ...], Any] = {everyone: dist.group.WORLD} if is_shared else {}
        self._resharding: dict[int, DeviceMesh] = {}
        self._sharding: dict[str, DeviceMesh] = {}  # of axes other than dp_shard
        self.watch: Watch | None = None
        is_fake = is_fake_group()
        if self.size > 1 and not is_fake:
            self.watch = start_watch(env, timeout_s)
            listen(self.watch)
        try:
            host_group, host = host_group_of(dist.group.WORLD, device, timeout_s)
            self.agreement = Agreement(
                self.size,
                self.rank,
                group=dist.group.WORLD,
                host_group=host_group,
                device=host,
                timeout_s=timeout_s,
                watch=self.watch,
                is_fake=is_fake,
            )
            facts = {"layout": str(layout), "seed": seed, "versions": package_versions()}
            agree_on(self.agreement, facts, what="the ranks' start-up", fix="start every rank with the same command")
            self.mesh = self._make_mesh()
            self._axes = {name: self._make_axis(name) for name in ALL_AXES}
            here = layout.coord(self.rank)
            self.counts, self.counts_data = (
                not any(here.index(axis) for axis in AXES if axis not in DERIVED_AXES[of]) for of in ("loss", "dp")
            )
        except BaseException:
            self._stop_watch()
            raise
        set_threads(self.local_size)
        self.step_threads = threads_of_offloaded_step(self.local_size)
        seed_all(seed, self.rank)
        owe_exit_notice(self)

    def __repr__(self) -> str:
        imagined = ', backend="fake"' if self.is_imagined else ""
        return f"World(layout={str(self.layout)!r}, rank={self.rank}, size={self.size}, device={str(self.device)!r}{imagined})"

    @property
    def is_imagined(self) -> bool:
        """Whether this process stands for a rank of many, and there are no others (backend ``"fake"``)."""
        return self.size > 1 and self.agreement.is_alone

    def refuse_unwritten(self, what: str) -> None:
        """Raises UnsupportedError for ``what``, which would compute with memory that no rank has written."""
        if self.is_imagined and not fake_groups_compute():
            raise UnsupportedError(
                f'{what} with backend="fake" on torch {torch.__version__}',
                why="before torch 2.13 its collectives write nothing: what is gathered would be whatever the memory held",
                fix="take torch 2.13 or newer; what a rank holds, and sw.describe(model), can be looked at here too",
            )

    def refuse_imagined(self, what: str) -> None:
        """Raises UsageError for ``what``, which would write a model of which the other ranks' parts do not exist."""
        if self.is_imagined:
            raise UsageError(
                f'{what} with backend="fake"',
                why=f"{self.size - 1} of {self.size} ranks do not exist: their parts would be missing, and what a real run has written "
                "there would be replaced or removed",
                fix="save in a run of real ranks, torchrun or `shardwise train`; sw.describe(model) shows what a rank would hold",
            )

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        fault = None if isinstance(error, Stopped) else error  # Stopped is raised by all ranks, in order
        lost = None if fault is None else self.lost_peer(fault)
        note_first_rank(self.watch, lost or fault)
        self.close(lost or fault)
        if lost is not None:
            raise lost from error

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on the first rank of each node, for what a node needs once (a download, a file in its own /tmp)."""
        return self.local_rank == 0

    @property
    def group(self) -> Any:
        """torch's process group of all ranks, for calls of ``torch.distributed``. On the CPU it is not the group that
        Shardwise's own exchanges use."""
        return self._group(tuple(range(self.size)))

    def axis(self, name: str) -> Axis:
        """The :class:`Axis` of a mesh axis (``dp_shard``), a derived one (``dp``, ``fsdp``, ``loss``) or a carved one (``ep``,
        ``efsdp``)."""
        if name not in self._axes:
            raise UsageError(f"axis({name!r})", why="there is no such axis", fix=f"use one of {', '.join(self._axes)}")
        return self._axes[name]

    def barrier(self) -> None:
        """Waits for all ranks. All ranks must call it."""
        self.agreement.sum({"barrier": 0.0}, "a barrier")

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank ``src``'s ``value`` on every rank: a tensor as a new tensor on this rank's device, another object by
        pickling (peers are trusted). All ranks must call it; the ``value`` of the others is ignored."""
        if not 0 <= src < self.size:
            raise UsageError(f"broadcast(src={src})", why=f"ranks are 0 to {self.size - 1}", fix="use one of them")
        self.agreement.check_open("a broadcast")
        if self.agreement.is_alone:
            return value
        is_tensor = isinstance(value, Tensor)
        box = [(is_tensor, (value.shape, value.dtype) if is_tensor else value)]
        dist.broadcast_object_list(box, src=src)
        is_tensor, content = box[0]
        if not is_tensor:
            return content
        shape, dtype = content
        if self.rank == src:
            result = value.detach().to(self.device).clone(memory_format=torch.contiguous_format)
        else:
            result = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(result, src=src)
        return result

    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """All-reduces ``tensor`` over all ranks by "sum", "mean", "max", "min" or "product" into a new tensor of its
        shape. All ranks must call it."""
        self.agreement.check_open("a reduction")
        return Axis("world", self.rank, tuple(range(self.size)), self.group).reduce(tensor, op)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank: objects by pickling (peers are trusted), tensors of any
        shapes on this rank's device. All ranks must call it."""
        sent = value.detach().cpu() if isinstance(value, Tensor) else value
        found = self.agreement.gather(sent, "a gather of objects")
        return [each.to(self.device) if isinstance(each, Tensor) else each for each in found]

    @contextlib.contextmanager
    def leader_first(self, *, local: bool = False) -> Iterator[bool]:
        """Runs the block on rank 0 (``local=True``: local rank 0 of each node) before the others; yields whether this
        rank is the leader. All ranks must call it."""
        leads = (self.local_rank if local else self.rank) == 0
        if not leads:
            self.barrier()
        yield leads
        if leads:
            self.barrier()

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the world: waits for the others after a clean run, else notifies them of ``error``. Idempotent."""
        if self.closed:
            return
        if error is None:
            try:
                while self.before_close:
                    end = self.before_close.pop()()
                    if end is not None:
                        end()
            except Stopped:
                self.close()
                raise
            except BaseException as problem:
                self.close(problem)
                raise
        self.closed = True
        try:
            if self.watch is not None and error is not None:
                self.watch.failed(error)
            elif self.watch is not None:
                self._leave(self.watch)
        finally:
            self._end_group()

    def lost_peer(self, error: BaseException) -> RankError | None:
        """The RankError for an error that torch raised because one of its own collectives lost a peer: in a forward or
        backward within ``sw.accumulate`` no other code checks. None for any other error."""
        if self.watch is None or self.closed or isinstance(error, ShardwiseError) or not is_lost_peer(error):
            return None
        return self.agreement.explain(error, self.watch.place)

    def _leave(self, watch: Watch) -> None:
        """Leaves by the store, not by a collective, which could pair with another one of a rank inside a window."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no peer may still be reading from this rank when it ends
        try:
            watch.leave(0.9 * self.timeout_s)
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise self.agreement.explain(error, "at closing the world") from error

    def _end_group(self) -> None:
        self.agreement.is_open = False
        owe_no_notice(self)
        self._stop_watch()
        self._gradients = None  # a group's threads end with the last reference to it
        forget_meshes()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _stop_watch(self) -> None:
        if self.watch is not None:
            stop_listening(self.watch)
            self.watch.stop()

    if not TYPE_CHECKING:  # else a type checker would accept every attribute name

        def __getattr__(self, name: str) -> Any:
            other = _OTHER_WORDS.get(name)
            raise AttributeError(
                f"World has no attribute {name!r}" + ("" if other is None else f": here it is world.{other}"),
                name=name,
                obj=self,
            )

    # ---- groups ----------------------------------------------------------------------------------------------

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of ``ranks``; only they take part in making it. On accelerators the world's own group is
        used for all ranks, since a second group would use device memory."""
        if ranks not in self._groups:
            self._groups[ranks] = new_group(ranks, self.timeout_s)
        return self._groups[ranks]

    def gradient_group(self) -> Any:
        """A group of the ranks whose gradients are summed, for reductions that overlap with others: ranks may start them at
        different moments, and collectives of one group are matched in the order they are started. All ranks must call it
        alike; None for one rank."""
        ranks = self.axis("loss").ranks
        if len(ranks) > 1 and self._gradients is None:
            self._gradients = new_group(ranks, self.timeout_s)
        return self._gradients

    def _make_mesh(self) -> DeviceMesh:
        names = tuple(axis for axis in AXES if axis in DERIVED_AXES["dp"] or self.layout.degrees[axis] > 1)
        grid = torch.arange(self.size).view([self.layout.degrees[name] for name in names])
        groups = [self._group(self.layout.ranks_along(name, self.rank)) for name in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=names)

    def sharding_mesh(self, axis: str = "fsdp") -> DeviceMesh:
        """The mesh over which parameters are cut along ``axis``, and whose ranks sum their gradients: replicas of shard groups,
        or the only shard group, which needs no sum over replicas.

        Args:
            axis: ``"fsdp"``; or ``"efsdp"``, for parameters that are cut over ``ep`` too.
        """
        if axis == "fsdp" and self.axis(axis).size == self.layout.dp_shard:
            return self._data_mesh
        if axis not in self._sharding:
            over, copies = self.axis(axis), self.axis("dp_replicate")
            names = ("dp_replicate", axis) if copies.size > 1 else (axis,)
            grid = torch.tensor([self.layout.ranks_along(axis, rank) for rank in copies.ranks])
            groups = [self._group(self.layout.ranks_along(name, self.rank)) for name in names]
            self._sharding[axis] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                self.device.type,
                mesh=grid if len(groups) > 1 else list(over.ranks),
                mesh_dim_names=names,
            )
        return self._sharding[axis]

    @cached_property
    def _data_mesh(self) -> DeviceMesh:
        """The axes of ``mesh`` over which data is parallel: to take them from it lasts as long as a step of a small model."""
        names = DERIVED_AXES["dp"] if self.layout.dp_replicate > 1 else ("dp_shard",)
        return self.mesh if self.mesh.mesh_dim_names == names else self.mesh[names]

    def root_meshes(self) -> list[DeviceMesh]:
        """The meshes over which parameters are cut are these, or parts of them."""
        return [self.mesh, *self._sharding.values()]

    def resharding_mesh(self, size: int) -> DeviceMesh:
        """The ranks of :meth:`sharding_mesh` in rows of ``size`` neighbours, over which ``reshard_after_forward=size``
        shards parameters between forward and backward. One mesh for all units: torch would make new groups for each
        unit, and each group has threads (with NCCL, device memory). All ranks must call it alike."""
        if size not in self._resharding:
            grid = torch.tensor(self.axis("loss").ranks).view(-1, size)
            row, column = (grid == self.rank).nonzero()[0].tolist()
            groups = [self._group(tuple(grid[:, column].tolist())), self._group(tuple(grid[row].tolist()))]
            names = ("rows", "neighbours")
            self._resharding[size] = DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=names)
        return self._resharding[size]

    def _make_axis(self, name: str) -> Axis:
        ranks = self.layout.ranks_along(name, self.rank)
        group = self._group(ranks) if len(ranks) > 1 else None
        return Axis(name, ranks.index(self.rank), ranks, group, lambda: None if self.size == 1 else self._group(ranks))
