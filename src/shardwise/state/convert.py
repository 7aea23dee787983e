"""Converts weights between formats: plans all files, copies values block by block, then moves the result to its place.

Memory use is a few buffers of 8 MiB and the list of tensors, whatever the model. Nothing appears at the destination
before all of it is on disk; what a killed conversion leaves beside it is removed by the next one.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from shardwise.config.conversion import Conversion
from shardwise.config.folders import KINDS, SIDECARS, check_place, refuse_other_kind, refuse_within_checkpoint, step_of
from shardwise.config.tokenizer import json_object
from shardwise.errors import CheckpointError, ConfigError, VerifyError
from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import blocks, whole
from shardwise.state.block_copy import BlockCopy, Progress
from shardwise.state.converted import ConvertedTensor, config_of, converted_tensors, ties_among
from shardwise.state.file_layout import SHARD_BYTES
from shardwise.state.files import BUFFER, writing
from shardwise.state.formats.folder import sidecars_of
from shardwise.state.integrity.reading import VerifiedCheckpoint, VerifiedFiles
from shardwise.state.merged import with_adapter
from shardwise.state.packed import DecodedTensor, refuse_parts, with_packed
from shardwise.state.source import open_source
from shardwise.state.staging import Staged, sync_folder
from shardwise.state.stored import Source, compare_sums, refuse_changed
from shardwise.state.targets.dcp import plan_dcp
from shardwise.state.targets.plan import ConversionPlan
from shardwise.state.targets.safetensors import plan_checkpoint, plan_safetensors
from shardwise.state.targets.torch_file import plan_torch_file

_KIND = {"hf": "weights", "shardwise": "checkpoint", "dcp": "dcp"}


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: counts, bytes, seconds, and notes for the user."""

    kind: str
    num_tensors: int
    num_files: int
    num_bytes: int
    seconds: float
    notes: tuple[str, ...]


def convert(
    job: Conversion,
    progress: Progress = lambda what, done, total: None,
    model_of: Callable[[], nn.Module | None] = lambda: None,
) -> Converted:
    """Converts the weights in ``job.source`` to ``job.dest``; see :class:`Conversion`. ``model_of`` makes the model that they are of, where that
    is known: it is asked for adapters of parameters alone."""
    begin = time.perf_counter()
    _check_destination(job)
    source = open_source(job.source)
    if source.left_base is not None:
        raise CheckpointError(
            f"converting {job.source}, a checkpoint without the frozen weights of its model",
            why=f'it was saved with frozen="leave"; they are where the run has loaded them from: {source.left_base}',
            fix="use the run's final weights; or load both into the model, the checkpoint with strict=False: sw.save_weights(model, DEST)",
        )
    refuse_parts(
        source,
        fix="load the checkpoint into its model, and write plain values: sw.load_weights(model, source), sw.save_weights(model, dest)",
    )
    with VerifiedFiles(source.verified) as files:
        source = with_packed(source, None, files)
    num_packed = sum(isinstance(stored, DecodedTensor) for stored in source.tensors.values())
    if job.adapter is not None:
        source = with_adapter(source, job.adapter, model_of)
    todo = _planned(job, source, num_packed)
    with writing(f"converting to {job.dest}", "free space, or name a place that can be written"):
        _put_together(job, todo, progress)
    seconds = time.perf_counter() - begin
    num_files, num_bytes = len(todo.plan.files), todo.plan.num_bytes
    return Converted(source.kind, len(todo.items), num_files, num_bytes, seconds, tuple(todo.notes))


def _put_together(job: Conversion, todo: "_ConversionJob", progress: Progress) -> None:
    """Writes the result next to its place and moves it there."""
    with contextlib.closing(Staged(_place(job.dest))) as staged:
        result = staged.path / job.dest.name if job.is_file else staged.path
        with VerifiedFiles(todo.verified) as reader:
            reader.sums = {}  # everything is read in order, so its checksums are compared on the way
            copying = BlockCopy(todo.plan, todo.items, todo.sidecars, staged.path)
            copying.values(reader, progress)
            compare_sums({item.source: item.stored for item in todo.items}, reader)
            reader.sums = None
            copying.rest()
            refuse_changed(item.stored for item in todo.items)
            if job.verify:
                for name in todo.plan.files:  # what is compared is read from the disk, not from the page cache
                    with (staged.path / name).open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                _compare(result, todo.items, reader, progress)
                refuse_changed(item.stored for item in todo.items)
        _check_destination(job)  # as long as it took
        if job.is_file:
            os.replace(result, staged.dest)
        else:
            staged.move()
        sync_folder(staged.dest.parent)


@dataclass(frozen=True)
class _ConversionJob:
    """Everything that a conversion will write: tensors, their places in files, and further files."""

    items: list[ConvertedTensor]
    plan: ConversionPlan
    sidecars: Mapping[str, bytes]
    notes: list[str]
    verified: VerifiedCheckpoint | None


def _planned(job: Conversion, source: Source, num_packed: int) -> _ConversionJob:
    home = source.folder or (job.source if job.source.is_dir() else job.source.parent)
    config = config_of(home, job.config) if job.rules else {}
    items, notes = converted_tensors(source, job.rules, config, job.dtype, job.keep)
    if job.to == "hf" and (own := next((item.name for item in items if ".lora_" in item.name), None)) is not None:
        raise CheckpointError(
            f"converting {job.source}, weights with adapters beside them, to a Hugging Face directory",
            why="transformers would leave the adapters out, and open the model as it was before they were trained",
            fix="use the run's final weights, which are merged, or merge its adapters into their base: shardwise convert BASE DEST --adapter "
            "RUN/adapter; a checkpoint alone is loaded into the model, sw.parallelize(..., lora=...), and written by sw.save_weights(model, DEST)",
            name=own,
        )
    notes = [*(f"left out: {name}: {why}" for name, why in source.left_out.items()), *notes]
    ties = ties_among(items)
    if ties and job.to != "torch":
        name, other = next(iter(ties.items()))
        more = f" (and {len(ties) - 1} more such)" if len(ties) > 1 else ""
        notes.append(
            f"{name} is {other} in the source; it is written for each name, since the format has no ties{more}"
        )
    if num_packed:
        notes.append(f"{num_packed} weights are packed in the source (quantised), and are written as plain values")
    sidecars = _sidecars(job, source, notes, is_unpacked=num_packed > 0) if job.to in ("hf", "shardwise") else {}
    return _ConversionJob(items, _plan(job, source, items, ties), sidecars, notes, source.verified)


def _plan(job: Conversion, source: Source, items: Sequence[ConvertedTensor], ties: Mapping[str, str]) -> ConversionPlan:
    facts = {item.name: item.fact for item in items}
    max_bytes = job.max_shard_bytes or SHARD_BYTES
    modules = _versions(source)
    if job.to == "hf":
        return plan_safetensors(facts, max_bytes, modules)
    if job.to == "safetensors":
        return plan_safetensors(facts, 1 << 62, modules, job.dest.name.removesuffix(".safetensors"))
    if job.to == "torch":
        return plan_torch_file(facts, job.dest.name, ties)
    if job.to == "shardwise":  # of the step in its name, else of that of the source
        step = source.verified.manifest.step if source.verified is not None else 0
        return plan_checkpoint(facts, max_bytes, step if (named := step_of(job.dest)) is None else named, modules)
    return plan_dcp(facts, max_bytes)


def _versions(source: Source) -> str | None:
    """The versions of modules that a loader may ask for, as JSON: those above the first, which most modules have."""
    told = {name: own for name, own in (source.metadata or {}).items() if own != {"version": 1}}
    try:
        return json.dumps(told) if told else None
    except (TypeError, ValueError):  # of a torch file: what is no plain value was not read
        return None


def _sidecars(job: Conversion, source: Source, notes: list[str], *, is_unpacked: bool) -> dict[str, bytes]:
    """The configuration and tokenizer files that are copied to a Hugging Face directory; those of an older one stay where the source has none."""
    older = {path.name: path.read_bytes() for path in sidecars_of(job.dest)} if job.dest.is_dir() else {}
    found = {} if job.rules else _sidecars_beside(job, source, notes, is_unpacked=is_unpacked)
    if kept := [name for name in older if name not in found]:
        notes.append(f"kept from the older {job.dest}: {', '.join(kept)}")
    if job.rules:
        notes.append("config.json and tokenizer files stay behind: renamed weights are not what they describe")
    elif "config.json" not in older | found:
        notes.append("there is no config.json next to the source: transformers needs one next to the result")
    return older | found


def _sidecars_beside(job: Conversion, source: Source, notes: list[str], *, is_unpacked: bool) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in sidecars_of(source.folder)} if source.folder is not None else {}
    if source.folder is not None and "config.json" in found and (job.dtype is not None or is_unpacked):
        place = source.folder / "config.json"
        content = json_object(place, f"{source.folder}: config.json", "repair it, or move it away")
        for key in ("dtype", "torch_dtype"):
            if job.dtype is not None and content.get(key) not in (None, job.dtype):
                notes.append(f"config.json: {key} is {job.dtype} now, and was {content[key]}")
                content[key] = job.dtype
        if is_unpacked:
            content.pop("quantization_config", None)
        found["config.json"] = (json.dumps(content, indent=2) + "\n").encode()
    return found


# ---- the destination ----------------------------------------------------------------------------------------------


def _check_destination(job: Conversion) -> None:
    """Refuses a destination that is not possible, or where something else would be lost."""
    source, dest, given = job.source.resolve(), job.dest.resolve(), f"converting to {job.dest}"
    if os.path.lexists(job.dest) and not job.overwrite and dest != source:
        raise CheckpointError(given, why="it is there already", fix="name another destination, or add --overwrite")
    both = f"convert {job.source} {job.dest}"
    if dest == source:
        raise ConfigError(both, why="both are the same place", fix="name another destination")
    if source.is_dir() and dest.is_relative_to(source):
        raise ConfigError(both, why="the result would lie within its source", fix="choose a path outside it")
    if source.is_relative_to(dest):
        why = "the source lies within the destination, which is replaced as a whole"
        raise ConfigError(both, why=why, fix="choose a separate folder")
    place = _place(job.dest)
    if job.is_file:
        if job.dest.is_dir() and not job.dest.is_symlink():
            raise ConfigError(given, why="it is a directory, and one file is written", fix="name a file in it")
        refuse_within_checkpoint(place.parent, "converted", given)
        if KINDS["weights"].replaced.fullmatch(place.name):
            refuse_other_kind(place.parent, "weights", given)
        return
    check_place(place, _KIND[job.to], given)
    replaced = KINDS[_KIND[job.to]].replaced
    for entry in sorted(place.iterdir()) if place.is_dir() and not place.is_symlink() else ():
        if not replaced.fullmatch(entry.name) and not (job.to != "dcp" and entry.name in SIDECARS):
            raise CheckpointError(
                f"{given} with --overwrite",
                why=f"{entry.name} in it is no part of weights, and the directory is replaced as a whole",
                fix="move it away, or name another destination",
            )


def _place(dest: Path) -> Path:
    """The name that is written, where links and ``..`` on the way to it lead; a link of that name is replaced, not followed."""
    return dest.parent.resolve() / dest.name if dest.name not in ("", "..") else dest.resolve()


# ---- reading the result again --------------------------------------------------------------------------------------


def _compare(place: Path, items: Sequence[ConvertedTensor], reader: VerifiedFiles, progress: Progress) -> None:
    """Opens the result like any other source, and compares its tensors with the converted source."""
    result = open_source(place)
    reader.verify_with(result.verified)
    written = {name: (stored.shape, stored.dtype) for name, stored in result.tensors.items()}
    if written != {item.name: (item.stored.shape, item.dtype) for item in items}:
        raise VerifyError(
            f"the converted {place}", why="its names, shapes or dtypes are not the source's", fix="report this as a bug"
        )
    total, done = sum(item.fact.num_bytes for item in items), 0
    ours, theirs = torch.empty(BUFFER, dtype=torch.uint8), torch.empty(BUFFER, dtype=torch.uint8)
    for item in items:
        other = replace(item, stored=result.tensors[item.name])
        for box in blocks(whole(item.stored.shape), BUFFER // DTYPE_BYTES[item.dtype]):
            values = item.block(box, theirs, reader)
            if not torch.equal(other.block(box, ours, reader), values):
                raise VerifyError(
                    f"the converted {place}",
                    why=f"its values at {list(box.starts)} are not the source's",
                    fix="look at the disk, and whether another program writes to the source; nothing was moved to its place",
                    name=item.name,
                )
            done += len(values)
            progress("comparing", done, total)
