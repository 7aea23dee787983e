"""Weights in: each rank reads the bytes of its own pieces, straight into its shards.

In this order: names, shapes and dtypes are matched, on every rank; only when all of them fit on all ranks the first
byte is copied. A read that fails after that leaves a model that refuses to be used until it is loaded whole.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError, errors_about
from shardwise.parallel import Runtime, bytes_of, runtime_of
from shardwise.parallel.init.values import scatter_values
from shardwise.recipe import Slice
from shardwise.state.extra import set_extra_states
from shardwise.state.files import BUFFER
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.load_transaction import LoadTransaction, refuse_left_half
from shardwise.state.match import Rules, all_of, own_boxes, plan_of
from shardwise.state.names import Rename
from shardwise.state.report import LoadReport
from shardwise.world import World
from shardwise.world.collectively import collectively

__all__ = ["load_weights"]


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Rename = (),
    cast: bool = False,
    shared_files: bool = True,
    check_finite: bool = False,
) -> LoadReport:
    """Loads parameters and persistent buffers of a sharded model, from any layout into any layout. All ranks must call
    it.

    Each rank reads its own pieces, and no more, from files that every rank can see: no tensor is whole in memory,
    nothing travels. Either everything fits and is loaded, or nothing of the model has changed.

    Args:
        model: from ``parallelize``.
        source: a Hugging Face model directory, a checkpoint (every block that is read is compared with its checksum), a
            safetensors file, a torch file, a DCP directory, or a state dict of whole tensors.
        strict: False: names that are missing, and names that are not the model's, are left out and told.
        rename: ``(regex, replacement)`` pairs, applied in order to the names of the source; a replacement of None
            leaves the tensor out. What wrappers add (``_orig_mod.``, ``module.``) and a prefix that all names share or
            lack (``model.``) are seen to without it.
        cast: True: values of another dtype than the model stores are converted; False: they are refused.
        shared_files: False: only rank 0 sees the source; it sends every rank its pieces.
        check_finite: True: values that are NaN or infinite are refused; everything is read twice.

    Raises:
        CheckpointError: on every rank; what is missing, does not fit, or cannot be read, by name and file.
        ConfigError: a ``rename`` that matches nothing.
        UsageError: ``source`` is neither a path nor a mapping.
        RankError: a rank does not come.

    Example:
        >>> report = load_weights(model, "checkpoints/llama")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        148 tensors from checkpoints/llama: 402.00 MiB on this rank, 0.21 s
    """
    start, runtime = time.perf_counter(), runtime_of(model)
    rules = Rules(strict=strict, rename=rename, cast=cast, check_finite=check_finite)
    with VerifiedFiles() as files:
        if shared_files:
            report = _load_own_pieces(runtime, source, rules, files)
        else:
            report = _load_from_rank0(runtime, source, rules, files)
    return replace(report, seconds=time.perf_counter() - start)


def _load_own_pieces(runtime: Runtime, source: Any, rules: Rules, files: VerifiedFiles) -> LoadReport:
    world = runtime.world
    plan = collectively(
        world,
        "load_weights, matching names",
        lambda: plan_of(runtime, source, rules, files, lambda name, tensor: own_boxes(runtime, name, tensor)),
        same=lambda plan: plan.digest,
        differ=CheckpointError(
            "ranks that see different weights",
            why=f"what rank {world.rank} finds at {source if not isinstance(source, Mapping) else 'its state dict'} is not "
            "what others find",
            fix="put the same files on every node, or pass shared_files=False where rank 0 alone has them",
        ),
    )
    refuse_left_half(runtime, plan.report.place, plan.tensors)
    local = runtime.local_tensors()

    def read() -> Sums:
        for name, stored in plan.tensors.items():
            with errors_about(name):
                for piece, part in runtime.parts(name, local[name]):
                    stored.read(piece.box, part, files)
        plan.refuse_changed_files()  # every rank has planned before: all have seen one version
        return _sums_of_shared(runtime, {name: local[name] for name in plan.tensors})

    before = files.num_bytes
    with LoadTransaction(runtime, local, plan.tensors):
        _refuse_other_values(world, collectively(world, "load_weights, reading", read))
    _after(runtime, plan.extra, plan.folder)
    return replace(plan.report, num_bytes=files.num_bytes - before)


def _load_from_rank0(runtime: Runtime, source: Any, rules: Rules, files: VerifiedFiles) -> LoadReport:
    world = runtime.world
    plan = collectively(
        world,
        "load_weights, matching names on rank 0",
        lambda: plan_of(runtime, source, rules, files, all_of),
        on_main=True,
    )
    told = (plan.report, list(plan.tensors), plan.extra, plan.folder) if plan is not None else None
    report, names, extra, folder = world.broadcast(told)
    refuse_left_half(runtime, report.place, names)
    local = runtime.local_tensors()
    problems: list[Exception] = []

    def part_of(name: str, piece: Slice) -> Tensor:
        """A read that fails gives zeros, so that the ranks that wait for it are served, and is told afterwards."""
        assert plan is not None  # on rank 0
        values = torch.zeros(piece.sizes, dtype=local[name].dtype)
        if not problems:
            try:
                with errors_about(name):
                    plan.tensors[name].read(piece.box, values, files)
            except Exception as error:  # whatever it is: the ranks wait for what comes
                problems.append(error)
        return values

    def check() -> None:
        if problems:
            raise problems[0]
        if plan is not None:
            plan.refuse_changed_files()

    with LoadTransaction(runtime, local, names):
        scatter_values(runtime, part_of, {name: local[name] for name in names})
        collectively(world, "load_weights, after rank 0 has sent", check, on_main=True)
    _after(runtime, extra, folder)
    return replace(report, num_bytes=sum(local[name].numel() * local[name].itemsize for name in names))


Sums = dict[tuple[int, ...], int]  # ranks that hold the same pieces -> a sum over what this one holds of them


def _sums_of_shared(runtime: Runtime, local: Mapping[str, Tensor]) -> Sums:
    sums: Sums = {}
    everyone = tuple(range(runtime.world.size))
    for name, tensor in local.items():
        owners = runtime.view.owners(name) if name in runtime.recipe.params else (everyone,)
        for (_, part), holders in zip(runtime.parts(name, tensor), owners, strict=True):
            if len(holders) > 1:
                sums[holders] = _sum_of_bits(part, sums.get(holders, 0))
    return sums


def _refuse_other_values(world: World, sums: Sums) -> None:
    """Ranks that hold the same piece must have read the same values: files of one name may differ from node to node.

    Raises:
        CheckpointError: they have not.
    """
    told = world.gather(sums)
    for holders in {holders for other in told for holders in other}:
        if len({told[rank].get(holders) for rank in holders}) > 1:
            raise CheckpointError(
                f"ranks {', '.join(map(str, holders))}, which hold the same tensors",
                why="they have read different values under the same names",
                fix="put the same files on every node, or pass shared_files=False where rank 0's are meant",
            )


def _sum_of_bits(tensor: Tensor, before: int = 0) -> int:
    """The CRC-32C of the tensor's bytes, behind others whose sum is ``before``."""
    for part in bytes_of(tensor).split(BUFFER):
        before = crc32c.crc32c(part.cpu().numpy().data, before)
    return before


def _after(runtime: Runtime, extra: Mapping[str, Any], folder: Path | None) -> None:
    """What comes with weights besides tensors."""
    if folder is not None:  # values that come without a directory are still those of the model that came from one
        runtime.loaded_from = folder.resolve()
    if extra:
        set_extra_states(runtime.module, extra)
