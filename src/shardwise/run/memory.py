"""Memory of one rank: of its process, and of its shards of parameters, gradients and optimizer state."""

import math
import resource
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.model.pytrees import leaves_of
from shardwise.parallel import runtime_of


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of one rank in bytes. ``rss`` is that of the whole process now; the next three are of the rank's shards.

    ``cuda_peak`` is the most that the CUDA allocator has allocated so far, 0 without a device.
    """

    rss: int
    params: int
    grads: int
    optim: int
    cuda_peak: int

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state together, which sharding divides."""
        return self.params + self.grads + self.optim

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "state": self.state}


def memory_of(model: nn.Module, optim: torch.optim.Optimizer | None = None) -> MemoryUse:
    """Measures the memory of this rank, without communication. Shared (tied) tensors count once.

    Gradients count if they exist: after ``zero_grad`` there are none. To see the most that a step holds, call it
    between backward and ``zero_grad``.
    """
    params = {id(p): p for p in model.parameters()}.values()
    grads = [p.grad for p in params if p.grad is not None]
    state = [] if optim is None else _state_of(optim)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0
    return MemoryUse(
        rss=rss_bytes(),
        params=sum(map(local_bytes, params)),
        grads=sum(map(local_bytes, grads)),
        optim=sum(map(local_bytes, state)),
        cuda_peak=peak,
    )


def state_bytes(model: nn.Module, optim: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer state, on this rank and in one process that holds all; no
    communication.

    Call it after the first step, when the optimizer has its state. A gradient is counted for every trained parameter,
    as during a step. The bytes of one process are computed from the full shapes, with as much optimizer state per
    parameter as this rank has; numbers beside it, such as a step count, are as many on each rank.
    """
    runtime = runtime_of(model)
    mine, whole, frozen, whole_frozen = 0, 0, 0, 0
    for name, param in runtime.parameters.items():
        full = math.prod(runtime.recipe.params[name].shape) * param.element_size()
        if param.requires_grad:
            mine, whole = mine + local_bytes(param), whole + full
        else:
            frozen, whole_frozen = frozen + local_bytes(param), whole_frozen + full
    state = _state_of(optim)
    numbers = sum(local_bytes(value) for value in state if not value.dim())
    divided = sum(map(local_bytes, state)) - numbers
    here = 2 * mine + divided + numbers + frozen
    alone = 2 * whole + round(divided * whole / max(1, mine)) + numbers + whole_frozen
    return here, alone


def _state_of(optim: torch.optim.Optimizer) -> list[Tensor]:
    return [value for value in leaves_of(list(optim.state.values())) if isinstance(value, Tensor)]


def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on this rank: of its local shard, if it is sharded."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def rss_bytes() -> int:
    """Resident memory of this process in bytes: the current one if the system reports it, else the peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
