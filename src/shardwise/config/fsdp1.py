"""FSDP1's options in our words: what each of its strategies means, and which of its options have no meaning any more.

The mapping of strategies is torch's own advice for FSDP2: a 1-D mesh for the full strategies, a 2-D one for the hybrid
ones, ``reshard_after_forward`` off where only gradients and optimizer state are sharded.
"""

import warnings

from shardwise.config.options import Parallel, Prefetch, Sharding
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

__all__ = ["STRATEGIES", "from_fsdp1"]

STRATEGIES = {  # name -> (hybrid, freed after forward)
    "FULL_SHARD": (False, True),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (True, False),
    "_HYBRID_SHARD_ZERO2": (True, False),  # its private name in torch
    "NO_SHARD": (False, False),
}
_BACKWARD = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_WRAP = ("NO_WRAP", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP")


def from_fsdp1(
    sharding_strategy: str = "FULL_SHARD",
    *,
    ranks_per_node: int | None = None,
    cpu_offload: bool = False,
    backward_prefetch: str | None = "BACKWARD_PRE",
    forward_prefetch: bool = False,
    auto_wrap_policy: str = "NO_WRAP",
    min_num_params: int = 100_000,
    transformer_layer_cls: str | None = None,
    mixed_precision: str | None = None,
    use_orig_params: bool | None = None,
    sync_module_states: bool = True,
    limit_all_gathers: bool = True,
) -> Parallel:
    """The layout and options that mean what FSDP1 (or Accelerate, or oumi) is given in these words.

    Args:
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2 or NO_SHARD.
        ranks_per_node: for the hybrid ones: they shard within a node and replicate across nodes.
        cpu_offload: keep shards in host memory.
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST, or NO_PREFETCH (also None).
        forward_prefetch: gather one unit ahead in forward.
        auto_wrap_policy: NO_WRAP, SIZE_BASED_WRAP (by ``min_num_params``) or TRANSFORMER_BASED_WRAP (by
            ``transformer_layer_cls``, class names with commas).
        mixed_precision: None, "bf16" or "fp16".
        use_orig_params, sync_module_states, limit_all_gathers: have no counterpart; another value than the default is
            warned about.

    Raises:
        ConfigError: a word that FSDP1 does not have, or a hybrid strategy without ``ranks_per_node``.

    Warns:
        UserWarning: for each option whose meaning changes or goes.

    Example:
        >>> from_fsdp1("HYBRID_SHARD", ranks_per_node=8).layout
        'dp_replicate=-1,dp_shard=8'
    """
    _check_word("sharding_strategy", sharding_strategy, STRATEGIES)
    _check_word("backward_prefetch", backward_prefetch or "NO_PREFETCH", _BACKWARD)
    _check_word("auto_wrap_policy", auto_wrap_policy, _WRAP)
    _warn_of_gone(use_orig_params=(use_orig_params, None), sync_module_states=(sync_module_states, True),
                  limit_all_gathers=(limit_all_gathers, True))  # fmt: skip
    if sharding_strategy == "NO_SHARD":
        _warn("sharding_strategy=NO_SHARD", "it is plain data parallelism: DDP is used")
        return Parallel(layout="dp_replicate=-1", sharding=Sharding(engine="ddp"), precision=mixed_precision)
    hybrid, reshard = STRATEGIES[sharding_strategy]
    if hybrid and ranks_per_node is None:
        raise ConfigError(
            f"sharding_strategy={sharding_strategy} without ranks_per_node",
            why="it shards within a node and replicates across nodes",
            fix="say how many ranks a node has: ranks_per_node=8",
        )
    if backward_prefetch == "BACKWARD_POST":
        _warn("backward_prefetch=BACKWARD_POST", "FSDP2 has no such order: BACKWARD_PRE is used")
    if mixed_precision:
        _warn(f"mixed_precision={mixed_precision}", "gradients are reduced, and buffers kept, in float32")
    return Parallel(
        layout=f"dp_replicate=-1,dp_shard={ranks_per_node}" if hybrid else "dp_shard=-1",
        precision=mixed_precision,
        sharding=Sharding(
            engine="fsdp2",
            reshard_after_forward=reshard,
            offload=cpu_offload,
            prefetch=Prefetch(
                forward=int(forward_prefetch), backward=int(backward_prefetch not in (None, "NO_PREFETCH"))
            ),
            **_units(auto_wrap_policy, min_num_params, transformer_layer_cls),
        ),
    )


def _units(policy: str, min_num_params: int, transformer_layer_cls: str | None) -> dict:
    if policy == "SIZE_BASED_WRAP":
        return {"min_unit_params": min_num_params}
    if policy == "TRANSFORMER_BASED_WRAP":
        return {"units": transformer_layer_cls} if transformer_layer_cls else {}
    _warn("auto_wrap_policy=NO_WRAP", 'blocks are found all the same; Sharding(units="none") is one flat unit')
    return {}


def _check_word(key: str, word: str, known) -> None:
    if word not in known:
        raise ConfigError(
            f"{key}={word!r}", why="FSDP1 has no such value", fix=did_you_mean(word, list(known), what="values")
        )


def _warn_of_gone(**options: tuple) -> None:
    for key, (value, default) in options.items():
        if value != default:
            _warn(f"{key}={value}", "FSDP2 has no counterpart: parameters are always the model's own, of equal values")


def _warn(given: str, why: str) -> None:
    warnings.warn(f"{given}: {why}", stacklevel=3)
