"""Options that torch has under these names and Shardwise does not: what it does in their place. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.config.suggest import did_you_mean

__all__ = ["FOREIGN", "Instead", "Place", "instead_of", "why_and_fix"]

Place = Literal["python", "file", "override"]
"""Where an option was written, and so how the one in its place is shown."""


@dataclass(frozen=True)
class Instead:
    """What is written in the place of an option of torch.

    Attributes:
        text: what Shardwise does, with ``{}`` where the option stands.
        python: the option in Python.
        key: the option in a file, from its section on; "": nothing is written there.
        value: of that key, as YAML.
    """

    text: str
    python: str
    key: str = ""
    value: str = ""

    def shown(self, place: Place) -> str:
        """The fix of an error."""
        if place == "python":
            return self.text.format(self.python)
        if not self.key:
            return self.text.format("leave it out")
        return self.text.format(f"{self.key}: {self.value}" if place == "file" else f"--{self.key}={self.value}")


_BUFFERS = Instead(
    "leave it out: buffers that ranks write are made equal after each window, to rank 0's values, which a DDP run saves with it and "
    "without; {} takes the mean of all ranks",
    'Sharding(buffers="mean")',
    "parallel.sharding.buffers",
    "mean",
)
_UNUSED = "parameters that a rank does not use are found at run time, in each window: leave it out"
_LAYOUT = Instead("the ranks are those of the world's layout: {}", "sw.init(layout)", "parallel.layout", "dp_shard=-1")
_DEVICE = Instead("the device is the world's: {}", "sw.init(device=...)", "launch.device", "cuda")
_VALUES = Instead("ranks begin with the same values: {}", 'parallelize(init="seeded" or "rank0")')
_PRECISION = Instead(
    "dtypes are given for the whole model: {}",
    'parallelize(precision="bf16"), or a Precision record',
    "parallel.precision",
    "bf16",
)
_UNITS = Instead(
    "it is called units here: {}",
    'units=("Block",), or a function of (name, module)',
    "parallel.sharding.units",
    "[Block]",
)
_ALL = Instead(
    "all parameters are sharded; those below a unit stay with it: {}",
    'units=("Block",)',
    "parallel.sharding.units",
    "[Block]",
)
FOREIGN: dict[str, dict[str, str | Instead]] = {
    "DDP": {
        "find_unused_parameters": _UNUSED,
        "static_graph": _UNUSED,
        "skip_all_reduce_unused_params": _UNUSED,
        "check_reduction": "torch itself does nothing with it: leave it out",
        "dim": "a micro-batch is whole on its rank, and nothing scatters it: leave it out",
        "gradient_as_bucket_view": "gradients are always views of the buckets: leave it out",
        "broadcast_buffers": _BUFFERS,
        "forward_sync_buffers": _BUFFERS,
        "init_sync": _VALUES,
        "process_group": _LAYOUT,
        "device_mesh": _LAYOUT,
        "device_ids": _DEVICE,
        "output_device": _DEVICE,
        "mixed_precision": _PRECISION,
        "bucket_cap_mb_list": Instead("buckets have one size: {}", "bucket_cap_mb", "parallel.ddp.bucket_cap_mb", "25"),
        "batched_grad_copy": "gradients are always views of the buckets, and nothing is copied: leave it out",
        "param_to_hook_all_reduce": "gradients are reduced as backward makes them: leave it out",
        "delay_all_reduce_named_params": "gradients are reduced as backward makes them: leave it out",
    },
    "Sharding": {
        "mp_policy": _PRECISION,
        "mixed_precision": _PRECISION,
        "mixed_precision_policy": _PRECISION,
        "offload_policy": Instead(
            "it is a switch here, beside pin_memory: {}", "offload=True", "parallel.sharding.offload", "true"
        ),
        "cpu_offload": Instead("it is called offload here: {}", "offload=True", "parallel.sharding.offload", "true"),
        "mesh": _LAYOUT,
        "device_mesh": _LAYOUT,
        "process_group": _LAYOUT,
        "sharding_strategy": Instead(
            "the layout says it: dp_shard=-1 (FULL_SHARD), dp_replicate=-1 (NO_SHARD), both (HYBRID_SHARD); SHARD_GRAD_OP is {}",
            "reshard_after_forward=False",
            "parallel.sharding.reshard_after_forward",
            "false",
        ),
        "auto_wrap_policy": _UNITS,
        "wrap_policy": _UNITS,
        "backward_prefetch": Instead(
            "it is called prefetch here: {}", "Prefetch(backward=1)", "parallel.sharding.prefetch.backward", "1"
        ),
        "forward_prefetch": Instead(
            "it is called prefetch here: {}", "Prefetch(forward=1)", "parallel.sharding.prefetch.forward", "1"
        ),
        "limit_all_gathers": "as many units are gathered as prefetch says: leave it out",
        "use_orig_params": "parameters keep their names and are the module's own: leave it out",
        "sync_module_states": _VALUES,
        "param_init_fn": Instead(
            "values are made by a function that builds the module: {}",
            "parallelize(lambda: Model(), world)",
            "model.build",
            "pkg.mod:fn",
        ),
        "ignored_modules": _ALL,
        "ignored_params": _ALL,
        "shard_placement_fn": "parameters are cut along their first dim: leave it out",
    },
    "Remat": {
        "use_reentrant": "blocks always run again by saved-tensor hooks, which is use_reentrant=False: leave it out",
        "preserve_rng_state": "a block always draws the same numbers again: leave it out",
        "checkpoint_impl": "blocks always run again by saved-tensor hooks, which is NO_REENTRANT: leave it out",
        "determinism_check": "what runs again is always compared with the first run: leave it out",
        "check_fn": Instead(
            "it is called targets here: {}", 'targets=("Block",)', "parallel.remat", "{mode: full, targets: [Block]}"
        ),
        "context_fn": Instead(
            "what is kept is named: {}",
            'mode="selective", save=("matmul", "attention")',
            "parallel.remat",
            "{mode: selective, save: [matmul, attention]}",
        ),
        "debug": "what runs again is always compared with the first run: leave it out",
    },
    "Compile": {
        "options": "mode and activation_memory_budget are the options here; others are torch._inductor.config's",
        "disable": Instead("leave compile out, or write {}", 'compile="none"', "parallel.compile", "none"),
        "model": Instead(
            "blocks are named by targets: {}", 'targets=("Block",)', "parallel.compile", "{targets: [Block]}"
        ),
    },
}


def instead_of(record: type, key: str, place: Place) -> str | None:
    """What is written in the place of torch's option ``key`` of ``record``, one of our records or a class derived from one; None: torch has
    no such option. A user's own record of the same name is another."""
    for cls in record.__mro__:
        found = FOREIGN.get(cls.__name__, {}).get(key) if cls.__module__.startswith(_OURS) else None
        if found is not None:
            return found.shown(place) if isinstance(found, Instead) else found
    return None


def why_and_fix(record: type, key: str, known: Sequence[str]) -> tuple[str, str]:
    """The parts of an error about a key that a record, built in Python, does not have."""
    name, fix = record.__name__, instead_of(record, key, "python")
    if fix is not None:
        return f"torch has this option, and {name} does not", fix
    return f"{name} has no option {key!r}", did_you_mean(key, known, what=f"options of {name}")


_OURS = f"{__name__.partition('.')[0]}."
