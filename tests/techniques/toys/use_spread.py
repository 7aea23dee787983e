"""Parameters that are sharded over a mesh of their own, against one process."""

import json
import shutil
from pathlib import Path

from models import Words, batch
from spread_resumed import losses

import shardwise as sw


def compare(pool, layout, **options):
    windows = [[batch(10 * step + i) for i in range(8)] for step in range(2)]
    try:
        report = sw.verify(
            Words, layout, batches=windows, run=pool.run, max_grad_norm=0.5, optimizer="adamw", **options
        )
        return f"equal, {report.engine}, {max(report.bytes_per_rank)} bytes"
    except sw.VerifyError as error:
        return f"{error.name}: {error}"


def main(pool, layouts):
    found = {layout: compare(pool, layout, spread=True) for layout in layouts}
    folder = str(Path("spread_run").resolve())
    shutil.rmtree(folder, ignore_errors=True)  # of other layouts
    first, found["cuts"] = pool.run(losses, 4, folder, "dp_shard=4,ep=2", True, first=True)[0]
    again = [("dp_shard=4", False), ("dp_replicate=2,dp_shard=2,ep=2", True), ("dp_replicate=4", False)]
    for layout, spread in again:
        later, _ = pool.run(losses, 4, folder, layout, spread, first=False)[0]
        found[f"resumed under {layout}"] = max(abs(a - b) for a, b in zip(first[1:], later, strict=True))
    Path("out.json").write_text(json.dumps(found))
