"""FSDP1's options as they are called in Python: a face of the dialect, whose table says what each of them means here."""

import inspect
import warnings
from collections.abc import Iterable
from enum import Enum
from typing import Any

from msgspec.structs import replace

from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.config.suggest import did_you_mean
from shardwise.dialects.answers import imported
from shardwise.dialects.table import load
from shardwise.errors import ConfigError
from shardwise.techniques import Parallel
from shardwise.techniques.data.options import Sharding

_ROWS = load("fsdp1").rows
STRATEGIES = _ROWS["sharding_strategy"].takes
_MIN_NUM_PARAMS = 100_000


@public_call()
def from_fsdp1(
    sharding_strategy: str | Enum = "FULL_SHARD",
    *,
    enable_fsdp: bool = True,
    ranks_per_node: int | None = None,
    cpu_offload: bool = False,
    backward_prefetch: str | Enum | None = "BACKWARD_PRE",
    forward_prefetch: bool = False,
    auto_wrap_policy: str | Enum = "NO_WRAP",
    min_num_params: int | None = _MIN_NUM_PARAMS,
    transformer_layer_cls: str | type | Iterable[str | type] | None = None,
    mixed_precision: str | None = None,
    state_dict_type: str | Enum = "FULL_STATE_DICT",
    use_orig_params: bool | None = None,
    sync_module_states: bool = True,
    limit_all_gathers: bool = True,
) -> Parallel:
    """The layout and options that correspond to these options of FSDP1 (or of Accelerate, or oumi).

    Pass ``layout`` of the result to ``sw.init``, and ``**options()`` to ``sw.parallelize``. Every field of oumi's
    ``FSDPParams`` is accepted by its name, with its default except for ``enable_fsdp``.

    Args:
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2 or NO_SHARD, or torch's enum.
        enable_fsdp: False: plain data parallelism (DDP), and no other option counts. oumi's default is False; here it
            is True, as FSDP1 is what the function is called for.
        ranks_per_node: for the hybrid ones, which shard within a node and replicate across nodes; None: as many as the
            launcher reports, ``dp_shard=node``.
        cpu_offload: keep shards in host memory.
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST, or NO_PREFETCH (also None), or torch's enum.
        forward_prefetch: gather one unit ahead in forward.
        auto_wrap_policy: NO_WRAP, SIZE_BASED_WRAP (by ``min_num_params``) or TRANSFORMER_BASED_WRAP (by
            ``transformer_layer_cls``).
        min_num_params: for SIZE_BASED_WRAP; None = 100,000, the default.
        transformer_layer_cls: for TRANSFORMER_BASED_WRAP: class names with commas, a class, or several; None = what the
            model lists in ``_no_split_modules``, as Accelerate reads it.
        mixed_precision: None (also "no"), "bf16" or "fp16".
        state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT, or torch's enum. Here the function
            that you call decides what is written, so all but the default raise a warning.
        use_orig_params, sync_module_states, limit_all_gathers: have no counterpart; another value than the default
            raises a warning.

    Raises:
        ConfigError: a word that FSDP1 does not have, or a switch that is neither True nor False.

    Warns:
        UserWarning: for each option whose meaning changes, or that has none here.

    Example:
        >>> from_fsdp1("HYBRID_SHARD").layout
        'dp_replicate=-1,dp_shard=node'
    """
    given = {**locals()}
    given["backward_prefetch"] = given["backward_prefetch"] or "NO_PREFETCH"
    given["min_num_params"] = _MIN_NUM_PARAMS if min_num_params is None else min_num_params
    given["mixed_precision"] = None if mixed_precision in ("", "no") else mixed_precision
    for key in (
        "enable_fsdp",
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "auto_wrap_policy",
        "state_dict_type",
    ):
        given[key] = _word(key, given[key])
    usual = {name: one.default for name, one in inspect.signature(from_fsdp1).parameters.items()}
    changed = {option for option in given if given[option] != usual[option]} - {"enable_fsdp"}
    if enable_fsdp:
        made, changes = _enabled(given, changed)
    else:
        made = Parallel(layout="dp_replicate=-1", sharding=Sharding(engine="ddp"))
        why = "enable_fsdp=False is plain data parallelism (DDP), which does not use it"
        changes = [(option, why) for option in given if option in changed]
    for option, why in changes:
        warnings.warn(f"{option}={given[option]}: {why}", stacklevel=level_of_caller())
    return made


def _enabled(given: dict[str, Any], changed: set[str]) -> tuple[Parallel, list[tuple[str, str]]]:
    """What the table makes of the options, and ``(option, why)`` for each that means something else here, or nothing."""
    beside = ("enable_fsdp", "ranks_per_node", "mixed_precision")  # which the table has otherwise, or not
    values = {key: value for key, value in given.items() if value not in (None, "") and key not in beside}
    classes, per_node, precision = (given[key] for key in ("transformer_layer_cls", *beside[1:]))
    if classes is not None:
        values["transformer_layer_cls"] = "named below"
    answer = imported(values, dialect="fsdp1")
    parallel = answer.parallel
    is_plain, needs_more = given["sharding_strategy"] == "NO_SHARD", bool(given["cpu_offload"] or precision)
    engine = "fsdp2" if not is_plain else "auto" if needs_more else "ddp"  # of which DDP can do none
    sharding = replace(parallel.sharding or Sharding(), engine=engine)
    if given["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and engine != "ddp":
        named = classes or "no_split"
        sharding = replace(sharding, units=named if isinstance(named, str | type) else tuple(named))
    changes = []
    for one in answer.findings:
        is_said = one.key in changed or one.key == "auto_wrap_policy"
        is_merged = one.key == "min_num_params" and one.verdict == "changed"  # what it was given for
        if one.given and one.key in given and one.verdict != "kept" and is_said and not is_merged:
            changes.append((one.key, one.say))
    if precision:
        changes.append(("mixed_precision", "gradients are reduced, and buffers kept, in float32"))
    if per_node is not None and "node" not in parallel.layout:
        same = f"{given['sharding_strategy']} is the same within and across nodes, so it is not used"
        changes.append(("ranks_per_node", same))
    layout = parallel.layout if per_node is None else parallel.layout.replace("node", str(per_node))
    return Parallel(layout=layout, precision=precision, sharding=sharding), changes


def _word(key: str, given: Any) -> Any:
    """A switch, or the word itself, or the name of the enum member."""
    if key in ("enable_fsdp", "forward_prefetch"):
        if not isinstance(given, bool):
            raise ConfigError(f"{key}={given!r}", why="it is a switch", fix=f"use {key}=True or {key}=False")
        return given
    word = given.name if isinstance(given, Enum) else given
    known = [word for word in _ROWS[key].takes if word != "none"]
    if not isinstance(word, str) or word not in known:
        fix = did_you_mean(str(word), known, what="values")
        raise ConfigError(f"{key}={given!r}", why="FSDP1 has no such value", fix=fix)
    return word
