"""The damage of :mod:`state.mutant_checkpoints`, where it has a counterpart, done to a directory by ``torch.distributed.checkpoint``.

A kind is ``(rng, folder, other) -> None``, as there, and is called as it is there. What is loaded of it is what stock torch loads.
"""

import contextlib
import io
import logging
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from state.mutant_checkpoints import Kind, Runs, flip, swap_stretches, zero
from state.runs import Average, Texts, equal, make
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwise as sw

__all__ = ["DCP_KINDS", "OUTCOMES", "dcp_outcomes", "saved_both"]

OUTCOMES = ("refused", "the same", "other values", "code was run")
DATA, METADATA = ("__0_0.distcp", "__1_0.distcp"), ".metadata"


def saved_both(layout: str, root: str) -> None:
    """Trains two windows and saves after each of them: a checkpoint below ``root``, and the same state by torch to ``dcp-STEP``."""
    world, model, step = make(layout)
    with world, sw.CheckpointManager(root, step, keep=None, extra={"average": Average()}, async_save=False) as manager:
        for window in manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)):
            step(window)
            manager.save()
            weights, optimizer = get_state_dict(model, step.optim)
            dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=f"{root}/dcp-{step.num_steps}")
            if step.num_steps == 2:
                break


def dcp_outcomes(good: str, place: str, kinds: list[str], num: int, seed: int) -> dict[str, list[str]]:
    """Kind -> of each mutant what came of loading it: one of ``OUTCOMES``."""
    whole = _loaded(Path(good) / "dcp-2", Path(good) / "dcp-2")
    found: dict[str, list[str]] = {}
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    for kind in kinds:
        found[kind] = []
        for number in range(num):
            folder = Path(place) / f"{kinds.index(kind)}-{number}" / "dcp-2"
            shutil.copytree(Path(good) / "dcp-2", folder)
            DCP_KINDS[kind](random.Random(f"{seed} {kind} {number}"), folder, Path(good) / "dcp-1")
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # torch prints what it raises as well
                    found_there = _loaded(folder, Path(good) / "dcp-2")
                told = "the same" if equal(found_there, whole) else "other values"
            except (Exception, dcp.CheckpointException):
                told = "refused"
            found[kind].append("code was run" if (folder.parent / "mark").exists() else told)
            shutil.rmtree(folder.parent)
    return found


def _loaded(folder: Path, good: Path) -> dict:
    """What stock torch loads into the tensors that a run has which saved ``good``."""
    entries = dcp.FileSystemReader(good).read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def _bit_in_values(part: str) -> Kind:
    """In the values of a tensor of the model, or of the optimizer."""

    def act(rng: random.Random, folder: Path, other: Path) -> None:
        info, values = _place(rng, folder, lambda name: name.startswith(part))
        path = folder / info.relative_path
        data = bytearray(path.read_bytes())
        begin = data.index(values, info.offset, info.offset + info.length)
        data[begin + rng.randrange(len(values))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    return act


def _place(rng, folder, wanted):
    """Where a tensor's archive lies, and the bytes of its values in there."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = [(index, info) for index, info in metadata.storage_data.items() if wanted(index.fqn)]
    while True:
        index, info = rng.choice(sorted(places, key=lambda item: str(item[0])))
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            continue
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            raw = file.read(info.length)
        tensor = torch.load(io.BytesIO(raw), weights_only=True)
        values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if values and any(values):
            return info, values


def _bit_in_metadata(rng, folder, other):
    flip(rng, folder / METADATA)


def _any_file(rng, folder) -> Path:
    return folder / rng.choice([*DATA, METADATA])


def truncated(rng, folder, other):
    path = _any_file(rng, folder)
    os.truncate(path, rng.randrange(path.stat().st_size))


def longer(rng, folder, other):
    with _any_file(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def missing(rng, folder, other):
    _any_file(rng, folder).unlink()


def extra(rng, folder, other):
    (folder / rng.choice(["__2_0.distcp", "notes.txt", "model.safetensors"])).write_bytes(b"x")


def swapped(rng, folder, other):
    (folder / DATA[0]).rename(folder / "aside")
    (folder / DATA[1]).rename(folder / DATA[0])
    (folder / "aside").rename(folder / DATA[1])


def of_another_step(rng, folder, other):
    name = rng.choice(DATA)
    shutil.copy(other / name, folder / name)


def swapped_stretches(rng, folder, other):
    swap_stretches(rng, folder / rng.choice(DATA))


def zeroed(rng, folder, other):
    zero(rng, folder / rng.choice(DATA))


def manifest_of_another(rng, folder, other):
    shutil.copy(other / METADATA, folder / METADATA)


def link(rng, folder, other):
    name = rng.choice([*DATA, METADATA])
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def forged_pickle(rng, folder, other):
    (folder / METADATA).write_bytes(pickle.dumps(Runs(folder.parent / "mark")))


DCP_KINDS: dict[str, Kind] = {
    "a bit in the weights": _bit_in_values("model."),
    "a bit in the optimizer's tensors": _bit_in_values("optim."),
    "a bit in the manifest": _bit_in_metadata,
    "a truncated file": truncated,
    "a file with more at its end": longer,
    "a missing file": missing,
    "an extra file": extra,
    "two files swapped": swapped,
    "a file of another step": of_another_step,
    "two stretches swapped": swapped_stretches,
    "a stretch of zeros": zeroed,
    "the manifest of another step": manifest_of_another,
    "a link for a file": link,
    "forged: pickles that run code": forged_pickle,
}
