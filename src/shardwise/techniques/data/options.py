"""Options of data parallelism: ``Sharding`` (FSDP2), ``Prefetch`` and ``DDP`` (replicas). Torch-free."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, default_of, doc
from shardwise.config.torch_options import Replacement
from shardwise.errors import ConfigError

_BUFFERS = Replacement(
    "leave it out: running statistics are made equal after each window, to rank 0's values, which a DDP run saves with it and "
    "without; {} takes the mean of all ranks",
    'Sharding(buffers="mean")',
    "parallel.sharding.buffers",
    "mean",
)
_UNUSED = "parameters that a rank does not use are found at run time, in each window: leave it out"
_LAYOUT = Replacement(
    "the ranks are those of the world's layout: {}", "sw.init(layout)", "parallel.layout", "dp_shard=-1"
)
_DEVICE = Replacement("the device is the world's: {}", "sw.init(device=...)", "launch.device", "cuda")
_VALUES = Replacement("ranks begin with the same values: {}", 'parallelize(init="seeded" or "rank0")')
_PRECISION = Replacement(
    "dtypes are given for the whole model: {}",
    'parallelize(precision="bf16"), or a Precision record',
    "parallel.precision",
    "bf16",
)
_UNITS = Replacement(
    "it is called units here: {}",
    'units=("Block",), or a function of (name, module)',
    "parallel.sharding.units",
    "[Block]",
)
_ALL = Replacement(
    "all parameters are sharded; those below a unit stay with it: {}",
    'units=("Block",)',
    "parallel.sharding.units",
    "[Block]",
)

BufferWord = Literal["sum", "mean", "min", "max", "rank0", "own"]


class Prefetch(Options, frozen=True, kw_only=True):
    """How many units ahead of the computing one are all-gathered. More overlaps more and holds more memory."""

    forward: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc(
            "units gathered before a unit's forward runs; 0: each when it is entered, while the one before still computes"
        ),
    ] = 0
    backward: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("units gathered before a unit's backward runs; 1: the next one, as FSDP2 does; 0: none"),
    ] = 1


NO_PREFETCH = Prefetch(forward=0, backward=0)


class Sharding(Options, frozen=True, kw_only=True):
    """How parameters, gradients and optimizer state are sharded over the data-parallel ranks."""

    functions: ClassVar[frozenset[str]] = frozenset({"units"})
    patterns: ClassVar[frozenset[str]] = frozenset({"units", "reshard_after_forward"})
    foreign: ClassVar[Mapping[str, str | Replacement]] = {
        "mp_policy": _PRECISION,
        "mixed_precision": _PRECISION,
        "mixed_precision_policy": _PRECISION,
        "offload_policy": Replacement(
            "it is a switch here, next to pin_memory: {}", "offload=True", "parallel.sharding.offload", "true"
        ),
        "cpu_offload": Replacement(
            "it is called offload here: {}", "offload=True", "parallel.sharding.offload", "true"
        ),
        "mesh": _LAYOUT,
        "device_mesh": _LAYOUT,
        "process_group": _LAYOUT,
        "sharding_strategy": Replacement(
            "the layout says it: dp_shard=-1 (FULL_SHARD), dp_replicate=-1 (NO_SHARD), both (HYBRID_SHARD); SHARD_GRAD_OP is {}",
            "reshard_after_forward=False",
            "parallel.sharding.reshard_after_forward",
            "false",
        ),
        "auto_wrap_policy": _UNITS,
        "wrap_policy": _UNITS,
        "backward_prefetch": Replacement(
            "it is called prefetch here: {}", "Prefetch(backward=1)", "parallel.sharding.prefetch.backward", "1"
        ),
        "forward_prefetch": Replacement(
            "it is called prefetch here: {}", "Prefetch(forward=1)", "parallel.sharding.prefetch.forward", "1"
        ),
        "limit_all_gathers": "as many units are gathered as prefetch says: leave it out",
        "use_orig_params": "parameters keep their names and are the module's own: leave it out",
        "sync_module_states": _VALUES,
        "param_init_fn": Replacement(
            "values are made by a function that builds the module: {}",
            "parallelize(lambda: Model(), world)",
            "model.build",
            "pkg.mod:fn",
        ),
        "ignored_modules": _ALL,
        "ignored_params": _ALL,
        "shard_placement_fn": "parameters are cut along their first dim: leave it out",
    }

    engine: Annotated[
        Literal["auto", "ddp", "fsdp2"],
        doc("ddp: whole copies; fsdp2: shards; auto: ddp where dp_shard=1 and storage is compute, else fsdp2"),
    ] = "auto"
    units: Annotated[
        str | tuple[str, ...],
        doc(
            "auto: repeated blocks; none: the model is one unit; no_split: what the model lists in _no_split_modules; "
            "model: what its own fully_shard method shards; else patterns of module names or classes, as a list or with "
            "commas; in Python also classes, or a function of (name, module)"
        ),
    ] = "auto"
    min_unit_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        doc(
            "bytes of compute-dtype parameters: neighbouring blocks are merged until a unit holds as many, and a smaller "
            "model is one unit; none: 8 MiB for a unit, and a model below 64 MiB is one unit"
        ),
    ] = None
    min_unit_params: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        doc("the same, as a number of parameters; in place of min_unit_bytes"),
    ] = None
    reshard_after_forward: Annotated[
        bool | int | dict[str, bool | int],
        doc(
            "true: free the gathered parameters after forward; false: keep them for backward; a number >= 2: keep "
            "them sharded over that many ranks; or one of these per pattern of module names or classes"
        ),
    ] = True
    reshard_every: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        doc("only every so many-th unit frees its parameters after forward, the others keep them; 1: each does"),
    ] = 1
    offload: Annotated[bool, doc("keep parameters, gradients and optimizer state in host memory between uses")] = False
    pin_memory: Annotated[bool, doc("with offload: page-locked host memory, which copies to the device faster")] = True
    prefetch: Annotated[
        Literal["default", "none"] | Prefetch,
        doc("default: in backward one unit ahead; none: nothing ahead; or how many units each way"),
    ] = "default"
    sync_every_microbatch: Annotated[
        bool | Literal["reduce_scatter"],
        doc(
            "false: sum gradients over the ranks once, at a window's last micro-batch; true: at each one, which holds no "
            "whole gradients in between; reduce_scatter: at each within dp_shard, over dp_replicate at the last"
        ),
    ] = False
    buffers: Annotated[
        Literal["rank0", "mean"] | dict[str, BufferWord],
        doc(
            "rank0, mean: which running statistics of normalisation layers (as of BatchNorm) hold when ranks differ; or patterns of "
            "names of buffers, each with sum, mean, min, max, rank0 or own: what the values that ranks have written become at a "
            "window's end, of which the first that matches holds. Persistent buffers that none names must be equal on all ranks"
        ),
    ] = "rank0"

    def check(self) -> None:
        given = self.reshard_after_forward
        for reshard in given.values() if isinstance(given, dict) else (given,):
            self._check_reshard(reshard)
        if isinstance(self.units, str) and self.units not in UNIT_WORDS:
            patterns = tuple(part.strip() for part in self.units.split(","))
            msgspec.structs.force_setattr(self, "units", patterns)
        if isinstance(self.units, tuple) and not all(self.units):
            raise ConfigError(
                f"Sharding(units={list(self.units)})",
                why="an empty pattern matches no module",
                fix='remove it, or use units="none" for one single unit',
            )
        if self.units == "none":
            self._refuse_without_effect("units", SIZES, "the model is one unit whatever its size")
        elif self.units != "auto":
            self._refuse_without_effect("units", SIZES, "each module named is a unit, whatever its size")
        elif self.min_unit_params is not None:
            self._refuse_without_effect("min_unit_params", ("min_unit_bytes",), "units are merged by number")
        if self.engine == "ddp":
            self._refuse_without_effect("engine", FSDP2_ONLY, "ddp keeps whole copies")
        if not self.offload:
            self._refuse_without_effect("offload", ("pin_memory",), "nothing is kept in host memory")
        if self.reshard_every > 1 and given is False:
            self._refuse_without_effect("reshard_after_forward", ("reshard_every",), "no unit frees its parameters")

    def _check_reshard(self, reshard: bool | int) -> None:
        if not isinstance(reshard, bool) and reshard < 2:
            raise ConfigError(
                f"Sharding(reshard_after_forward={reshard})",
                why="a number is how many ranks share the parameters between forward and backward, so it is 2 or more",
                fix="use true (free them), false (keep them whole), or a number from 2 to the size of dp_shard",
            )

    def _refuse_without_effect(self, chosen: str, keys: tuple[str, ...], because: str) -> None:
        for key in keys:
            if getattr(self, key) != default_of(Sharding, key):
                raise ConfigError(
                    f"Sharding({chosen}={getattr(self, chosen)!r}, {key}={getattr(self, key)!r})",
                    why=f"{because}, so {key} would have no effect",
                    fix=f"remove {key}, or use another {chosen}",
                )


UNIT_WORDS = ("auto", "none", "no_split", "model")
SIZES = ("min_unit_bytes", "min_unit_params")
FSDP2_ONLY = ("units", *SIZES, "reshard_after_forward", "reshard_every", "offload", "prefetch", "sync_every_microbatch")
"""Options of :class:`Sharding` that have no effect on replicas."""


class DDP(Options, frozen=True, kw_only=True):
    """How replicas all-reduce their gradients. Two things are always done and are no options: gradients are views of
    the buckets, and parameters that only this rank did not use are distinguished from those that no rank used."""

    foreign: ClassVar[Mapping[str, str | Replacement]] = {
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
        "bucket_cap_mb_list": Replacement(
            "buckets have one size: {}", "bucket_cap_mb", "parallel.ddp.bucket_cap_mb", "25"
        ),
        "batched_grad_copy": "gradients are always views of the buckets, and nothing is copied: leave it out",
        "param_to_hook_all_reduce": "gradients are reduced as backward makes them: leave it out",
        "delay_all_reduce_named_params": "gradients are reduced as backward makes them: leave it out",
    }

    bucket_cap_mb: Annotated[
        Annotated[float, msgspec.Meta(gt=0)],
        doc("MiB of gradients that are reduced together; smaller starts earlier, larger needs fewer messages"),
    ] = 25.0
