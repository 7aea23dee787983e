"""Everything that is laid over a module, one folder each. A new one is a folder and a row here; see ``technique.py``.

The order is that of what happens: ``prepare`` is called from the first to the last, before the module is read; then ``rule``, so that a
technique knows the dtypes, cuts and units of those before it; then ``edit`` and, on the module, ``act``: inside of what shards it, the
sharding itself (``data``), and around it.
"""

from importlib import import_module

from shardwise.techniques.options import make_parallel
from shardwise.techniques.technique import Technique

__all__ = ["AXES_IN_USE", "TECHNIQUES", "Parallel"]

TECHNIQUES: tuple[Technique, ...] = tuple(
    import_module(f"{__name__}.{name}").TECHNIQUE
    for name in (
        "transforms",  # functions of the user's own that change the module
        "precision",  # dtypes of what is stored, computed and summed
        "data",  # data parallelism: shards (FSDP2) or whole copies (DDP), units, buffers
        "remat",  # activation checkpointing
        "compile",  # torch.compile of blocks
    )
)

Parallel = make_parallel(TECHNIQUES)

AXES_IN_USE = tuple(axis for technique in TECHNIQUES for axis in technique.axes)
"""Mesh axes of a layout that may have more than one rank."""
