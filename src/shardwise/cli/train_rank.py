"""The program of each rank of ``shardwise train``: opens the world, trains, compares with one process. Started by the
launcher or by torchrun."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.launch import send_event
from shardwise.launch.environment import rank_and_size
from shardwise.launch.imports import import_frozen

if TYPE_CHECKING:
    from shardwise.run.config import RunConfig
    from shardwise.world import World


def main(config: bytes) -> dict[str, Any]:
    """What the launcher calls on each rank. ``config``: the configuration as JSON. Sends events to the launcher."""
    import msgspec

    from shardwise.run.config import RunConfig

    return run_rank(msgspec.json.decode(config, type=RunConfig), send_event)


def run_rank(config: "RunConfig", send: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Trains and compares with one process, on this rank (as its environment says). All ranks must call it.

    Args:
        config: the configuration of the run, the same on every rank.
        send: called with events, on rank 0 only, once the world is open.

    Returns:
        what :func:`shardwise.run.job.train` returns, with ``seconds`` and ``proof``.
    """
    with process_named(name_of_rank(*rank_and_size(), "train")):  # before torch is loaded, which takes seconds
        return _run(config, send)


def _run(config: "RunConfig", send: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    import_frozen("shardwise.run.job")

    from shardwise.cli.train_proof import prove
    from shardwise.run.job import train
    from shardwise.run.positions_trial import check_positions_of_model
    from shardwise.world import init

    if rank_and_size()[0] == 0:  # the others wait for it, or end with it
        check_positions_of_model(config)
    device = None if config.launch.device == "auto" else config.launch.device
    with init(config.parallel.layout, device=device, timeout_s=config.train.timeout_s, seed=config.train.seed) as world:
        _agree_on_config(config, world)

        def emit(kind: str, **fields: Any) -> None:
            if world.is_main:
                send({"kind": kind, **fields})

        emit("world", device=_device_text(world), layout=str(world.layout), why=_layout_text(world.layout))
        start = time.perf_counter()
        result = train(config, world, emit)
        result["seconds"] = time.perf_counter() - start
        if config.train.prove:
            emit("phase", text="proving: the same steps in one plain process")
        result["proof"] = prove(config, world, seconds=world.broadcast(result["seconds"]))
    return result


# ---- ranks started by another launcher may have different commands ---------------------------------------------------


def _agree_on_config(config: "RunConfig", world: "World") -> None:
    """Raises on every rank if two of them have different configurations; all ranks must call it.

    They can differ where each node is started by its own command. A different step count, learning rate or data file
    would train without an error, or hang at the end.
    """
    from shardwise.world import agree_on

    facts, shown = _facts(config)
    agree_on(
        world.agreement,
        {**facts, "device": world.device.type},
        what="the ranks' configurations",
        fix="start every rank with the same configuration and the same overrides",
        most=8,
        shown=shown,
    )


def _facts(config: "RunConfig") -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that must be equal on every rank, by key; and what to print for a key whose value is a digest.

    Left out, since nodes may differ in them: keys of a node (:data:`~shardwise.run.resume_check.OF_A_NODE`: only rank 0 writes
    logs, the number of a node's ranks was checked against the world, and of ``launch.device`` the device that "auto" chose is
    compared), and the paths of ``checkpoint.export``, ``checkpoint.adapter`` and ``checkpoint.base`` (a node's scratch folder or a date in a name is its own), but not whether
    they are written, in which all ranks take part; ``parallel.layout``, which the world has compared once resolved. A file is
    compared by its contents, not by its path: each node may read a copy on its own disk, and copies under one path may be of
    different ages.
    """
    from shardwise.run.resume_check import OF_A_NODE, files_of, flat

    facts = {key: value for key, value in flat(config).items() if not key.startswith(OF_A_NODE)}
    del facts["parallel.layout"]
    for key in ("export", "adapter", "base"):
        facts[f"checkpoint.{key}"] = None if getattr(config.checkpoint, key) is None else "a folder"
    shown: dict[str, str] = {}
    for key, contents in files_of(config).items():
        path = facts.get(key)  # none of what is beside a file that a key names
        shown[key] = contents if path is None else f"{path} ({contents})"
        facts[key] = contents
    return facts, shown


def _device_text(world: Any) -> str:
    if world.device.type == "cpu":
        import torch

        return f"cpu, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank, over gloo"
    import torch

    return f"{torch.cuda.get_device_name(world.device)}, over nccl"


def _layout_text(layout: Any) -> str:
    from shardwise.techniques import TECHNIQUES

    parts = [text for technique in reversed(TECHNIQUES) if (text := technique.layout_text(layout))]
    return ", and ".join(parts) or "one rank holds everything"


# ---- the name of the process -----------------------------------------------------------------------------------------


_COMM = Path("/proc/self/comm")  # of the main thread: other threads keep theirs, those started later get it
_LONGEST = 15  # bytes; the kernel cuts what is longer


def name_of_rank(rank: int, size: int, what: str) -> str:
    """``sw:RANK/SIZE WHAT``, without what is too long."""
    name = f"sw:{rank}/{size}"
    return f"{name} {what}" if len(name) + 1 + len(what) <= _LONGEST else name[:_LONGEST]


@contextlib.contextmanager
def process_named(name: str) -> Iterator[None]:
    """Context manager: this process has that name; elsewhere than on Linux nothing happens."""
    before = _replace(name)
    try:
        yield
    finally:
        if before is not None:
            _replace(before)


def _replace(name: str) -> str | None:
    """Sets the name; returns the one before, or None if there is no such thing here."""
    try:
        before = _COMM.read_text(errors="replace").rstrip("\n")
        _COMM.write_text(name)
    except OSError:  # no Linux, or a /proc that is not to be written
        return None
    return before
