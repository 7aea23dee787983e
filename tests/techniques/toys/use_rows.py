"""The whole of it under every engine, against one process; outside of windows; and without the sum at the end of a window."""

import json
import os

from models import Words, batch
from rows_outside import outside

import shardwise as sw
from shardwise.testing import RankPool


def compare(pool, layout, ranks, **options):
    windows = [[batch(10 * step + i) for i in range(2 * ranks + 1)] for step in range(2)]
    try:
        report = sw.verify(
            Words, layout, batches=windows, run=pool.run, max_grad_norm=0.5, optimizer="adamw", **options
        )
        return f"equal, {report.engine}, {max(report.bytes_per_rank)} bytes"
    except sw.VerifyError as error:
        return f"{error.name}: {error}"


if __name__ == "__main__":
    found = {}
    with RankPool() as pool:
        found["outside"] = pool.run(outside, 2)
        for layout, ranks in (("pp=2", 1), ("dp_replicate=2,pp=2", 2), ("dp_shard=2,pp=2", 2)):
            found[layout] = compare(pool, layout, ranks, rows=True)
        for layout, ranks in (("pp=2", 1), ("dp_shard=2,pp=2", 2)):
            found[f"{layout} without rows"] = compare(pool, layout, ranks)
        again = sw.Remat(targets=("b",))
        found["a cut layer that runs again"] = compare(pool, "dp_shard=2,pp=2", 2, rows=True, remat=again)
    os.environ["TOY_SUMS_NOTHING"] = "1"
    with RankPool() as pool:
        try:
            found["nothing summed"] = compare(pool, "dp_shard=2,pp=2", 2, rows=True)
        except sw.RankError as error:
            found["nothing summed"] = str(error)
    with open("rows.json", "w") as file:
        json.dump(found, file)
