"""Options that torch has under these names and Shardwise does not: what it does in their place. Torch-free."""

from collections.abc import Sequence

from shardwise.config.suggest import did_you_mean

__all__ = ["FOREIGN", "why_and_fix"]

_BUFFERS = (
    "leave it out: buffers that ranks write are made equal after each window, to rank 0's values, which a DDP run saves with it and "
    'without; Sharding(buffers="mean") takes the mean of all ranks'
)
_UNUSED = "parameters that a rank does not use are found at run time, in each window: leave it out"
_ONE_SIZE = "buckets have one size: bucket_cap_mb"
_OF_PRECISION = 'dtypes are given to parallelize: precision="bf16", or a Precision record'
FOREIGN: dict[str, dict[str, str]] = {
    "DDP": {
        "find_unused_parameters": _UNUSED,
        "static_graph": _UNUSED,
        "skip_all_reduce_unused_params": _UNUSED,
        "check_reduction": "torch itself does nothing with it: leave it out",
        "dim": "a micro-batch is whole on its rank, and nothing scatters it: leave it out",
        "gradient_as_bucket_view": "gradients are always views of the buckets: leave it out",
        "broadcast_buffers": _BUFFERS,
        "forward_sync_buffers": _BUFFERS,
        "init_sync": 'ranks begin with the same values: parallelize(init="seeded" or "rank0")',
        "process_group": "the ranks are those of the world's layout: sw.init(layout)",
        "device_mesh": "the ranks are those of the world's layout: sw.init(layout)",
        "device_ids": "the device is the world's: sw.init(device=...)",
        "output_device": "the device is the world's: sw.init(device=...)",
        "mixed_precision": _OF_PRECISION,
        "bucket_cap_mb_list": _ONE_SIZE,
        "batched_grad_copy": "gradients are always views of the buckets, and nothing is copied: leave it out",
        "param_to_hook_all_reduce": "gradients are reduced as backward makes them: leave it out",
        "delay_all_reduce_named_params": "gradients are reduced as backward makes them: leave it out",
    },
    "Sharding": {
        "mp_policy": _OF_PRECISION,
        "mixed_precision": _OF_PRECISION,
        "mixed_precision_policy": _OF_PRECISION,
        "offload_policy": "it is a switch here: offload=True, with pin_memory",
        "cpu_offload": "it is called offload here: offload=True",
        "mesh": "the ranks are those of the world's layout: sw.init(layout)",
        "device_mesh": "the ranks are those of the world's layout: sw.init(layout)",
        "process_group": "the ranks are those of the world's layout: sw.init(layout)",
        "sharding_strategy": "the layout says it: dp_shard=-1 (FULL_SHARD), dp_replicate=-1 (NO_SHARD), both (HYBRID_SHARD); "
        "reshard_after_forward=False is SHARD_GRAD_OP",
        "auto_wrap_policy": 'it is called units here: units=("Block",), or a function of (name, module)',
        "wrap_policy": 'it is called units here: units=("Block",), or a function of (name, module)',
        "backward_prefetch": "it is called prefetch here: Prefetch(backward=1)",
        "forward_prefetch": "it is called prefetch here: Prefetch(forward=1)",
        "limit_all_gathers": "as many units are gathered as prefetch says: leave it out",
        "use_orig_params": "parameters keep their names and are the module's own: leave it out",
        "sync_module_states": 'ranks begin with the same values: parallelize(init="seeded" or "rank0")',
        "param_init_fn": "give parallelize a function that builds the module: parallelize(lambda: Model(), world)",
        "ignored_modules": "all parameters are sharded; those below a unit stay with it: units=",
        "ignored_params": "all parameters are sharded; those below a unit stay with it: units=",
        "shard_placement_fn": "parameters are cut along their first dim: leave it out",
    },
    "Remat": {
        "use_reentrant": "blocks always run again by saved-tensor hooks, which is use_reentrant=False: leave it out",
        "preserve_rng_state": "a block always draws the same numbers again: leave it out",
        "checkpoint_impl": "blocks always run again by saved-tensor hooks, which is NO_REENTRANT: leave it out",
        "determinism_check": "what runs again is always compared with the first run: leave it out",
        "check_fn": 'it is called targets here: targets=("Block",)',
        "context_fn": 'what is kept is named: mode="selective", save=("matmul", "attention")',
        "debug": "what runs again is always compared with the first run: leave it out",
    },
    "Compile": {
        "options": "mode and activation_memory_budget are the options here; others are torch._inductor.config's",
        "disable": 'leave compile= out, or compile="none"',
        "model": 'blocks are named by targets: targets=("Block",)',
    },
}


def why_and_fix(record: str, key: str, known: Sequence[str]) -> tuple[str, str]:
    """The parts of an error about a key that a record does not have."""
    told = FOREIGN.get(record, {}).get(key)
    if told is not None:
        return f"torch has this option, and {record} does not", told
    return f"{record} has no option {key!r}", did_you_mean(key, known, what=f"options of {record}")
