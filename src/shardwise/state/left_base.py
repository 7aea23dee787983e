"""The frozen weights of a model, which checkpoints with ``frozen="leave"`` do not hold: they are named by the directory that they were loaded
from, and by a digest of each tensor that does not depend on the layout."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwise.config.folders import step_of
from shardwise.errors import CheckpointError, ConfigError, UnsupportedError
from shardwise.model import dtype_name
from shardwise.parallel import Runtime
from shardwise.parallel.copies import checksum_of
from shardwise.recipe.boxes import Box
from shardwise.state.origin import Origin, frozen_tensors, others

FROZEN = "training/frozen.json"
_BLOCK = 1 << 20  # numbers that are summed at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # of splitmix64, as signed numbers


class LeftBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of the weights that it does not hold.

    Attributes:
        folder: where they were loaded from; None: they came from no directory.
        tensors: canonical name -> dtype, shape and digest.
    """

    folder: str | None
    tensors: dict[str, tuple[str, tuple[int, ...], str]]

    @property
    def place(self) -> str:
        return self.folder or "no directory: the model was given with them"


def base_of(text: bytes, place: Path) -> LeftBase:
    """Reads what :func:`text_of` wrote."""
    try:
        return msgspec.json.decode(text, type=LeftBase)
    except msgspec.DecodeError as error:
        raise CheckpointError(str(place), why=f"it is not what a save writes: {error}", fix="copy it again") from error


def frozen_names(runtime: Runtime) -> list[str]:
    """The parameters that are not trained, and all in which weights are stored packed."""
    if runtime.own_state is not None:
        raise UnsupportedError(
            'CheckpointManager(frozen="leave") of a model whose modules store tensors by methods of their own',
            why="these are given all tensors, frozen ones too",
            fix='leave it out, or frozen="save"',
        )
    found = frozen_tensors(runtime)
    if not found:
        raise ConfigError(
            'CheckpointManager(frozen="leave")',
            why="no parameter of the model is frozen, so there is nothing to leave out",
            fix="leave it out, or train adapters: parallelize(..., lora=sw.LoRA(rank=16))",
        )
    return found


def refuse_lost_base(runtime: Runtime, root: Path) -> None:
    """Refuses to leave frozen weights where they are if they are nowhere, or where they may be removed. All ranks must call it."""
    origin, names = runtime.memory(Origin), frozen_names(runtime)
    given, save = 'CheckpointManager(frozen="leave")', 'frozen="save", so that checkpoints have them'
    if origin.folder is None:
        raise ConfigError(
            given,
            why="the frozen weights were loaded from no directory, and no checkpoint would have them",
            fix=f"{save}; or write them once, sw.save_weights(model, DIRECTORY), and load that before training: sw.load_weights(model, DIRECTORY)",
        )
    folder = runtime.world.broadcast(origin.folder)
    if folder.is_relative_to(root) and step_of(root / folder.relative_to(root).parts[0]) is not None:
        raise ConfigError(
            given,
            why=f"the frozen weights came from {folder}, a checkpoint in the run's own directory, which is removed when newer ones are there",
            fix=f"{save}; or load them from another directory: sw.load_weights(model, DIRECTORY)",
        )
    found = others(runtime)
    if found:
        is_known = all(runtime.world.gather(found[0] in origin.sums))
        raise ConfigError(
            f"{given} beside {folder}",
            why=f"this frozen weight, one of {len(found)} of {len(names)}, "
            + (
                "does not have the value that was loaded from there: the program has written it since, or loaded another"
                if is_known
                else "was not loaded from there"
            ),
            fix=save,
            name=found[0],
        )
    if not runtime.world.broadcast(folder.exists()):
        raise ConfigError(
            f"{given} beside {folder}",
            why="the frozen weights were loaded from there, and nothing is there any more",
            fix=f"{save}; or put it back",
        )
    if folder.is_dir():  # the files of a checkpoint from before may be pruned
        origin.files = folder


class _Digests:
    """The digests of a model's tensors, and the checksums that they had then."""

    def __init__(self) -> None:
        self.of: tuple[Any, dict[str, str]] | None = None


def digests(runtime: Runtime, names: Collection[str]) -> dict[str, str]:
    """Name -> digest of the full tensor, the same on every rank under every layout. All ranks must call it. Read once: again if
    a tensor was written in the meantime on any rank."""
    kept, local = runtime.memory(_Digests), runtime.local_tensors()
    sums = {name: checksum_of(local[name]) for name in names}  # a write to param.data is in no version
    is_known = kept.of is not None and kept.of[0] == sums
    if all(runtime.world.gather(is_known)) and kept.of is not None:
        return kept.of[1]
    mine = {name: _own_sum(runtime, name, local[name], number) for number, name in enumerate(names)}
    everyone = runtime.world.gather(mine)
    found = {name: f"{sum(each[name] for each in everyone) % (1 << 64):016x}" for name in names}
    kept.of = sums, found
    return found


def text_of(runtime: Runtime, names: Collection[str]) -> bytes:
    """The text of :data:`FROZEN`. All ranks must call it."""
    found, local, folder = digests(runtime, names), runtime.local_tensors(), runtime.memory(Origin).folder
    params = runtime.recipe.params
    shapes = {name: params[name].shape if name in params else tuple(local[name].shape) for name in names}
    tensors = {name: (dtype_name(local[name].dtype), shapes[name], found[name]) for name in names}
    return msgspec.json.format(msgspec.json.encode(LeftBase(None if folder is None else str(folder), tensors)))


def refuse_other_base(runtime: Runtime, saved: LeftBase, found: Mapping[str, str], place: Path) -> None:
    """Raises CheckpointError, with the first tensor that differs, if a model has not the frozen weights that a checkpoint was saved beside.

    Args:
        found: the model's digests, of those of these tensors that it has.
    """
    local, params = runtime.local_tensors(), runtime.recipe.params
    for name, (dtype, shape, digest) in saved.tensors.items():
        if name not in found:
            why = "the model has no such tensor"
        elif dtype_name(local[name].dtype) != dtype:
            why = f"it was of {dtype}, and the model stores {dtype_name(local[name].dtype)}"
        elif (params[name].shape if name in params else tuple(local[name].shape)) != tuple(shape):
            why = f"it was of shape {list(shape)}"
        elif found[name] != digest:
            why = "the model has other values there"
        else:
            continue
        raise CheckpointError(
            f"{place}: a checkpoint beside another base than the model's",
            why=f"{why}; the frozen weights were left where they are: {saved.place}",
            fix=f"build the model as it was, and load that base before: sw.load_weights(model, {(saved.folder or 'DIRECTORY')!r}); in a run "
            f"--model.weights={saved.folder or 'DIRECTORY'}",
            name=name,
        )


def _own_sum(runtime: Runtime, name: str, local: Tensor, number: int) -> int:
    """The part of a tensor's sum that this rank counts: of copies on several ranks one is counted."""
    rank, total = runtime.world.rank, 0
    holders = runtime.view.owners(name) if name in runtime.recipe.params else ((0,),)
    for (piece, part), ranks in zip(runtime.parts(name, local), holders, strict=True):
        if ranks[number % len(ranks)] == rank:
            for block in piece.blocks(_BLOCK):
                box = Box(block.starts, block.sizes)
                total += _sum_of(part[tuple(slice(a, a + n) for a, n in zip(*box.within(piece.box), strict=True))], box)
    return total % (1 << 64)


def _sum_of(values: Tensor, box: Box) -> int:
    """The sum of a box's numbers, as integers of their bits, each times a factor of its place in the whole tensor."""
    bits = (torch.view_as_real(values) if values.is_complex() else values).contiguous()
    bits = (bits if bits.dtype == torch.bool else bits.view(_BITS[bits.itemsize])).long()
    starts = (*box.starts, *(0,) * (bits.dim() - len(box.starts)))
    for dim in reversed(range(bits.dim())):
        bits = (bits * _factors(dim, starts[dim], bits.shape[dim], bits.device)).sum(dim)
    return int(bits) % (1 << 64)


def _factors(dim: int, first: int, size: int, device: torch.device) -> Tensor:
    """Odd numbers, another for each place along a dim."""
    mixed = (torch.arange(first, first + size, device=device) + ((dim + 1) << 48)) * _FIRST
    mixed = (mixed ^ (mixed >> 30)) * _SECOND
    return (mixed ^ (mixed >> 27)) | 1
