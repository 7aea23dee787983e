"""Process groups: their store, how long they wait, one that failed to start."""

import torch
import torch.distributed as dist

__all__ = ["connection_to", "default_store", "forget_failed_group", "group_timeout_s"]


def default_store() -> dist.Store:
    """The store of the default process group: a peer can leave word there while its main thread is blocked."""
    return dist.distributed_c10d._get_default_store()


def group_timeout_s(device: torch.device) -> float | None:
    """Seconds that collectives of the default group wait; None where this torch, or the backend, does not say."""
    try:
        return float(dist.group.WORLD._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def connection_to(store: dist.Store) -> dist.Store:
    """A connection of its own to the same store: a read waits for its answer, and others would wait behind it."""
    return store.clone()  # type: ignore[attr-defined] - missing in torch's type stubs


def forget_failed_group() -> None:
    """After an ``init_process_group`` that failed: torch has counted the group that never was, and its next one would look
    for its peers under another name than theirs."""
    dist.distributed_c10d._world.group_count = 0
