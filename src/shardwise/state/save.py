"""Saves weights as plain safetensors files, into which every rank writes its own bytes at their offsets.

Nothing is gathered, and no rank holds more than its shard: the plan of the files (:mod:`shardwise.state.file_layout`)
follows from the recipe. The directory is written next to its place and moved there when all of it is on disk
(:mod:`shardwise.state.staging`).
"""

import functools
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.config.conversion import ENDINGS
from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.config.keywords import public_call
from shardwise.errors import CheckpointError, ConfigError, UnsupportedError, UsageError, errors_about
from shardwise.model import dtype_name
from shardwise.model.peft_names import names_of_peft
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime, runtime_of
from shardwise.state.extra_state import extra_states
from shardwise.state.file_layout import (
    SHARD_BYTES,
    FileLayout,
    Form,
    Part,
    file_layout_of,
    made_for_packed,
    parts_of,
    stored_dtypes,
)
from shardwise.state.formats.folder import INDEX
from shardwise.state.formats.safetensors import CODES
from shardwise.state.own_values import computed_values, refuse_own_methods, stored_tensors
from shardwise.state.packed import packed_of
from shardwise.state.rounding import refuse_overflow
from shardwise.state.sidecars import sidecar_files
from shardwise.state.staging import TOKEN, Staged, StagedSave, check_place
from shardwise.state.stored import is_rounded
from shardwise.state.to_rank0 import computed_of_full
from shardwise.state.writing import (
    by_file,
    opened,
    reserve,
    stored_blocks,
    stored_boxes,
    write_at,
    write_box,
    write_part,
)
from shardwise.techniques import fold
from shardwise.techniques.fold import acts
from shardwise.techniques.technique import Merge
from shardwise.world.collectively import collectively


@public_call(
    {
        "tokenizer": "leave it out: the tokenizer's files are copied from the directory the model was loaded from; another one writes its own: tokenizer.save_pretrained(directory), on rank 0"
    }
)
def save_weights(
    model: nn.Module,
    dest: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: str | torch.dtype | None = None,
    merge: bool = True,
    packed: bool = False,
) -> Path:
    """Saves the weights of a sharded model as a Hugging Face directory of safetensors files: every parameter and
    persistent buffer. All ranks must call it.

    The files have canonical names (for a ``TaskModel`` the names in its model); a tied tensor is stored once, under its
    first name. Each rank writes its own pieces at their offsets in the final files; ranks that do not see the directory
    send theirs to rank 0, a buffer at a time. The directory appears complete or not at all: an older one is replaced
    when the new one is on disk, and files in it that are not weights are kept. The configuration and tokenizer files of
    the directory that the model was loaded from are copied, and a Hugging Face model's own configuration is written.
    The result of ``get_extra_state`` is left out, with a warning: the format has tensors only.

    Args:
        model: from ``parallelize``.
        dest: the directory; it is made. Rank 0's path is used.
        max_shard_bytes: largest size of one file, in bytes; a tensor is never divided.
        dtype: floating parameters are written in it; None: as they are stored. Buffers are written as they are.
        merge: of a model with adapters (``lora=``), the weights are written with these merged into them, in float32 or more and rounded
            once: a model without adapters that computes the same. False: the weights beside which the adapters are trained;
            :func:`save_adapter` writes those.
        packed: of weights that are stored packed (``quantize=``), True: their bytes are written as bitsandbytes does, with
            ``quantization_config`` in config.json, so that transformers loads them with bitsandbytes; of a model with adapters with
            ``merge=False``. False: their plain values.

    Returns:
        the path of ``model.safetensors``, or of the index if there are several files.

    Raises:
        CheckpointError: on every rank, if one of them cannot write.
        ConfigError: an invalid dtype or size.
        UnsupportedError: on every rank, if the format does not have the dtype of a tensor (complex128), or an adapter cannot be merged
            because its weight is tied to another module's; or a packed weight has no place in bitsandbytes' files.
        UsageError: ``packed`` of a model without packed weights, or with adapters that would be merged.
        RankError: a rank does not take part, or is lost during the save.
    """
    runtime = runtime_of(model)
    runtime.world.refuse_imagined("save_weights")
    runtime.check_values()
    kind = _checked_dtype(dtype)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ConfigError(
            f"max_shard_bytes={max_shard_bytes!r}",
            why="it is a number of bytes, 1 or more",
            fix="use 5 << 30 for 5 GiB",
        )
    world, own = runtime.world, fold.own_names(runtime.recipe)
    if packed:
        _refuse_packed(runtime, own, merge)
    form: Form = "packed" if packed else "plain"
    without = {*own, *names_of_peft(runtime.module).copies(runtime.recipe.params)}
    file_layout = file_layout_of(runtime, max_shard_bytes=max_shard_bytes, dtype=kind, without=without, form=form)
    collectively(
        world,
        "save_weights, before it begins",
        lambda: repr((max_shard_bytes, kind, bool(merge), bool(packed))),
        same=str,
        differ=ConfigError(
            f"save_weights(max_shard_bytes={max_shard_bytes}, dtype={dtype}, merge={merge}, packed={packed})",
            why="other ranks were given other values",
            fix="give every rank the same",
        ),
    )
    states = extra_states(model)  # on every rank: it may communicate
    values = {} if packed else _unpacked(runtime)
    values |= _merged(runtime, own, values) if merge else {}
    computed = {**computed_values(runtime, "save_weights"), **(made_for_packed(runtime) if packed else {})}
    saving = _Saving(runtime, file_layout, Path(dest), kind, computed, values, is_packed=packed)
    try:
        collectively(world, "save_weights, making the files", saving.make_files, on_main=True)
        saving.absent = saving.meet("save_weights")
        collectively(world, "save_weights, writing", saving.write_own)
        collectively(world, "save_weights, receiving", saving.stream)
        collectively(world, "save_weights, putting it in place", saving.finish, on_main=True)
    finally:
        saving.close()
    if world.is_main:  # last: where warnings are errors, other ranks must not wait for this one
        _tell_extra_states(states)
        _tell_versions(runtime)
        for note in saving.notes:
            warnings.warn(note, stacklevel=level_of_caller())
    return saving.dest / file_layout.entry


def _refuse_packed(runtime: Runtime, own: Sequence[str], merge: bool) -> None:
    if not packed_of(runtime):
        raise UsageError(
            "save_weights(packed=True) of a model without packed weights",
            why="its weights are plain",
            fix="leave packed out; or train with parallelize(..., quantize=)",
        )
    if own and merge:
        raise UsageError(
            "save_weights(packed=True) of a model with adapters, merged",
            why="packing the merged weights again gives others than those that were trained",
            fix="write plain values, save_weights(model, dest); or the packed base, save_weights(model, dest, merge=False, packed=True), and the "
            "adapters beside it, save_adapter(model, folder)",
        )
    refuse_own_methods(runtime, "save_weights(packed=True) of")


def weights_bytes(
    model: nn.Module, dtype: str | torch.dtype | None = None, *, as_stored: bool = False, without: Collection[str] = ()
) -> int:
    """Size in bytes of the files that :func:`save_weights` would write; ``as_stored``: of a checkpoint's weights, with what techniques
    have added, and packed weights as they are, but those of ``without``. No communication."""
    runtime = runtime_of(model)
    return file_layout_of(
        runtime,
        max_shard_bytes=SHARD_BYTES,
        dtype=_checked_dtype(dtype),
        of_main=False,
        without=without if as_stored else fold.own_names(runtime.recipe),
        form="stored" if as_stored else "plain",
    ).num_bytes


def check_dtypes(model: nn.Module) -> None:
    """Raises UnsupportedError, with the tensor's name, if :func:`save_weights` could not write ``model``, or merge its adapters; no
    communication, the same on every rank."""
    runtime = runtime_of(model)
    stored_dtypes(stored_tensors(runtime, unpacked=True))
    _merged(runtime, fold.own_names(runtime.recipe), {}, whole=lambda names, compute: None)


def check_packed(model: nn.Module) -> None:
    """Raises UnsupportedError or UsageError if ``save_weights(merge=False, packed=True)`` could not write ``model``; no communication, the
    same on every rank."""
    runtime = runtime_of(model)
    _refuse_packed(runtime, (), merge=False)
    file_layout_of(runtime, max_shard_bytes=SHARD_BYTES, dtype=None, of_main=False, form="packed")


def _checked_dtype(dtype: str | torch.dtype | None) -> str | None:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else DTYPE_WORDS.get(dtype or "", dtype)
    if name is not None and not is_rounded(name):
        raise ConfigError(
            f"dtype={dtype!r}",
            why="weights are written in a floating dtype of two bytes or more: one of a byte wants a scale beside each tensor, "
            "which nobody has computed",
            fix=f"use one of {', '.join(kind for kind in CODES if is_rounded(kind))}",
        )
    return name


def _refuse_file(dest: Path) -> None:
    if dest.suffix in ENDINGS and not dest.is_dir():
        raise ConfigError(
            f"weights to {dest}",
            why="a model directory is written, with its configuration and an index, and this is the name of a file",
            fix=f"save_weights(model, {str(dest.with_suffix(''))!r}); the file will be {dest.with_suffix('')}/model.safetensors",
        )


def _tell_extra_states(states: dict[str, Any]) -> None:
    filled = [name for name, state in states.items() if state is not None]
    if filled:
        warnings.warn(
            f"weights without {', '.join(filled)}: safetensors holds tensors only; what get_extra_state returned is in "
            "sw.full_state_dict(model), to be kept with torch.save",
            stacklevel=level_of_caller(),
        )


def _tell_versions(runtime: Runtime) -> None:
    own = runtime.own_state
    if own is not None and own.versions is not None:
        warnings.warn(
            f"{', '.join(json.loads(own.versions)) or 'a module'}: loads by its version, which is in the files' headers for "
            "sw.load_weights; safetensors.torch.load_file passes over it, as over that of any model, and the module would take them for "
            "its oldest version. torch.save(sw.full_state_dict(model), path) on rank 0 keeps it for torch",
            stacklevel=level_of_caller(),
        )


def _unpacked(runtime: Runtime) -> dict[str, Callable[[], Tensor]]:
    """Packed weight -> computes this rank's part of its plain values. All ranks must call it."""
    whole, local = functools.partial(computed_of_full, runtime), runtime.local_tensors()
    return {name: weight.values_here(whole, local) for name, weight in packed_of(runtime).items()}


def _merged(
    runtime: Runtime, own: Sequence[str], unpacked: Mapping[str, Callable[[], Tensor]], whole: Any = None
) -> dict[str, Callable[[], Tensor]]:
    """Weight -> computes this rank's part of it with what techniques have added (``own``) merged into it. All ranks must call it.
    ``whole``: computes with full tensors; None: communicates for it."""
    found: dict[str, Merge] = {}
    for act in acts():
        found |= act.merged(runtime, whole or functools.partial(computed_of_full, runtime))
    for name, entry in stored_tensors(runtime).items() if found else ():
        if entry.made_of is not None and entry.made_of & {*own, *found}:
            raise UnsupportedError(
                "adapters merged into a weight that a module stores by a method of its own",
                why="the method is given the weight as it is",
                fix="write the base alone: save_weights(model, dest, merge=False), and save_adapter(model, folder)",
                name=name,
            )
    return {name: functools.partial(_with, runtime, name, merge, unpacked.get(name)) for name, merge in found.items()}


def _with(runtime: Runtime, name: str, merge: Merge, unpacked: Callable[[], Tensor] | None) -> Tensor:
    """What this rank has of a weight, in float32 or more, with what techniques have added merged into it."""
    local = runtime.local_tensor_of(name) if unpacked is None else unpacked()
    result = local.to("cpu", torch.promote_types(local.dtype, torch.float32), copy=True)
    if unpacked is None:
        parts = runtime.parts(name, result)
    else:
        parts = [(piece, result[piece.local_index]) for piece, _ in packed_of(runtime)[name].pieces(runtime.world.rank)]
    merge((piece.full_index, part) for piece, part in parts)
    return result


class _Local(Mapping[str, Tensor]):
    """What this rank stores, by name; what is computed is kept until the next is asked for."""

    def __init__(self, stored: Mapping[str, Tensor], computed: Mapping[str, Callable[[], Tensor]]):
        self._stored, self._computed = stored, computed
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            return self._stored[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # one is in memory at a time
            self._last = name, self._computed[name]()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _Saving(StagedSave):
    """One save on one rank, with a method per stage, in the order in which they are called."""

    def __init__(
        self,
        runtime: Runtime,
        file_layout: FileLayout,
        dest: Path,
        dtype: str | None,
        computed: Mapping[str, Tensor],
        values: Mapping[str, Callable[[], Tensor]],
        is_packed: bool,
    ):
        super().__init__(runtime.world, dest)
        self.runtime, self.world, self.file_layout, self.dtype = runtime, runtime.world, file_layout, dtype
        self.local, self.is_packed = _Local({**runtime.local_tensors(), **computed}, values), is_packed
        self.absent: list[int] = []  # ranks that do not see the directory
        self.notes: list[str] = []

    def make_files(self) -> None:
        """On rank 0: makes the files in their final size, with their headers, so that a full disk is found before any
        weights are written."""
        _refuse_file(self.dest)
        try:
            dest = self.dest.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, an invalid name
            raise CheckpointError(f"weights to {self.dest}", why=str(error), fix="name another folder") from error
        check_place(dest)
        with self.errors_of_writing():
            self.staged = Staged(dest)
            self.folder = self.staged.path
            for file in self.file_layout.files:
                with opened(self.folder / file.name, os.O_CREAT) as descriptor:
                    reserve(descriptor, file.size)
                    write_at(descriptor, memoryview(file.head), 0)

    def write_own(self) -> None:
        """Writes this rank's pieces directly from its shards, and syncs each file when it is done."""
        if self.world.rank in self.absent:
            return
        with self.errors_of_writing():
            for path, parts in by_file(self.folder, parts_of(self.runtime, self.file_layout, self.world.rank)):
                with opened(path) as descriptor:
                    for part in parts:
                        write_part(descriptor, part, self.local[part.view.name][part.local])
                    os.fsync(descriptor)

    def stream(self) -> None:
        """Sends the pieces of ranks that do not see the directory to rank 0, in messages of bounded size, rank by
        rank."""
        if self.world.rank in self.absent:
            self._send()
        if not self.world.is_main:
            return
        problem: OSError | None = None
        for rank in sorted(self.absent):
            for path, parts in by_file(self.folder, parts_of(self.runtime, self.file_layout, rank)):
                problem = self._receive(rank, path, parts, problem)
        if problem is not None:
            with self.errors_of_writing():
                raise problem

    def _send(self) -> None:
        problem: CheckpointError | None = None
        for part in parts_of(self.runtime, self.file_layout, self.world.rank):
            for _, block, rounded in stored_blocks(part, self.local[part.view.name][part.local]):
                dist.send(bytes_of(rounded).to(self.world.message_device), dst=0)
                try:
                    with errors_about(part.view.name):
                        refuse_overflow(rounded, block, f"to be written in {part.tensor.dtype}")
                except CheckpointError as error:  # raised once rank 0 has received everything
                    problem = problem or error
        if problem is not None:
            raise problem

    def _receive(self, rank: int, path: Path, parts: list[Part], problem: OSError | None) -> OSError | None:
        """Receives and writes what ``rank`` sends for one file; all of it even if it cannot be written, since the rank
        must not wait."""
        wires = ((part, box, size) for part in parts for box, size in stored_boxes(part))
        try:
            if problem is not None:
                raise problem
            with opened(path) as descriptor:
                for part, box, size in wires:
                    write_box(descriptor, part, box, self._message(rank, size))
                os.fsync(descriptor)
        except OSError as error:
            problem = error
        for _, _, size in wires:
            self._message(rank, size)
        return problem

    def _message(self, rank: int, size: int) -> memoryview:
        wire = torch.empty(size, dtype=torch.uint8, device=self.world.message_device)
        dist.recv(wire, src=rank)
        return wire.cpu().numpy().data

    def finish(self) -> None:
        """On rank 0: writes the index, configuration and tokenizer files, then moves the directory to its place."""
        assert self.staged is not None
        with self.errors_of_writing():
            (self.folder / TOKEN).unlink()
            sidecars, self.notes = sidecar_files(self.runtime, self.dtype, packed=self.is_packed)
            index = self.file_layout.index()
            if index is not None:
                sidecars[INDEX] = index
            for name, content in sidecars.items():
                with opened(self.folder / name, os.O_CREAT) as descriptor:
                    write_at(descriptor, memoryview(content), 0)
                    os.fsync(descriptor)
            self.staged.commit()

    def unwritten(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"weights to {self.dest}",
            why=f"writing failed: {error.strerror or error}",
            fix="free space or choose a directory you can write to; an older one there is as it was",
        )
