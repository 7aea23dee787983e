"""Disk space: compares what a run will write with what is free, and finds other folders for weights that do not fit.

A run that finds the disk full after training would lose its weights, so the space is checked at its start: by the
launcher for the small files, by rank 0 with the weights once the model is built. Torch-free: launchers use it too.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shardwise.config.folders import check_place, check_writable, refuse_within_checkpoint, spare_bytes
from shardwise.errors import ConfigError
from shardwise.recipe import human_bytes
from shardwise.run.config import RunConfig

METRICS_LINE = 800  # bytes; the line of a step has about 750
TEXTS = 64 << 10  # bytes: the resolved configuration, the recipe, two samples
PICTURE = 256 << 10
AT_THE_END = {"export": "weights", "adapter": "adapters", "base": "the base in 4 bits"}  # by their key in checkpoint


def small_files_bytes(config: RunConfig, steps: int | None = None) -> int:
    """Estimates the most that a run writes apart from weights, in bytes: metrics, picture, configuration and recipe.
    ``steps``: those of its epochs; None: not counted yet."""
    log, steps = config.log, config.train.steps or steps or 1
    lines = 6 + steps // log.every + steps // (config.train.eval_every or steps)
    return lines * METRICS_LINE + TEXTS + (PICTURE if log.plot else 0)


def check_space(
    config: RunConfig,
    at_the_end: Mapping[str, int] | None = None,
    checkpoint_bytes: int | None = None,
    steps: int | None = None,
) -> None:
    """Refuses a run whose files do not fit on the disk. It does not see quotas, or what other processes write
    meanwhile.

    Args:
        at_the_end: key in ``AT_THE_END`` -> size of what the run leaves there; None if the model is not built yet.
        checkpoint_bytes: size of a checkpoint; None likewise. One must fit in addition to what a save leaves free: with
            less space, none would ever be written.
        steps: of a run of epochs, once they are counted.
    """
    folder, kept, small = Path(config.log.dir), config.checkpoint, small_files_bytes(config, steps)
    needs = [(folder, small, f"{human_bytes(small)} of metrics, picture and texts", "log.dir")]
    for key, size in (at_the_end or {}).items():
        needs.append(
            (folder / getattr(kept, key), size, f"{human_bytes(size)} of {AT_THE_END[key]}", f"checkpoint.{key}")
        )
    if checkpoint_bytes is not None and kept.are_made:
        text = f"{human_bytes(checkpoint_bytes)} for a checkpoint"
        needs.append((folder / "checkpoints", checkpoint_bytes, text, "log.dir"))
    disks = [_standing(path).stat().st_dev for path, *_ in needs]
    for disk in dict.fromkeys(disks):
        here = [need for need, its in zip(needs, disks, strict=True) if its == disk]
        has_checkpoints = folder / "checkpoints" in (need[0] for need in here)
        path, total = here[0][0], sum(need[1] for need in here)
        size, _, free = shutil.disk_usage(_standing(path))
        spare = spare_bytes(size) if has_checkpoints else 0
        # A file system of size 0 (/proc) is not checked: writing there gives the right error.
        if size and free < total + spare:
            raise ConfigError(
                f"{here[0][3]}: {str(path)!r}, with {human_bytes(free)} free on its disk",
                why=f"the run will write about {human_bytes(total)}: {', '.join(need[2] for need in here)}"
                + (f"; {human_bytes(spare)} stay free for others" if spare else ""),
                fix=f"free {human_bytes(total + spare - free)} there, or name a folder on another disk: --{here[0][3]}=PATH"
                + ("; or keep no checkpoints: --checkpoint.every=null" if has_checkpoints else ""),
            )


def written_folders(config: RunConfig, has_adapters: bool) -> dict[str, tuple[Path, str]]:
    """The folders that a run writes at its end, and the kind of each (:mod:`shardwise.config.folders`), by key of ``checkpoint``."""
    keys = (("export", "weights"), *((("adapter", "adapter"), ("base", "weights")) if has_adapters else ()))
    named = ((key, getattr(config.checkpoint, key), kind) for key, kind in keys)
    return {key: (Path(config.log.dir) / name, kind) for key, name, kind in named if name is not None}


def check_folders(config: RunConfig, has_adapters: bool) -> None:
    """Refuses folders that cannot be written, or where something else would be lost. They are written last, when the whole run would be
    lost."""
    root = Path(config.log.dir).resolve()
    given = f"log.dir={config.log.dir!r}"
    check_writable(root, given, "--log.dir=")
    refuse_within_checkpoint(root, "run", given, "--log.dir=")
    for key, (folder, kind) in written_folders(config, has_adapters).items():
        check_place(folder.resolve(), kind, f"checkpoint.{key}: {str(folder)!r}", f"--checkpoint.{key}=")


def spare_folders(size: int) -> list[Path]:
    """Makes new folders for ``size`` bytes that could not be written where they belong: in the working directory and in
    the temporary directory, each only if its disk has that much free. The caller removes those it does not use."""
    found = []
    for parent in dict.fromkeys((os.getcwd(), tempfile.gettempdir())):
        try:
            if shutil.disk_usage(parent).free > size:
                found.append(Path(tempfile.mkdtemp(prefix="shardwise-weights-", dir=parent)))
        except OSError:
            continue  # this one cannot be written either
    return found


def _standing(path: Path) -> Path:
    """``path`` if it is an existing folder, or its nearest parent that is."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.isdir(place))
