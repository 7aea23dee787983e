"""The techniques that ``parallelize`` applies to a module, one folder each. To add one: a folder and a row here.

See ``technique.py``. The order of the rows is the order in which things happen. ``prepare`` is called from first to
last, before the module is read; then ``rule``, so that a technique knows the dtypes, cuts and units of those before it;
then ``edit``; then, on the module, ``act``: inside of the sharding, the sharding itself (``data``), and around it.
"""

from importlib import import_module

from shardwise.techniques.options import make_parallel
from shardwise.techniques.technique import MeshAxis, Technique

__all__ = ["AXES_IN_USE", "MESH_AXES", "TECHNIQUES", "Parallel"]

TECHNIQUES: tuple[Technique, ...] = tuple(
    import_module(f"{__name__}.{name}").TECHNIQUE
    for name in (
        "transforms",  # the user's own functions that change the module
        "lora",  # low-rank adapters beside frozen linear layers
        "quantize",  # frozen weights in 4 bits
        "precision",  # mixed precision: dtypes of storage, compute and gradient sums
        "tp",  # tensor parallelism: linear layers cut over ranks with the same data
        "cp",  # context parallelism: positions cut over ranks with the same samples
        "data",  # data parallelism: shards (FSDP2) or full copies (DDP), units, buffers
        "remat",  # activation checkpointing
        "compile",  # torch.compile of blocks
    )
)

Parallel = make_parallel(TECHNIQUES)

_AXES = tuple(axis for technique in TECHNIQUES for axis in technique.axes)

AXES_IN_USE = tuple(axis if isinstance(axis, str) else axis.name for axis in _AXES)
"""Mesh axes of a layout that may have more than one rank."""

MESH_AXES = {axis.name: axis for axis in _AXES if isinstance(axis, MeshAxis)}
"""Name -> what the ranks along an axis are to each other, of each axis of which a technique says it."""
