"""What a user may choose: option records, the sections of a run, and the strict reader of both. Torch-free."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.config.loader import Loaded, load_config
    from shardwise.config.options import Compile, Parallel, Precision, Remat, Sharding, precision_of
    from shardwise.config.render import dump_config, print_config
    from shardwise.config.schema import RunConfig
    from shardwise.config.target import check_target, load_target

__all__ = [
    "Compile",
    "Loaded",
    "Parallel",
    "Precision",
    "Remat",
    "RunConfig",
    "Sharding",
    "check_target",
    "dump_config",
    "load_config",
    "load_target",
    "precision_of",
    "print_config",
]

_HOMES = {
    "Compile": "options",
    "Loaded": "loader",
    "Parallel": "options",
    "Precision": "options",
    "Remat": "options",
    "RunConfig": "schema",
    "Sharding": "options",
    "check_target": "target",
    "dump_config": "render",
    "load_config": "loader",
    "load_target": "target",
    "precision_of": "options",
    "print_config": "render",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line's top-level help pays for none of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
