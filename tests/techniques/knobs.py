"""Every knob of sharding and of how blocks run, with what it must leave equal (all numbers) and what it must change
(something counted).

A knob that is ignored passes any comparison of numbers, so each one names an observable that differs from the default's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from techniques.observed import (
    Halves,
    Seen,
    see,
    see_asked,
    see_break,
    see_buffers,
    see_dtypes,
    see_sizes,
)

from shardwise import DDP, Compile, Precision, Prefetch, Remat, Sharding
from shardwise.recipe import Edit
from shardwise.techniques.data.fsdp2_units import offload_of
from shardwise.techniques.remat import act as remat

BLOCKS = {"min_unit_bytes": 0}
FSDP = {2: "dp_shard=2", 4: "dp_shard=4"}
HSDP = {4: "dp_replicate=2,dp_shard=2"}
REPLICAS = {2: "dp_replicate=2", 4: "dp_replicate=4"}


def _count(name: str) -> Callable[[Seen], int]:
    return lambda seen: seen.collectives.get(name, 0)


gathers, scatters, sums = _count("_allgather_base"), _count("_reduce_scatter_base"), _count("allreduce")


def gathered_before(first: str, second: str) -> Callable[[Seen], bool]:
    """Whether unit ``first`` was gathered before ``second`` in the pass (forward or backward) that it belongs to."""

    def told(seen: Seen) -> bool:
        kind = second.split()[0]
        start = next(i for i, word in enumerate(seen.order) if word.split()[0] == kind)
        part = seen.order[start:]
        return f"gather {first}" in part[: part.index(second)]

    return told


@dataclass(frozen=True)
class Knob:
    """One setting, where it applies, and how it shows."""

    option: str  # whose setting it is
    setting: str  # as a user writes it
    options: dict[str, Any]
    layouts: dict[int, str]
    observable: str
    seen: Callable[[Seen], Any]
    differs: Callable[[Any, Any], bool]  # (with the knob, by default) -> whether it is as it must be
    base: dict[str, Any] = field(default_factory=lambda: {"sharding": Sharding(**BLOCKS)})
    watch: Callable[..., Seen] | None = None  # what a rank does to see it; None: see()
    gate: float | None = None  # how far the numbers may be from one process's; None: rounding of float64

    @property
    def dtype(self) -> torch.dtype:
        """Of the model before the setting: float32 for those of precision, which change the numbers."""
        return torch.float64 if self.gate is None else torch.float32

    @property
    def is_slow(self) -> bool:
        return "compile" in self.options

    def run(self, run: Callable[..., Any], size: int, options: dict[str, Any]) -> list[Seen]:
        """What each of ``size`` ranks sees with ``options``; ``run`` is a pool's."""
        more = () if self.watch else (self.dtype,)
        return run(self.watch or see, size, self.layouts[size], options, *more, timeout_s=170)


def of_sharding(text: str, layouts: dict[int, str], observable: str, seen: Any, differs: Any) -> Knob:
    options = eval(f"dict({text})", {"Prefetch": Prefetch, "dict": dict})
    option = f"Sharding.{text.partition('=')[0]}"
    return Knob(option, text, {"sharding": Sharding(**BLOCKS, **options)}, layouts, observable, seen, differs)


def of_blocks(
    option: str,
    text: str,
    layouts: dict[int, str],
    observable: str,
    seen: Any,
    differs: Any,
    by_default: str = "",
    **more: Any,
) -> Knob:
    """A setting of how blocks run; ``by_default``: what it is compared with, where that is not a model without it."""
    options, usual = (
        eval(f"dict({words})", {"Remat": Remat, "Compile": Compile, "Precision": Precision, "dict": dict})
        for words in (text, by_default)
    )
    base = {"sharding": Sharding(**BLOCKS)} if layouts is not REPLICAS else {}
    return Knob(option, text, {**base, **options}, layouts, observable, seen, differs, {**base, **usual}, **more)


_COARSE = 0.05  # bfloat16 has eight bits
BYTES_OF_GATHERED, GATHERS, SCATTERS = "bytes gathered at most in backward", "gathers", "reduce-scatters"
KEPT, GRAPHS = "bytes kept from forward to backward", "graphs compiled"
KNOBS = [
    of_sharding("reshard_after_forward=False", FSDP, GATHERS, gathers, lambda a, b: a == b - 2 * 3),
    of_sharding("reshard_after_forward=False", FSDP, BYTES_OF_GATHERED, lambda s: s.whole_params, lambda a, b: a > b),
    of_sharding("reshard_after_forward=2", {4: FSDP[4]}, "bytes kept in part from forward to backward",
                lambda s: s.between, lambda a, b: a > b == 0),
    of_sharding("reshard_after_forward={'blocks.1': False}", FSDP, GATHERS, gathers, lambda a, b: a == b - 2),
    of_sharding("reshard_every=2", FSDP, GATHERS, gathers, lambda a, b: a == b - 2),
    of_sharding("sync_every_microbatch=True", FSDP, SCATTERS, scatters, lambda a, b: a == 2 * b),
    of_sharding("sync_every_microbatch=True", FSDP, "bytes of whole gradients between micro-batches",
                lambda s: s.whole_grads, lambda a, b: a == 0 < b),
    of_sharding("sync_every_microbatch=True", HSDP, "reduce-scatters, all-reduces",
                lambda s: (scatters(s), sums(s)), lambda a, b: a == (2 * b[0], b[1] + 4)),
    of_sharding("sync_every_microbatch='reduce_scatter'", HSDP, "reduce-scatters, all-reduces",
                lambda s: (scatters(s), sums(s)), lambda a, b: a == (2 * b[0], b[1])),
    of_sharding("prefetch=Prefetch(forward=1)", FSDP, "block 1 gathered before forward of block 0",
                gathered_before("blocks.1", "forward blocks.0"), lambda a, b: a and not b),
    of_sharding("prefetch='none'", FSDP, "block 1 gathered before backward of block 2",
                gathered_before("blocks.1", "backward blocks.2"), lambda a, b: b and not a),
    of_sharding("prefetch=Prefetch(backward=2)", FSDP, "block 0 gathered before backward of block 2",
                gathered_before("blocks.0", "backward blocks.2"), lambda a, b: a and not b),
    of_sharding("offload=True", FSDP, "shards kept in host memory", lambda s: s.on_host, lambda a, b: a and not b),
    of_sharding("offload=True", HSDP, "shards kept in host memory", lambda s: s.on_host, lambda a, b: a and not b),
    *[Knob(f"Sharding.{text.partition('=')[0]}", text, {"sharding": Sharding(**options)}, FSDP, GATHERS, gathers, differs) for text, options, differs in (
        ("units='none'", {"units": "none"}, lambda a, b: a == 1 < b),
        ("units=('blocks.1',)", {"units": ("blocks.1",)}, lambda a, b: a == 2 * 2 + 1 < b),
        ("min_unit_bytes=15_000", {"min_unit_bytes": 15_000}, lambda a, b: 1 < a < b),
        ("min_unit_params=2_000", {"min_unit_params": 2_000}, lambda a, b: 1 < a < b),
    )],
    Knob("Sharding.engine", "engine='fsdp2'", {"sharding": Sharding(engine="fsdp2", **BLOCKS)}, REPLICAS, "units of FSDP2",
         lambda s: s.units, lambda a, b: a == 4 > b == 0, {}),
    Knob("Sharding.buffers", "buffers='mean'", {"sharding": Sharding(buffers="mean")}, {**FSDP, **REPLICAS},
         "a running mean, of ranks that differ", lambda s: round(s.buffer, 4), lambda a, b: abs(a) > abs(b) > 0, {},
         see_buffers),
    Knob("DDP.bucket_cap_mb", "DDP(bucket_cap_mb=0.001)", {"ddp": DDP(bucket_cap_mb=1e-3)}, REPLICAS, "all-reduces", sums,
         lambda a, b: a > b, {}),
    *[of_blocks(f"Remat.{option}", text, layouts, KEPT, lambda s: s.kept, lambda a, b: 0 < a < b)
      for layouts in (FSDP, REPLICAS)
      for option, text in (("mode", "remat='full'"), ("every", "remat=Remat(every=2)"),
                           ("targets", "remat=Remat(targets=('blocks.0',))"), ("budget", "remat=Remat(budget=20_000)"))],
    *[of_blocks("Remat.mode", "remat='selective'", layouts, "operators run", lambda s: s.operators, lambda a, b: a > b)
      for layouts in (FSDP, REPLICAS)],
    *[of_blocks("Remat.save", "remat=Remat(mode='selective', save=('matmul',))", layouts, "attentions run",
                lambda s: s.attention, lambda a, b: a == 2 * b > 0, "remat='selective'") for layouts in (FSDP, REPLICAS)],
    *[of_blocks("Compile.backend", "compile=Compile(backend='aot_eager')", layouts, GRAPHS, lambda s: s.graphs,
                lambda a, b: a > b == 0) for layouts in (FSDP, REPLICAS)],
    of_blocks("Compile.targets", "compile=Compile(targets=('blocks.0',), backend='eager')", FSDP, "blocks compiled",
              lambda s: s.units, lambda a, b: a == 1 < b, "compile=Compile(backend='eager')", watch=see_asked),
    of_blocks("Compile.mode", "compile=Compile(mode='max-autotune-no-cudagraphs')", {2: FSDP[2]}, "what torch.compile is given",
              lambda s: s.asked, lambda a, b: a == "max-autotune-no-cudagraphs" and b == "none", "compile=Compile()",
              watch=see_asked),
    of_blocks("Compile.dynamic", "compile=Compile(backend='eager', dynamic=True)", FSDP, "graphs for four sizes",
              lambda s: s.graphs, lambda a, b: 0 < a < b, "compile=Compile(backend='eager')", watch=see_sizes),
    of_blocks("Compile.dynamic", "compile=Compile(backend='eager', dynamic=False)", FSDP, "graphs for four sizes",
              lambda s: s.graphs, lambda a, b: a > b, "compile=Compile(backend='eager')", watch=see_sizes),
    of_blocks("Compile.fullgraph", "compile=Compile(backend='eager', fullgraph=True)", FSDP, "a block of two graphs is an error",
              lambda s: s.asked, lambda a, b: a and not b, "compile=Compile(backend='eager')", watch=see_break, gate=1e-5),
    of_blocks("Compile.activation_memory_budget", "compile=Compile(backend='aot_eager', activation_memory_budget=0.0)", FSDP, KEPT,
              lambda s: s.kept, lambda a, b: 0 < a < b, "compile=Compile(backend='aot_eager')"),
    of_blocks("Precision.storage", "precision=Precision(storage='bfloat16')", FSDP, "bytes of parameters at rest",
              lambda s: s.at_rest, lambda a, b: 2 * a == b, gate=_COARSE),
    of_blocks("Precision.compute", "precision=Precision(compute='bfloat16')", FSDP, BYTES_OF_GATHERED,
              lambda s: s.whole_params, lambda a, b: 2 * a == b, gate=_COARSE),
    of_blocks("Precision.reduce", "precision=Precision(compute='bfloat16', reduce='float32')", FSDP, "bytes reduced and scattered",
              lambda s: s.scattered, lambda a, b: a == 2 * b, "precision=Precision(compute='bfloat16')", gate=_COARSE),
    of_blocks("Precision.output", "precision=Precision(compute='bfloat16', output='float32')", FSDP, "dtype of the output",
              lambda s: s.dtypes[1], lambda a, b: (a, b) == ("float32", "bfloat16"), "precision=Precision(compute='bfloat16')",
              watch=see_dtypes, gate=_COARSE),
    of_blocks("Precision.cast_inputs", "precision=Precision(compute='bfloat16', cast_inputs='none')", FSDP,
              "dtype of what forward is given", lambda s: s.dtypes[0], lambda a, b: (a, b) == ("float32", "bfloat16"),
              "precision=Precision(compute='bfloat16')", watch=see_dtypes, gate=_COARSE),
    of_blocks("Precision.parts", "precision=Precision(parts={'blocks.*': 'bf16'})", FSDP, BYTES_OF_GATHERED,
              lambda s: s.whole_params, lambda a, b: a < b, gate=_COARSE),
]  # fmt: skip


# ---- what needs an accelerator: what torch would be asked for on one ------------------------------------------------------------


def _pins(asked: bool) -> bool:
    recipe = SimpleNamespace(entry=lambda _, cls: cls(offload=True, pin_memory=asked))
    return offload_of(recipe, _CUDA).pin_memory


def _moved(asked: bool) -> int:
    """Inputs of blocks that a forward hands to the function that copies them to host memory."""
    model, moved = Halves(), []
    edits = [Edit(f"blocks.{i}", "remat", "", {"mode": "full", "offload": asked}, "") for i in range(3)]
    remat.RematAct().inside(model, SimpleNamespace(edits_of=lambda _: edits), _CUDA)
    with mock.patch.object(remat, "_to_host", lambda tensor: moved.append(tensor) or tensor):
        model(torch.ones(4, 6, requires_grad=True))
    return len(moved)


_CUDA: Any = SimpleNamespace(device=torch.device("cuda", 0))


@dataclass(frozen=True)
class DeviceKnob:
    """A setting of which torch does nothing on a CPU."""

    option: str
    setting: str
    observable: str
    seen: Callable[[bool], Any]  # whether it is asked for -> what is asked of torch on cuda
    asked: bool
    differs: Callable[[Any, Any], bool]


DEVICE_KNOBS = [
    DeviceKnob("Sharding.pin_memory", "Sharding(offload=True, pin_memory=False)", "page-locked memory for shards",
               _pins, False, lambda a, b: b and not a),
    DeviceKnob("Remat.offload", "Remat(offload=True)", "inputs of blocks that are copied to host memory in a forward", _moved, True,
               lambda a, b: a >= 3 > b == 0),
]  # fmt: skip
