"""Counts the calls between what a user calls and what happens: five paths, each run once in one process.

    python tools/walks.py        # a line for each, with the functions on the way

Counted are the frames of the package on the stack when the last call is reached; work that a queue passes to another
thread is counted in that thread. The fewer, the sooner a reader finds where something happens.
"""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

import shardwise as sw
from shardwise.step import step
from shardwise.techniques.data import fsdp2

__all__ = ["WALKS", "main", "walks"]

_PACKAGE = str(Path(sw.__file__).parent)
Walk = list[str]


def _way(frame: FrameType | None) -> Walk:
    """The package's functions on the stack, outermost first."""
    found: Walk = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            found.append(f"{Path(code.co_filename).relative_to(_PACKAGE).with_suffix('')}:{code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


@contextlib.contextmanager
def _until(owner: Any, name: str) -> Iterator[list[Walk]]:
    """Within: the ways on which a function was reached."""
    ways: list[Walk] = []
    real = getattr(owner, name)

    def reached(*args: Any, **kwargs: Any) -> Any:
        ways.append(_way(sys._getframe(1)))
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, reached):
        yield ways


@contextlib.contextmanager
def _until_builtin(*names: str) -> Iterator[list[Walk]]:
    """The same for functions written in C."""
    ways: list[Walk] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in names and (way := _way(frame)):
            ways.append(way)

    threading.setprofile(look)  # of threads that begin within
    sys.setprofile(look)
    try:
        yield ways
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _window() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2, 4), "labels": torch.zeros(2, dtype=torch.long)}]


def _step(model: nn.Module) -> sw.TrainStep:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.TrainStep(
        model,
        optim,
        loss=lambda output, _batch: output.square().sum(),
        forward=lambda model, batch: model(batch["x"]),
        count=lambda batch: len(batch["x"]),
    )


def _to_fully_shard(world: sw.World, _folder: Path) -> list[Walk]:
    with _until(fsdp2, "fully_shard") as ways:
        sw.parallelize(_model, world, sharding=sw.Sharding(engine="fsdp2"))
    return ways


def _to_optimizer(world: sw.World, _folder: Path) -> list[Walk]:
    run = _step(sw.parallelize(_model, world))
    with _until(run.optim, "step") as ways:
        run(_window())
    return ways


def _to_the_write(world: sw.World, folder: Path) -> list[Walk]:
    run = _step(sw.parallelize(_model, world))
    run(_window())
    manager = sw.CheckpointManager(folder / "run", run, async_save=False)
    with manager, _until_builtin("write", "pwrite") as ways:
        manager.save()
    return ways


def _to_the_read(world: sw.World, folder: Path) -> list[Walk]:
    model = sw.parallelize(_model, world)
    sw.save_weights(model, folder / "weights")
    with _until_builtin("copy_", "preadv", "pread", "readinto") as ways:
        sw.load_weights(model, folder / "weights")
    return ways


def _to_the_step(_world: sw.World, folder: Path) -> list[Walk]:
    from shardwise.run.config import load_config
    from shardwise.run.job import train

    words = ["train.steps=1", "data.seq_len=8", "data.global_batch=2", "data.micro_batch=2", "log.plot=false"]
    config = load_config(None, [*words, f"log.dir={folder / 'job'}", "parallel.layout=dp_shard=1"]).config
    with _until(step.TrainStep, "__call__") as ways:
        train(config, _world, lambda *_, **__: None)
    return ways


WALKS = {
    "parallelize -> fully_shard": _to_fully_shard,
    "TrainStep(window) -> optim.step": _to_optimizer,
    "CheckpointManager.save -> the first write": _to_the_write,
    "load_weights -> the first read of values": _to_the_read,
    "run.job.train -> TrainStep": _to_the_step,
}


def walks() -> dict[str, Walk]:
    """The first way of each walk."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, sw.init("dp_shard=1", device="cpu") as world:
        for name, walk in WALKS.items():
            place = Path(folder, str(len(found)))
            place.mkdir()
            found[name] = walk(world, place)[0]
    return found


def main() -> int:
    """Prints each walk. Returns the exit status."""
    for name, way in walks().items():
        print(f"{len(way):3} calls  {name}\n           {' > '.join(way)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
