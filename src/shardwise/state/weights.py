"""Weights out: a plain safetensors file that any tool opens."""

import contextlib
import math
import os
import stat
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from shardwise.errors import CheckpointError, ShardwiseError, UnsupportedError
from shardwise.parallel import runtime_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.state.extra import EXTRA_STATE
from shardwise.state.full import full_state_dict

__all__ = ["check_dtypes", "save_weights", "weights_bytes"]

WEIGHTS = "model.safetensors"


_STORABLE = frozenset(
    {
        "float64", "float32", "float16", "bfloat16", "complex64", "bool",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    }
)  # fmt: skip

HEADER = 256  # bytes for a tensor's name, dtype, shape and place in the file


def weights_bytes(model: nn.Module) -> int:
    """Size in bytes of the file that :func:`save_weights` would write, a little too large; no communication."""
    recipe = runtime_of(model).recipe
    tensors = [(param.shape, param.storage) for param in recipe.params.values()]
    tensors += [(buffer.shape, buffer.dtype) for buffer in recipe.buffers.values() if buffer.persistent]
    return sum(math.prod(shape) * DTYPE_BYTES.get(dtype, 8) + HEADER for shape, dtype in tensors)


def check_dtypes(model: nn.Module) -> None:
    """Raises UnsupportedError, naming the tensor, if :func:`save_weights` could not write ``model``; no communication, equal
    on every rank."""
    recipe = runtime_of(model).recipe
    dtypes = {name: param.storage for name, param in recipe.params.items()}
    dtypes |= {name: buffer.dtype for name, buffer in recipe.buffers.items() if buffer.persistent}
    for name, dtype in dtypes.items():
        if dtype not in _STORABLE:
            raise UnsupportedError(
                f"weights with a tensor of {dtype}",
                why="they are written as safetensors, a format without this dtype",
                fix="take state = sw.full_state_dict(model) on every rank, and torch.save(state, file) on rank 0; or store "
                "complex64, or real and imaginary part in two parameters",
                name=name,
            )


def save_weights(model: nn.Module, dest: str | os.PathLike[str]) -> Path:
    """Writes every parameter and persistent buffer to ``dest/model.safetensors``; returns that path. All ranks must call.

    The file holds canonical names; a tied tensor is stored once, under its first name. It appears whole or not at all:
    written beside its place, then renamed. Rank 0 writes, and holds the model once on its host meanwhile. What modules
    return by ``get_extra_state`` is left out, with a warning: the format holds tensors only.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
        UnsupportedError: on every rank, for a tensor of a dtype that the format does not know (complex128).
    """
    runtime, path = runtime_of(model), Path(dest) / WEIGHTS
    check_dtypes(model)
    state = full_state_dict(model)
    _leave_out_extra_states(state)
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


def _leave_out_extra_states(state: dict[str, Any]) -> None:
    extra = [name for name in state if name.rpartition(".")[2] == EXTRA_STATE]
    filled = [name for name in extra if state.pop(name) is not None]
    if filled:
        warnings.warn(
            f"weights without {', '.join(filled)}: safetensors holds tensors only; what get_extra_state returned is in "
            "sw.full_state_dict(model), to be kept with torch.save",
            stacklevel=3,
        )


def _mode_of_new_file(path: Path) -> int:
    """Makes an empty file, and gives the permissions that the umask (or the folder's rules) gave it."""
    with path.open("wb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _give_mode(path: Path, mode: int) -> None:
    """safetensors makes files that their owner alone can read."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        with contextlib.suppress(PermissionError):  # a file system that keeps no permissions
            path.chmod(mode)
