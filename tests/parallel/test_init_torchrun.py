"""Seeded values in processes that torchrun started: none is forked from another, so addresses and hashes differ by rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel.on_ranks import sharded

NAMES = ("initialisers", "further_initialisers", "OwnInit", "NanoGPT", "ByObject")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the real launcher for all tests, because it takes seconds to start: what each rank told, and rank 0's values."""
    folder, script = tmp_path_factory.mktemp("torchrun"), Path(__file__).with_name("torchrun_init.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(folder), *NAMES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_no_fallback_and_the_values_of_a_world_of_one(ranks, run):
    """Ranks compared the addresses of ``trunc_normal_`` and ``orthogonal_``: everything came from rank 0."""
    for told, *_ in run:
        assert len(told) == len(NAMES) and all(why.startswith("seeded: ") for why in told), told
    for name, values in run[0][1].items():
        alone, _ = sharded(ranks, name, "one")
        for key, value in values.items():
            assert torch.equal(value, alone[key if key in alone else "wte.weight"]), (name, key)  # a tie has two names


def test_modules_made_in_the_order_of_a_set_are_refused(run):
    """The order is another one in each process; each rank's pieces went to other tensors, without a word."""
    for *_, errors in run:
        assert len(errors) == 2 and all("the order of tensors" in text for text in errors), errors
