"""Where a model's weights came from: the directory that its base is named by, and which frozen values are no longer those that it gave."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardwise.parallel import Runtime
from shardwise.parallel.copies import checksum_of
from shardwise.state.packed import packed_of
from shardwise.techniques import fold


class Origin:
    """Where a model's weights came from.

    Attributes:
        folder: the directory or file that gave more than half of the weights of its base, the last one that did; None: none did. A
            checkpoint of the run itself is none: it has that of its own record.
        files: the directory that its configuration and tokenizer files are read from; None: there is none.
        sums: frozen tensor -> checksum of this rank's part, as ``folder`` gave it.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.files: Path | None = None
        self.sums: dict[str, int] = {}


def frozen_tensors(runtime: Runtime) -> list[str]:
    """The parameters that are not trained, and all in which weights are stored packed; empty if nothing is frozen."""
    parts = {part for packed in packed_of(runtime).values() for part in packed.parts.values()}
    found = [name for name, param in runtime.recipe.params.items() if not param.trainable]
    return [*found, *(name for name in runtime.recipe.buffers if name in parts)] if found else []


def note_load(runtime: Runtime, names: Collection[str], base: Path, folder: Path | None) -> None:
    """Notes that these tensors were loaded. Few of them, beside a base that is there, do not make their file the model's origin.

    Args:
        runtime: of the model.
        names: canonical, of what was loaded.
        base: the directory or file.
        folder: the model directory that it is; None: it is none, and configuration and tokenizer stay those from before.
    """
    own, recipe = {*fold.own_names(runtime.recipe)}, runtime.recipe
    sizes = {name: math.prod(param.shape) for name, param in recipe.params.items() if name not in own}
    sizes |= {part: math.prod(recipe.buffers[part].shape) for part in frozen_tensors(runtime) if part in recipe.buffers}
    if 2 * sum(sizes.get(name, 0) for name in names) <= sum(sizes.values()):
        return
    origin = runtime.memory(Origin)
    origin.folder, origin.sums = base.resolve(), sums_now(runtime, names)
    if folder is not None:
        origin.files = folder.resolve()


def sums_now(runtime: Runtime, names: Collection[str] | None = None) -> dict[str, int]:
    """The checksums of the frozen tensors, of those among ``names``."""
    local = runtime.local_tensors()
    return {
        name: checksum_of(local[name])
        for name in frozen_tensors(runtime)
        if name in local and (names is None or name in names)
    }


def others(runtime: Runtime) -> list[str]:
    """The frozen tensors whose values are not those that :attr:`Origin.folder` gave, on any rank. All ranks must call it."""
    known = runtime.memory(Origin).sums
    mine = [name for name, found in sums_now(runtime).items() if known.get(name) != found]
    told = {name for each in runtime.world.gather(mine) for name in each}
    return [name for name in frozen_tensors(runtime) if name in told]


def record_of(runtime: Runtime) -> dict[str, Any] | None:
    """What a checkpoint says of a model's origin, the same on every rank; None: it came from no directory. All ranks must call it."""
    folder = runtime.memory(Origin).folder
    if folder is None:
        return None
    return {"folder": runtime.world.broadcast(str(folder)), "other": others(runtime)}


def note_resume(runtime: Runtime, record: Mapping[str, Any] | None, place: Path) -> None:
    """Notes that all values are those of a checkpoint. All ranks must call it.

    Args:
        runtime: of the model.
        record: what the checkpoint says by :func:`record_of`.
        place: of the checkpoint, in which configuration and tokenizer are.
    """
    origin = runtime.memory(Origin)
    origin.files = place.resolve()
    if record is None or (origin.folder is not None and not others(runtime)):
        return  # what was loaded before is the same, and where it is now
    origin.folder = Path(record["folder"])
    origin.sums = {name: found for name, found in sums_now(runtime).items() if name not in record["other"]}


def note_beside(runtime: Runtime, folder: str | None) -> None:
    """Notes that a model has the frozen weights that a checkpoint names by ``folder``. What was loaded in this process is where they are now."""
    origin = runtime.memory(Origin)
    if origin.folder is None and folder is not None:
        origin.folder, origin.sums = Path(folder), sums_now(runtime)
