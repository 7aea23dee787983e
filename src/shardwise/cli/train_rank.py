"""What each rank of ``shardwise train`` runs: opens the world, trains, proves. Started by the launcher or by torchrun."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.launch import send_event

if TYPE_CHECKING:
    from shardwise.config.schema import RunConfig

__all__ = ["main", "run_rank"]


def main(config: bytes) -> dict[str, Any]:
    """The target of the launcher; ``config`` is a run as JSON. Events go to the launching process."""
    import msgspec

    from shardwise.config.schema import RunConfig

    return run_rank(msgspec.json.decode(config, type=RunConfig), send_event)


def run_rank(config: "RunConfig", send: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Trains and proves in this process, one rank among those its environment names. All ranks must call it.

    Args:
        config: a whole run, the same on every rank.
        send: takes events; called on rank 0 only, once the world is open.

    Returns:
        what :func:`shardwise.train.job.train` returns, with ``seconds`` and ``proof``.
    """
    from shardwise.cli.train_proof import prove
    from shardwise.train.job import train
    from shardwise.world import init

    device = None if config.launch.device == "auto" else config.launch.device
    with init(config.parallel.layout, device=device, timeout_s=config.train.timeout_s, seed=config.train.seed) as world:

        def emit(kind: str, **fields: Any) -> None:
            if world.is_main:
                send({"kind": kind, **fields})

        emit("world", device=_device_text(world), layout=str(world.layout), why=_layout_text(world.layout))
        start = time.perf_counter()
        result = train(config, world, emit)
        result["seconds"] = time.perf_counter() - start
        emit("phase", text="proving: the same 3 steps in one plain process")
        result["proof"] = prove(config, world)
    return result


def _device_text(world: Any) -> str:
    if world.device.type == "cpu":
        import torch

        return f"cpu, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank, over gloo"
    import torch

    return f"{torch.cuda.get_device_name(world.device)}, over nccl"


def _layout_text(layout: Any) -> str:
    """Why a layout saves what it saves, in words."""
    shard, copies = layout.dp_shard, layout.dp_replicate
    parts = []
    if shard > 1:
        parts.append(f"parameters, gradients and optimizer state are cut over {shard} ranks")
    if copies > 1:
        parts.append(f"{copies} {'groups hold a copy each' if shard > 1 else 'ranks hold a whole copy each'}")
    return ", and ".join(parts) or "one rank holds everything"
