"""The benchmark for a GPU runs without one on a small model: its peers take the same batches and give plain torch's losses."""

import contextlib
import io
import os

import pytest
from benchmarks.scripts import script

PEERS = "accelerate,Fabric,Trainer in bf16"


def table() -> tuple[int, str]:
    """Exit status and output, in a process that is no rank, as the peers take one for part of a job of theirs."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = script("gpu").main(["--device=cpu", "--small", "--rounds=1", "--warmup=4", f"--only={PEERS}"])
    return status, printed.getvalue()


@pytest.mark.soak
def test_the_peers_train_on_the_same_batches(fresh_ranks):
    ((status, printed),) = fresh_ranks.run(table, 1, timeout_s=110)
    assert status == 0
    rows = [line.split("|")[1:4] for line in printed.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == [
        "plain torch: autocast",
        "accelerate in bf16",
        "Fabric in bf16-mixed",
        "transformers Trainer in bf16",
    ]
    assert all(float(time) > 0 and float(ratio) > 0 for _, time, ratio in rows)
