"""Measures the time to shard a model of 127 units, Shardwise against ``fully_shard``, as one rank of 8, 512 and 8192.

    python benchmarks/wrap.py                                   # prints a table; some minutes, nearly all of it by hand
    python benchmarks/wrap.py --write docs/benchmarks.md        # and puts it into the page

One process takes the part of rank 0 on torch's fake process group, whose collectives do nothing; each figure is from a
process of its own. By hand: the model is built on meta, ``fully_shard`` is called on each block and on the root, and
``to_empty`` gives memory. Ours: ``parallelize(build, world)`` with a unit for each block, which also reads the model's
code, makes and checks the recipe, and writes every value. Before the table is printed, the local shapes of all
parameters are equal on both sides.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.run.reference import ReferenceConfig, ReferenceModel

__all__ = ["CONTENDERS", "build", "measure", "table"]

WORLDS = (8, 512, 8192)
NUM_BLOCKS = 126  # and the root: 127 units
REPEATS = 3

Shapes = dict[str, list[int]]


def build(num_blocks: int = NUM_BLOCKS) -> nn.Module:
    """The reference model, deep and narrow: the cost of a unit counts, not that of its numbers."""
    return ReferenceModel(ReferenceConfig(dim=64, num_layers=num_blocks, ffn=176))


# ---- the contenders: each shards a model as rank 0, and gives the shapes it holds -----------------------------------


def _by_hand(world: sw.World, num_blocks: int) -> Callable[[], Shapes]:
    with torch.device("meta"):
        module = build(num_blocks)
    mesh = world.mesh["dp_shard"]
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    return lambda: {name: list(p.to_local().shape) for name, p in module.named_parameters()}  # type: ignore[attr-defined]


def _ours(world: sw.World, num_blocks: int) -> Callable[[], Shapes]:
    model = sw.parallelize(lambda: build(num_blocks), world, sharding=sw.Sharding(min_unit_bytes=0))
    assert len(sw.recipe_of(model).units) == num_blocks + 1
    return lambda: {name: list(runtime_of(model).local_tensor_of(name).shape) for name in runtime_of(model).parameters}


CONTENDERS = {"fully_shard by hand": _by_hand, "Shardwise": _ours}


def measure(contender: str, size: int, num_blocks: int) -> tuple[float, Shapes]:
    """Seconds to shard, and name -> local shape on rank 0 of ``size``. What is imported late is imported before."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    with sw.init("dp_shard=-1", device="cpu") as world:
        CONTENDERS[contender](world, 2)
        start = time.perf_counter()
        shapes = CONTENDERS[contender](world, num_blocks)
        seconds = time.perf_counter() - start
        return seconds, shapes()


def _measure_apart(contender: str, size: int, num_blocks: int, repeats: int) -> tuple[float, Shapes]:
    """The least of ``repeats`` processes: what else the machine did can only have made it longer."""
    found = []
    for _ in range(repeats):
        words = [sys.executable, __file__, "--one", contender, str(size), "--blocks", str(num_blocks)]
        found.append(json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))
    return min(seconds for seconds, _ in found), found[0][1]


# ---- the table -----------------------------------------------------------------------------------------------------


def table(results: dict[int, dict[str, float]]) -> str:
    """A Markdown table: world size -> seconds of each contender."""
    by_hand, ours = CONTENDERS
    lines = [f"| ranks | {by_hand}, s | {ours}, s | ratio |", "|--:|--:|--:|--:|"]
    for size, seconds in results.items():
        ratio = seconds[ours] / seconds[by_hand]
        lines.append(f"| {size} | {seconds[by_hand]:.2f} | {seconds[ours]:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="only this number of ranks; may be repeated")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help=f"units but for the root ({NUM_BLOCKS})")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"processes of which the best counts ({REPEATS})")
    parser.add_argument("--write", type=Path, help="a page whose <!-- wrap --> part is replaced by the table")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.blocks)))
        return 0
    results: dict[int, dict[str, float]] = {}
    for size in args.ranks or WORLDS:
        print(f"measuring a rank of {size}", file=sys.stderr, flush=True)
        found = {name: _measure_apart(name, size, args.blocks, args.repeats) for name in CONTENDERS}
        ours, by_hand = (found[name][1] for name in reversed(CONTENDERS))
        assert ours == by_hand, f"local shapes differ on {size} ranks"
        results[size] = {name: seconds for name, (seconds, _) in found.items()}
    text = table(results)
    print(text)
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition("<!-- wrap -->\n")
        after = rest.partition("<!-- /wrap -->")[2]
        args.write.write_text(f"{before}<!-- wrap -->\n{text}\n<!-- /wrap -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
