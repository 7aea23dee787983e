"""Positions over ranks of an axis of their own, in pairs of micro-batches, against one process; an evaluation; and a mesh over another
axis."""

import json
from pathlib import Path

from models import Words, batch
from positions_on_ranks import evaluated, on_the_mesh_of_dp_shard, own_loop

import shardwise as sw

QUICK = (
    ("dp_shard=2,cp=2", {}, True),
    ("cp=2", {"sharding": sw.Sharding(engine="ddp")}, False),
)
REST = (
    ("cp=2,tp=2", {}, True),
    ("cp=2", {}, False),
    ("cp=2", {}, True),
    ("dp_shard=2,cp=2", {}, False),
    ("dp_replicate=2,cp=2", {}, True),
    ("dp_replicate=2,cp=2", {"sharding": sw.Sharding(engine="ddp")}, True),
    ("dp_replicate=2,dp_shard=2,cp=2", {}, True),
)


def compare(pool, layout, **options):
    windows = [[batch(10 * step + i) for i in range(6)] for step in range(2)]
    try:
        report = sw.verify(
            Words, layout, batches=windows, run=pool.run, max_grad_norm=0.5, optimizer="adamw", **options
        )
        return f"equal, {report.engine}, {max(report.bytes_per_rank)} bytes"
    except sw.VerifyError as error:
        return f"{error.name}: {error}"


def main(pool, words):
    found = {}
    for layout, options, in_pairs in REST if words == ["--rest"] else QUICK:
        name = f"{layout} {' '.join(options)} {'in pairs' if in_pairs else ''}"
        found[name] = compare(pool, layout, positions=in_pairs, **options)
    evaluations = [pool.run(evaluated, 4, layout)[0] for layout in ("dp_replicate=4", "dp_shard=2,cp=2")]
    mesh, own = pool.run(on_the_mesh_of_dp_shard, 4), pool.run(own_loop, 2)
    Path("out.json").write_text(json.dumps({"found": found, "evaluations": evaluations, "mesh": mesh, "own": own}))
