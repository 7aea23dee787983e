"""Option records and the strict reader of configuration files. Torch-free."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.config.loader import Loaded
    from shardwise.config.render import dump_config, print_config
    from shardwise.config.target import check_target, load_target

__all__ = ["Loaded", "check_target", "dump_config", "load_target", "print_config"]

_HOMES = {
    "Loaded": "loader",
    "check_target": "target",
    "dump_config": "render",
    "load_target": "target",
    "print_config": "render",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line's top-level help imports none of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
