"""Which implementation of attention a model of transformers runs: ``model.args.attn_implementation``, checked before any rank
starts, and replaced where the proof of a run computes on the CPU. Torch-free."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import msgspec

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError
from shardwise.launch import is_cpu
from shardwise.run.config import RunConfig
from shardwise.techniques.precision.options import precision_of

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Arguments that are no fields of a configuration, but choose code in transformers."""

_PACKAGES = {
    "sdpa": None,
    "eager": None,
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flex_attention": None,
}
_HALF = {"bfloat16", "float16"}


def check_attention_args(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses an implementation of attention that is not known, whose package is missing, or that cannot run as the run
    computes."""
    given = config.model.args.get("attn_implementation")
    if config.model.hf is None or given is None:
        return
    origin = origins.get("model.args.attn_implementation", origins.get("model.args", "model.args"))
    # Composite models (of text and images) take one for each part.
    for name in given.values() if isinstance(given, dict) else (given,):
        shown = f"model.args.attn_implementation={name!r} ({origin})"
        if name not in _PACKAGES:
            raise ConfigError(
                shown,
                why="no attention of that name is in transformers; kernels of the hub are not used, since nothing is downloaded",
                fix=did_you_mean(str(name), list(_PACKAGES), what="implementations"),
            )
        if not name.startswith("fl"):
            continue
        package = _PACKAGES[name]
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                shown,
                why=f"it needs the package {package}, which is not installed",
                fix="install it, or use sdpa, whose kernels are in PyTorch",
            )
        if is_cpu(config.launch.device):
            raise ConfigError(
                f"{shown} with launch.device={config.launch.device}",
                why="the run is on the CPU, and there it has no backward",
                fix="use sdpa or eager",
            )
        precision = precision_of(config.parallel.precision)
        if package is not None and (precision.compute or precision.storage) not in _HALF:
            raise ConfigError(
                f"{shown} with parallel.precision={config.parallel.precision!r}",
                why="its kernels compute in bfloat16 or float16",
                fix="add --parallel.precision=bf16, or use sdpa",
            )


def without_kernels(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with an attention that runs in float64 on the CPU, and a text for what was replaced."""
    given: Any = config.model.args.get("attn_implementation")
    names = [*given.values()] if isinstance(given, dict) else [given]
    wrong = sorted({name for name in names if isinstance(name, str) and name.startswith("fl")})
    if config.model.hf is None or not wrong:
        return config, []
    model = msgspec.structs.replace(config.model, args={**config.model.args, "attn_implementation": "sdpa"})
    return msgspec.structs.replace(config, model=model), [f"{' and '.join(wrong)}, in whose place sdpa ran"]
