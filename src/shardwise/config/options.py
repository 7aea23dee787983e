"""Small frozen records of what a user may choose for a technique. Torch-free.

Each field carries its description and its limits, from which help and messages are made. A record checks itself when
it is built, from Python code as well as from a file: a value of the wrong type, an unknown word, or an option that
would have no effect raises :class:`~shardwise.errors.ConfigError`.

>>> precision_of("bf16")
Precision(storage='float32', compute='bfloat16', reduce='float32', output=None, cast_inputs='root', parts={})
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.precision import DTYPE_WORDS, Precision, precision_of
from shardwise.config.record import Options, doc, hints_of
from shardwise.config.techniques import Compile, Remat, compile_of, remat_of
from shardwise.errors import ConfigError

__all__ = [
    "DDP",
    "DTYPE_WORDS",
    "Compile",
    "Options",
    "Parallel",
    "Precision",
    "Prefetch",
    "Remat",
    "Sharding",
    "compile_of",
    "default_of",
    "doc",
    "hints_of",
    "precision_of",
    "remat_of",
]


class Prefetch(Options, frozen=True, kw_only=True):
    """How many units ahead of the one that computes are gathered. More overlaps more and holds more memory."""

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
    """How parameters, gradients and optimizer state are spread over the data-parallel ranks."""

    functions: ClassVar[frozenset[str]] = frozenset({"units"})
    patterns: ClassVar[frozenset[str]] = frozenset({"units", "reshard_after_forward"})

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
        Annotated[int, msgspec.Meta(ge=0)],
        doc("bytes of compute-dtype parameters; neighbouring blocks are merged until a unit holds as many"),
    ] = 16 << 20
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
        Literal["rank0", "mean"], doc("which value a floating buffer (as of BatchNorm) takes when ranks differ")
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
FSDP2_ONLY = (
    "units",
    *SIZES,
    "reshard_after_forward",
    "reshard_every",
    "offload",
    "prefetch",
    "sync_every_microbatch",
)
"""Options of :class:`Sharding` that replicas have no use for."""


class DDP(Options, frozen=True, kw_only=True):
    """How replicas sum their gradients. Always, and so no options: gradients are views of what was sent, and parameters
    that a rank did not use are told from those that no rank used."""

    bucket_cap_mb: Annotated[
        Annotated[float, msgspec.Meta(gt=0)],
        doc("MiB of gradients that are reduced together; smaller starts earlier, larger needs fewer messages"),
    ] = 25.0


def default_of(cls: type[msgspec.Struct], key: str) -> Any:
    """The default value of one field (a fresh one, where it is a container)."""
    field = next(field for field in msgspec.structs.fields(cls) if field.name == key)
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


class Parallel(Options, frozen=True, kw_only=True):
    """The layout, and every technique laid over it: the arguments of ``parallelize``, as data."""

    layout: Annotated[
        str,
        doc("degree of each mesh axis: dp_replicate=2,dp_shard=-1; -1 is inferred, dp_shard=node: the ranks of a node"),
    ] = "dp_shard=-1"
    init: Annotated[
        Literal["seeded", "rank0", "load"] | None,
        doc(
            "seeded: from the seed and each name; rank0: built once, scattered; load: none, until weights are loaded; null: "
            "load where there are weights to start from, else seeded for a builder and rank0 for a module"
        ),
    ] = None
    precision: Annotated[
        str | Precision | None, doc("bf16, fp16, fp32, fp64, or a dtype each; null: as the model is")
    ] = None
    sharding: Annotated[Sharding, doc("how data-parallel ranks share the model")] = Sharding()
    ddp: Annotated[DDP, doc("how replicas reduce gradients, where the engine is ddp")] = DDP()
    remat: Annotated[
        Literal["none", "full", "selective"] | Remat | None,
        doc(
            "full: run each block again in backward instead of keeping what it computed; selective: keep the costly part"
        ),
    ] = None
    compile: Annotated[
        Literal["none", "blocks"] | Compile | None, doc("blocks: torch.compile each block; null: none")
    ] = None
    transforms: Annotated[
        tuple[str | dict[str, Any], ...],
        doc("your own changes of the module, in order: names, pkg.mod:function, or mappings with a name and options"),
    ] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.precision, str | dict | None):  # of torch, perhaps: a word cannot say it all
            msgspec.structs.force_setattr(self, "precision", precision_of(self.precision))
        super().__post_init__()

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallelize``: all fields but the layout, which ``init`` is given."""
        return {key: getattr(self, key) for key in self.__struct_fields__ if key != "layout"}

    def check(self) -> None:
        precision_of(self.precision)
        remat_of(self.remat)
        compile_of(self.compile)
        if not self.layout.strip():
            raise ConfigError(
                "Parallel(layout='')",
                why="a layout names at least one axis",
                fix='use layout="dp_shard=-1" for all ranks on one axis',
            )
