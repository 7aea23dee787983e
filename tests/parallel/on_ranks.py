"""What ranks do in the tests of this folder, and how their pieces are put together again."""

import ctypes
import functools
import gc
import warnings
from pathlib import Path

import models
import torch
from layouts import LAYOUTS
from parallel.values import whole
from torch import nn

from shardwise import Sharding
from shardwise.parallel import parallelize, recipe_of, runtime_of
from shardwise.step.own_loop import accumulate
from shardwise.world import init


def shard(name: str, layout: str, *, how=None, seed: int = 0, precision=None, engine: str = "auto", unit: int = 0):
    """Shards constructor ``name`` (``how="module"``: built first, with numbers of this rank's own) and gives what this
    rank holds: name -> list of (index into the whole, values), the notes, and the warnings."""
    keep = {} if engine == "ddp" else {"min_unit_bytes": unit}
    with init(layout, device="cpu", seed=seed, timeout_s=30) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1000 + world.rank)
        model, way = models.get(name).build, how
        if how == "module":
            model, way = model(), None
        model = parallelize(model, world, init=way, precision=precision, sharding=Sharding(engine=engine, **keep))
        runtime = runtime_of(model)
        held = {
            tensor_name: [
                (piece.full_index, tensor[piece.local_index].clone()) for piece in runtime.pieces(tensor_name, tensor)
            ]
            for tensor_name, tensor in runtime.local_tensors().items()
        }
        plain = {
            key: value for key, value in vars(model).items() if isinstance(value, float) or key in {"array", "order"}
        }
        notes = {note.name: note.why for note in recipe_of(model).notes}
        return held, notes, [str(w.message) for w in caught if "init" in str(w.message)], plain


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of constructor ``name``."""
    from shardwise.parallel.init.sources import all_tensors

    return {key: tuple(tensor.shape) for key, tensor in all_tensors(models.get(name).build()).items()}


def sharded(ranks, name: str, layout: str, **options):
    """Runs :func:`shard` on the ranks of a layout. Gives whole tensors and what the ranks said."""
    text, count, engine = LAYOUTS[layout]
    answers = ranks.run(shard, count, name, text, engine=engine, timeout_s=60, **options)
    return whole([held for held, *_ in answers], shapes_of(name)), [rest for _, *rest in answers]


def forward_of(name: str, layout: str, engine: str = "auto"):
    """The output of a seeded model of the registry, on this rank, for a batch that is the same on every rank."""
    case = models.get(name)
    with init(layout, device="cpu", timeout_s=30) as world:
        build = functools.partial(_double, name)
        model = parallelize(build, world, sharding=Sharding(engine=engine, min_unit_bytes=0))
        with accumulate(model, is_last=True):
            if case.batch is None:
                output = model(torch.ones(2, 4, dtype=torch.float64))
            else:
                output = case.forward(model, case.batch(torch.Generator().manual_seed(0), 0))
            output.sum().backward()
        return output.detach()


def _double(name: str) -> nn.Module:
    return models.get(name).build().double()


def host_growth(layout: str, how: str) -> tuple[float, float]:
    """MiB of this rank's shards of a model of 200 MiB, and by how much the peak of its memory grew while it was made."""
    with init(layout, device="cpu", timeout_s=30) as world:
        parallelize(lambda: nn.Linear(512, 512), world, init=how)  # what a first use loads
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests left to this process would hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        before = _memory("VmRSS")
        model = parallelize(_fifty, world, init=how)
        size = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())
        return size / 2**20, _memory("VmHWM") - before


def _fifty() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(50)))


def _memory(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024
