"""The process groups of a world: its device, its backend, and its rendezvous."""

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise._torch.groups import default_store, forget_failed_group, group_timeout_s, one_gloo_thread
from shardwise.errors import ConfigError, RankError, first_line
from shardwise.launch.environment import given_in, number
from shardwise.world.env import Env
from shardwise.world.liveness import Watch

_FIX_BACKEND = 'use "gloo", "nccl" or "cuda:nccl,cpu:gloo"'
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_store: tuple[tuple[str, int], dist.Store] | None = None  # of the last rendezvous: see _join


def env_of_group() -> Env:
    """This process's ranks, from a process group that exists already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = given_in(None, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local_rank = number("LOCAL_RANK", given.get("LOCAL_RANK", str(rank)))
    local_size = number("LOCAL_WORLD_SIZE", given.get("LOCAL_WORLD_SIZE", str(size)))
    return Env("process group", rank, size, local_rank, local_size)


def choose_device(device: str | torch.device | None, env: Env) -> torch.device:
    """The device this rank computes on; a CUDA device is made torch's current device."""
    text = str(device) if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device={text!r}", why="only cpu and cuda are tested", fix='use "cpu" or "cuda"')
    try:
        wanted = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"device={text!r}", why=first_line(error), fix='use "cpu" or "cuda:0"') from error
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


def check_group(backend: str | None, device: torch.device, timeout_s: float | None) -> None:
    """Refuses options that differ from those of the process group that exists already."""
    has = dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(","))
    words = ", ".join(f"{kind}:{name}" for kind, name in has.items())
    wanted = [part.partition(":") for part in (backend or "").split(",") if part]
    for kind, colon, name in wanted:
        if (has.get(kind) != name) if colon else (has.get(device.type) != kind):
            raise ConfigError(
                f"backend={backend!r} with a process group that exists already",
                why=f"init_process_group was called before sw.init, and the group's backend is {words}",
                fix="leave backend out, or give it to init_process_group; or leave that call out: sw.init starts the group",
            )
    if device.type not in has:
        raise ConfigError(
            f"device={device.type!r} with a process group that exists already",
            why=f"init_process_group was called before sw.init, and the group has no backend for it: {words}",
            fix='call init_process_group("cuda:nccl,cpu:gloo"), or leave it out: sw.init starts the group',
        )
    held = group_timeout_s(device)
    if timeout_s is not None and held is not None and abs(held - timeout_s) > 0.01:
        raise ConfigError(
            f"timeout_s={timeout_s:g} with a process group that exists already",
            why=f"init_process_group was called before sw.init, and its collectives wait for {held:g} s",
            fix=f"leave timeout_s out, or give it to that call: init_process_group(..., timeout=timedelta(seconds={timeout_s:g}))",
        )


def chosen_backend(backend: str | None) -> str | None:
    """The backend that was asked for, by an argument or the environment."""
    return backend or os.environ.get("TORCH_DISTRIBUTED_BACKEND") or None


def start_group(env: Env, backend: str | None, device: torch.device, timeout_s: float) -> None:
    """Starts torch's default process group; leaves nothing behind if that fails.

    Raises:
        ConfigError: a backend this torch does not have, or that does not suit the device.
        RankError: the peers cannot be reached at the address.
    """
    named = chosen_backend(backend)
    chosen = named or ("gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo")
    timeout = timedelta(seconds=timeout_s)
    where = f"backend={chosen!r}{'' if backend or not named else ' from TORCH_DISTRIBUTED_BACKEND'} on {device.type}"
    unknown = [name for part in chosen.split(",") if not dist.is_backend_available(name := part.rpartition(":")[2])]
    if unknown:
        raise ConfigError(where, why=f"this torch has no {', '.join(unknown)}", fix=_FIX_BACKEND)
    try:
        # A world of one process uses no port, so that many can run on one machine.
        store = dist.HashStore() if env.source in ("single", "imagined") else _join(env, timeout)
        with _without_flight_recorder() if chosen == "gloo" else contextlib.nullcontext(), one_gloo_thread():
            dist.init_process_group(
                chosen,
                store=store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=timeout,
                device_id=device if "nccl" in chosen else None,
            )
    except (ValueError, RuntimeError) as error:
        why = first_line(error, type(error).__name__)
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            raise RankError(
                f"rank {env.rank} of {env.world_size} could not meet the others at {env.master_addr}:{env.master_port}",
                why=why,
                fix="look whether rank 0 runs there and every rank was started; or take another MASTER_PORT",
            ) from error
        named = os.environ.get("GLOO_SOCKET_IFNAME", "")
        here = [name for _, name in socket.if_nameindex()]
        missing = [name for name in named.split(",") if name not in here] if named else []
        if missing and "gloo" in chosen:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={named!r}",
                why=f"this machine has no network interface {', '.join(map(repr, missing))}",
                fix=f"name one of {', '.join(here)}, or leave the variable out",
            ) from error
        raise ConfigError(where, why=why, fix=_FIX_BACKEND) from error
    finally:
        if not dist.is_initialized():
            forget_failed_group()


def new_group(ranks: Sequence[int] | None, timeout_s: float, backend: str | None = None) -> Any:
    """A further process group, of ``ranks``, which alone call this, or (None) of all."""
    timeout = timedelta(seconds=timeout_s)
    with one_gloo_thread():
        if ranks is None:
            return dist.new_group(backend=backend, timeout=timeout)
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


@contextlib.contextmanager
def _without_flight_recorder() -> Iterator[None]:
    """Context manager: torch creates its flight recorder of collectives with size 0, unless the environment sets a
    size.

    It would keep a traceback for each of the last 2,000 collectives: small pieces of memory among the large buffers of
    a step. Those buffers then do not fit where they were before, so each step takes new memory from the system, and the
    process grows until the recorder is full. The world's own watch reports where ranks are.
    """
    if any(name in os.environ for name in _FLIGHT_RECORDER):
        yield
        return
    os.environ[_FLIGHT_RECORDER[0]] = "0"
    try:
        yield
    finally:
        del os.environ[_FLIGHT_RECORDER[0]]


def _join(env: Env, timeout: timedelta) -> dist.Store:
    """A store that the ranks share, with keys of this world only.

    torch uses the same keys for each group of a process, so a second one on the store of a launcher would read the
    first one's addresses. Here each world has its own number. The connection is kept for the next world: if rank 0
    serves the store, it would otherwise shut it down just when a faster peer connects again.
    """
    global _store
    address = (env.master_addr, env.master_port)
    if _store is not None and _store[0] == address:
        with contextlib.suppress(RuntimeError):  # its process has ended: do a new rendezvous
            return _with_own_keys(_store[1], env.rank)
    _store = None
    url = "env://" if env.source == "torchrun" else f"tcp://{env.master_addr}:{env.master_port}"
    found, _, _ = next(rendezvous(url, env.rank, env.world_size, timeout=timeout))
    _store = (address, found)
    return _with_own_keys(found, env.rank)


def _with_own_keys(store: dist.Store, rank: int) -> dist.Store:
    number = store.add(f"shardwise/worlds/{rank}", 1)  # how many worlds this rank has opened: the same on every rank
    return dist.PrefixStore(f"shardwise/{number}", store)


def start_watch(env: Env, timeout_s: float) -> Watch:
    """Starts this rank's Watch over the group that was just started, or found ("process group")."""
    group = weakref.ref(dist.group.WORLD)
    served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or env.source == "process group"
    return Watch(
        env.rank,
        env.world_size,
        store=_with_own_keys(default_store(), env.rank),
        timeout_s=timeout_s,
        master=env.master_addr or os.environ.get("MASTER_ADDR") or socket.gethostname(),
        is_one_host=env.local_world_size == env.world_size,
        keeper=None if served_by_launcher else 0,
        is_current=lambda: dist.is_initialized() and dist.group.WORLD is group(),
    )


def host_group_of(group: Any, device: torch.device, timeout_s: float) -> tuple[Any, torch.device]:
    """A group of all ranks for numbers of the host, and the device that they are sent from: ``group`` itself where it has a backend for the
    CPU. Next to one of NCCL alone it is a group of gloo, as each number that goes through the GPU makes the host wait for it; all ranks make
    it together."""
    if "cpu:" in dist.get_backend_config(group):
        return group, torch.device("cpu")
    if is_fake_group() or not dist.is_gloo_available():
        return group, device
    return new_group(None, timeout_s, "gloo"), torch.device("cpu")


def message_device(device: torch.device) -> torch.device:
    """The device of tensors that one rank sends to another: ``device``, or the CPU where the group's backend for it is
    gloo, which cannot send CUDA tensors (it ends the process)."""
    backends = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
    return torch.device("cpu") if backends.get(device.type) == "gloo" else device


def is_fake_group() -> bool:
    """Whether the group is torch's fake one, whose collectives do nothing: there are no peers to agree with."""
    return dist.get_backend() == "fake"
