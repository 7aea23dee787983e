"""The benchmark for a GPU runs without one on a small model: its peers take the same batches and give plain torch's losses."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = "accelerate,Fabric,Trainer in bf16"


def test_the_peers_train_on_the_same_batches():
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--device=cpu",
        "--small",
        "--rounds=1",
        "--warmup=4",
        f"--only={PEERS}",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [line.split("|")[1:4] for line in ended.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == [
        "plain torch: autocast",
        "accelerate in bf16",
        "Fabric in bf16-mixed",
        "transformers Trainer in bf16",
    ]
    assert all(float(time) > 0 and float(ratio) > 0 for _, time, ratio in rows)
