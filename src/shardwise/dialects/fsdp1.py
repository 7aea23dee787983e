"""Translates FSDP1's options: what each of its strategies means here, and which of its options have no counterpart.

The mapping of strategies is torch's own advice for FSDP2: a 1-D mesh for the full strategies, a 2-D one for the hybrid
ones, ``reshard_after_forward`` off where only gradients and optimizer state are sharded.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError
from shardwise.techniques import Parallel
from shardwise.techniques.data.options import Prefetch, Sharding

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
_FILES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
_MIN_NUM_PARAMS = 100_000
_USUAL = {"use_orig_params": None, "sync_module_states": True, "limit_all_gathers": True}
_NO_COUNTERPART = "FSDP2 has no counterpart: parameters are always the model's own, of equal values"
_WRITTEN = {  # state_dict_type -> what is written instead; the default, full weights, is what save_weights writes
    "SHARDED_STATE_DICT": "what is called decides: checkpoints of sw.CheckpointManager are sharded, and readable under "
    "every layout; sw.save_weights and sw.full_state_dict write whole tensors",
    "LOCAL_STATE_DICT": "flattened local pieces are FSDP1's alone: in checkpoints of sw.CheckpointManager each rank writes what it "
    "holds, by name, readable under every layout",
}


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
    said = _Fsdp1Options(
        is_enabled=_switch("enable_fsdp", enable_fsdp),
        strategy=_word("sharding_strategy", sharding_strategy, STRATEGIES),
        ranks_per_node=ranks_per_node,
        cpu_offload=cpu_offload,
        backward=_word("backward_prefetch", backward_prefetch or "NO_PREFETCH", _BACKWARD),
        forward_prefetch=_switch("forward_prefetch", forward_prefetch),
        policy=_word("auto_wrap_policy", auto_wrap_policy, _WRAP),
        min_num_params=min_num_params,
        transformer_layer_cls=transformer_layer_cls,
        mixed_precision=None if mixed_precision in ("", "no") else mixed_precision,
        files=_word("state_dict_type", state_dict_type, _FILES),
        without_counterpart={
            "use_orig_params": use_orig_params,
            "sync_module_states": sync_module_states,
            "limit_all_gathers": limit_all_gathers,
        },
    )
    precision = said.mixed_precision if said.is_enabled else None
    made = Parallel(layout=said.layout(), precision=precision, sharding=said.sharding())
    for given, why in said.changes():
        warnings.warn(f"{given}: {why}", stacklevel=level_of_caller())  # of the caller of a public call
    return made


@dataclass(frozen=True)
class _Fsdp1Options:
    """FSDP1's options, each checked to be a known word."""

    is_enabled: bool
    strategy: str
    ranks_per_node: int | None
    cpu_offload: bool
    backward: str
    forward_prefetch: bool
    policy: str
    min_num_params: int | None
    transformer_layer_cls: Any
    mixed_precision: str | None
    files: str
    without_counterpart: Mapping[str, Any]

    @property
    def is_hybrid(self) -> bool:
        return STRATEGIES[self.strategy][0]

    @property
    def is_ddp(self) -> bool:
        is_plain = self.strategy == "NO_SHARD" and not self.cpu_offload and not self.mixed_precision
        return is_plain or not self.is_enabled

    def layout(self) -> str:
        if not self.is_enabled or self.strategy == "NO_SHARD":
            return "dp_replicate=-1"
        if not self.is_hybrid:
            return "dp_shard=-1"
        return f"dp_replicate=-1,dp_shard={'node' if self.ranks_per_node is None else self.ranks_per_node}"

    def sharding(self) -> Sharding:
        if self.is_ddp:
            return Sharding(engine="ddp")
        prefetch = Prefetch(forward=int(self.forward_prefetch), backward=int(self.backward != "NO_PREFETCH"))
        return Sharding(
            engine="auto" if self.strategy == "NO_SHARD" else "fsdp2",
            reshard_after_forward=STRATEGIES[self.strategy][1],
            offload=self.cpu_offload,
            prefetch="default" if prefetch == Prefetch() else prefetch,
            **_units(self.policy, self.min_num_params, self.transformer_layer_cls),
        )

    def changes(self) -> Iterator[tuple[str, str]]:
        """``(given, why)`` for each option that means something else here, or nothing."""
        if not self.is_enabled:
            yield from self._unused_by_ddp()
            return
        if self.strategy == "NO_SHARD":
            kept = "DDP is used" if self.is_ddp else "FSDP2 on whole copies is used, for what DDP cannot do"
            yield "sharding_strategy=NO_SHARD", f"deprecated in torch; it is plain data parallelism: {kept}"
        if self.ranks_per_node is not None and not self.is_hybrid:
            same = f"{self.strategy} is the same within and across nodes, so it is not used"
            yield f"ranks_per_node={self.ranks_per_node}", same
        if self.mixed_precision:
            kept = "gradients are reduced, and buffers kept, in float32"
            yield f"mixed_precision={self.mixed_precision}", kept
        if self.files in _WRITTEN:
            yield f"state_dict_type={self.files}", _WRITTEN[self.files]
        for option, value in self.without_counterpart.items():
            if value is not _USUAL[option]:
                yield f"{option}={value}", _NO_COUNTERPART
        unused = f"auto_wrap_policy={self.policy} does not use it"
        if self.min_num_params not in (None, _MIN_NUM_PARAMS) and self.policy != "SIZE_BASED_WRAP":
            yield f"min_num_params={self.min_num_params}", unused
        if self.transformer_layer_cls is not None and self.policy != "TRANSFORMER_BASED_WRAP":
            yield f"transformer_layer_cls={self.transformer_layer_cls}", unused
        yield from self._changes_of_ddp() if self.is_ddp else self._changes_of_fsdp2()

    def _unused_by_ddp(self) -> Iterator[tuple[str, str]]:
        """With ``enable_fsdp=False``: every option of FSDP1 that was given and is not the default."""
        given = {
            "sharding_strategy": (self.strategy, "FULL_SHARD"),
            "ranks_per_node": (self.ranks_per_node, None),
            "cpu_offload": (self.cpu_offload, False),
            "mixed_precision": (self.mixed_precision, None),
            "backward_prefetch": (self.backward, "BACKWARD_PRE"),
            "forward_prefetch": (self.forward_prefetch, False),
            "auto_wrap_policy": (self.policy, "NO_WRAP"),
            "min_num_params": (self.min_num_params or _MIN_NUM_PARAMS, _MIN_NUM_PARAMS),
            "transformer_layer_cls": (self.transformer_layer_cls, None),
            "state_dict_type": (self.files, "FULL_STATE_DICT"),
            **{option: (value, _USUAL[option]) for option, value in self.without_counterpart.items()},
        }
        for option, (value, usual) in given.items():
            if value != usual:
                yield f"{option}={value}", "enable_fsdp=False is plain data parallelism (DDP), which does not use it"

    def _changes_of_ddp(self) -> Iterator[tuple[str, str]]:
        whole = "DDP keeps whole copies and gathers nothing, so it is not used"
        if self.backward != "BACKWARD_PRE":
            yield f"backward_prefetch={self.backward}", whole
        if self.forward_prefetch:
            yield f"forward_prefetch={self.forward_prefetch}", whole
        if self.policy != "NO_WRAP":
            yield f"auto_wrap_policy={self.policy}", whole

    def _changes_of_fsdp2(self) -> Iterator[tuple[str, str]]:
        if self.backward == "BACKWARD_POST":
            yield "backward_prefetch=BACKWARD_POST", "FSDP2 has no such order: BACKWARD_PRE is used"
        if self.policy == "NO_WRAP":
            yield "auto_wrap_policy=NO_WRAP", 'blocks are found all the same; Sharding(units="none") is one flat unit'


def _units(policy: str, min_num_params: int | None, transformer_layer_cls: Any) -> dict[str, Any]:
    if policy == "SIZE_BASED_WRAP":
        return {"min_unit_params": _MIN_NUM_PARAMS if min_num_params is None else min_num_params}
    if policy == "TRANSFORMER_BASED_WRAP":
        named = transformer_layer_cls or "no_split"
        return {"units": named if isinstance(named, str | type) else tuple(named)}
    return {}


def _switch(key: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"{key}={given!r}", why="it is a switch", fix=f"use {key}=True or {key}=False")
    return given


def _word(key: str, given: Any, known: Collection[str]) -> str:
    """The word itself, or the name of the enum member."""
    word = given.name if isinstance(given, Enum) else given
    if not isinstance(word, str) or word not in known:
        raise ConfigError(
            f"{key}={given!r}", why="FSDP1 has no such value", fix=did_you_mean(str(word), list(known), what="values")
        )
    return word
