"""Process groups: how they are made over gloo, their store, their timeout, and cleaning up after one that failed to
start."""

import contextlib
import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Context manager: gloo process groups that are made within it have one thread for their collectives.

    torch gives each group two. When a collective ends, its thread writes the collective's name into a string that both
    share, without a lock. A name of more than 15 letters (``ALLGATHER_COALESCED``: every functional all-gather, so every
    one of a DTensor) lies on the heap and is freed by the next name, while the other thread may still write there: into
    memory that by then holds something else. A size read ``4851859238085741572``, the letters of ``ALLREDUCE``, in a
    backward pass under load. One thread runs the collectives in the order they were started, as all ranks must anyway.
    """
    if not dist.is_gloo_available():
        yield
        return
    module: Any = dist.distributed_c10d
    module.ProcessGroupGloo, original = _OneThread, module.ProcessGroupGloo
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


class _IsAnyGloo(type):
    """The type of :class:`_OneThread`, of which every gloo group is an instance: torch asks whether a group is one."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _OneThread(metaclass=_IsAnyGloo):
    """Called as ``ProcessGroupGloo``; makes one that has a single thread for its collectives."""

    def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._timeout, options._threads = timeout, 1
        for name, value in more.items():  # enable_reconfigure, from torch 2.14 on
            setattr(options, name, value)
        return gloo(store, rank, size, options)


@functools.cache
def _gloo_devices(_process: int, interfaces: str) -> list[Any]:
    """What gloo sends and receives by: a listening socket and a thread each, on the network interfaces that torch takes.

    All groups of a process share them, and they stay: gloo finds the address of a new one by the host's name, which takes
    some 10 ms for each group, and seconds where the name server is slow. So a process keeps the address that it had when
    it made its first group. A forked process makes its own, as threads are not copied, and keeps those it was forked with,
    which could not be ended without their threads.
    """
    gloo: Any = dist.ProcessGroupGloo
    with _threads_that_wait_their_turn():
        if len(interfaces) > 1:
            return [gloo.create_device(interface=each) for each in interfaces.split(",")]
        return [gloo.create_default_device()]


@contextlib.contextmanager
def _threads_that_wait_their_turn() -> Iterator[None]:
    """Context manager: threads that the calling one starts within it do not take its core when they wake up.

    gloo's thread tries the lock of a connection again and again while another thread has it. Woken at once, it takes the
    core of the very thread that has the lock, and tries until its time slice ends: half of a small model's time in the
    kernel. Linux wakes threads of the policy ``SCHED_BATCH`` without that.
    """
    changed = False
    with contextlib.suppress(OSError, AttributeError):  # a container may forbid it; other systems do not have it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen another policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if changed:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def default_store() -> dist.Store:
    """The store of the default process group: a rank can leave a message there while its main thread is blocked."""
    return dist.distributed_c10d._get_default_store()


def group_timeout_s(device: torch.device) -> float | None:
    """Timeout in seconds of collectives of the default group; None if this torch, or the backend, does not report
    it."""
    try:
        return float(dist.group.WORLD._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def connection_to(store: dist.Store) -> dist.Store:
    """A second connection to the same store: a read blocks its connection until the answer arrives."""
    return store.clone()  # type: ignore[attr-defined] - missing in torch's type stubs


def forget_failed_group() -> None:
    """Resets torch's group counter after an ``init_process_group`` that failed: torch has counted the failed group, so
    its next one would look for its peers under another name than theirs."""
    dist.distributed_c10d._world.group_count = 0
