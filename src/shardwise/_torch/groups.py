"""Process groups: their store, their timeout, and cleaning up after one that failed to start."""

import torch
import torch.distributed as dist

__all__ = ["connection_to", "default_store", "forget_failed_group", "group_timeout_s"]


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
