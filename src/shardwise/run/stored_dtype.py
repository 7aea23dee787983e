"""Refuses, before any rank starts, a model directory in 16 bits for a model that is stored in 32. Torch-free: only the headers
of its safetensors files are read."""

import json
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig
from shardwise.techniques.precision.options import precision_of

__all__ = ["check_stored_dtype", "dtypes_in"]

_HALF = {"BF16": "bfloat16", "F16": "float16"}
_LONGEST = 100 << 20  # bytes of a header, as the format allows


def check_stored_dtype(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses ``model.hf`` in bfloat16 or float16 without ``model.cast``: a run stores float32, so loading would refuse each
    of its tensors. What may change that (transforms, renamed tensors, another storage) is left to the ranks.

    Raises:
        ConfigError: with the key that converts.
    """
    model, parallel = config.model, config.parallel
    if model.hf is None or model.weights not in (None, model.hf) or model.cast or model.rename or parallel.transforms:
        return
    storage, found = precision_of(parallel.precision).storage, dtypes_in(Path(model.hf))
    if storage not in (None, "float32") or not found or not found <= _HALF.keys():
        return
    name = " and ".join(sorted(_HALF[dtype] for dtype in found))
    raise ConfigError(
        f"model.hf={model.hf!r} ({origins['model.hf']}): its weights are {name}",
        why="the run stores float32, in which small steps of the optimizer are not lost, and converts only if it is asked to",
        fix="add --model.cast=true; to compute in bfloat16 all the same, --parallel.precision=bf16",
    )


def dtypes_in(folder: Path) -> set[str]:
    """The dtypes of floating tensors in the safetensors files of a directory, in the format's words; what cannot be read is
    left out."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size)) if size <= _LONGEST else {}
        except (OSError, ValueError):
            continue
        found |= {entry.get("dtype", "") for name, entry in header.items() if name != "__metadata__"}
    return {dtype for dtype in found if dtype[:1] in ("F", "B") and dtype != "BOOL"}
