"""Weights out: a plain safetensors file that any tool opens."""

import contextlib
import math
import os
import stat
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.parallel import runtime_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.state.full import full_state_dict

__all__ = ["save_weights", "weights_bytes"]

WEIGHTS = "model.safetensors"


HEADER = 256  # bytes for a tensor's name, dtype, shape and place in the file


def weights_bytes(model: nn.Module) -> int:
    """Size in bytes of the file that :func:`save_weights` would write, a little too large; no communication."""
    recipe = runtime_of(model).recipe
    tensors = [(param.shape, param.storage) for param in recipe.params.values()]
    tensors += [(buffer.shape, buffer.dtype) for buffer in recipe.buffers.values() if buffer.persistent]
    return sum(math.prod(shape) * DTYPE_BYTES.get(dtype, 8) + HEADER for shape, dtype in tensors)


def save_weights(model: nn.Module, dest: str | os.PathLike[str]) -> Path:
    """Writes every parameter and persistent buffer to ``dest/model.safetensors``; returns that path. All ranks must call.

    The file holds canonical names; a tied tensor is stored once, under its first name. It appears whole or not at all:
    written beside its place, then renamed. Rank 0 writes, and holds the model once on its host meanwhile.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
    """
    runtime, path = runtime_of(model), Path(dest) / WEIGHTS
    state = full_state_dict(model)
    problem: ShardwiseError | None = None
    if runtime.world.is_main:
        aliases = {
            alias
            for fact in (*runtime.recipe.params.values(), *runtime.recipe.buffers.values())
            for alias in fact.aliases
        }
        stored = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
        part = path.with_name(f".{WEIGHTS}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = _mode_of_new_file(part)
            save_file(stored, part, metadata={"format": "pt"})
            _give_mode(part, mode)
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):  # what was not made cannot be removed
                part.unlink()
            problem = CheckpointError(
                f"weights to {path}",
                why=f"writing failed: {getattr(error, 'strerror', None) or error}",
                fix="free space or choose a directory you can write to; an older file there is as it was",
            )
    problem = runtime.world.broadcast(problem)
    if problem is not None:
        raise problem
    return path


def _mode_of_new_file(path: Path) -> int:
    """Makes an empty file, and gives the permissions that the umask (or the folder's rules) gave it."""
    with path.open("wb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _give_mode(path: Path, mode: int) -> None:
    """safetensors makes files that their owner alone can read."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        with contextlib.suppress(PermissionError):  # a file system that keeps no permissions
            path.chmod(mode)
