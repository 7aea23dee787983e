"""A torch that is newer than the suite: tried before it is trusted, warned of once, refused where it does something else."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise._torch import fsdp2, version
from shardwise.parallel import torch_check
from shardwise.verify import torch_check as tried


def broken(what):
    """The checks on this rank, with one thing that torch, or we with it, would do otherwise."""
    unit = fsdp2.Unit

    def copies(self):
        for param in self._params:
            param._setattr_on_modules(nn.Parameter(param.sharded_param.detach()))

    def mean(self, reduce=unit.reduce):
        for group in self.groups:
            for param in group.fsdp_params:
                if getattr(param, "_unsharded_param", None) is not None and param._unsharded_param.grad is not None:
                    param._unsharded_param.grad /= 2
        reduce(self)

    patches = {
        "a mean": mock.patch.object(unit, "reduce", mean),
        "zeros are not made": mock.patch.object(fsdp2, "_fill_unused", lambda group: None),
        "other objects": mock.patch.object(unit, "show_shards", copies),
    }
    with patches[what]:
        return tried.on_rank()


def test_this_torch_passes(ranks):
    assert ranks.run(tried.on_rank, 2) == [[], []]


@pytest.mark.parametrize(
    ("what", "checks"),
    [("a mean", {"order", "unused", "dtypes"}), ("other objects", {"identity"})],
)
def test_each_check_sees_what_it_is_for(ranks, what, checks):
    found = [words for of_rank in ranks.run(broken, 2, what) for words in of_rank]
    assert {words.partition(":")[0] for words in found} >= checks


def test_ranks_that_reduce_other_tensors_are_seen(ranks):
    """By torch, or by a rank that waits for the other."""
    with pytest.raises(sw.RankError):
        ranks.run(broken, 2, "zeros are not made", timeout_s=20)


def on_newer(outcome):
    """What parallelize does twice where the check ends so: warnings, errors, and how often it was run."""
    told, runs = [], []
    patches = (
        mock.patch.object(torch_check, "is_newer", lambda: True),
        mock.patch.object(torch_check, "_try", lambda: runs.append(1) or outcome),
        mock.patch.object(torch_check, "_outcome", []),
    )
    with patches[0], patches[1], patches[2], sw.init("dp_shard=2", device="cpu") as world:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                try:
                    sw.parallelize(nn.Linear(2, 2), world)
                except sw.UnsupportedError as error:
                    told.append(str(error))
        return len(runs), [str(one.message) for one in caught if "is newer than" in str(one.message)], told


def test_a_newer_torch_that_passes_is_warned_of_once(ranks):
    (first, warned, _), (second, others, _) = ranks.run(on_newer, 2, "")
    assert (first, second) == (1, 0)  # rank 0 tries for all
    assert len(warned) == 1 and f"torch {torch.__version__} is newer than" in warned[0] and not others


def test_a_newer_torch_that_fails_is_refused_on_every_rank(ranks):
    for runs, warned, told in ranks.run(on_newer, 2, "order: the gradient of blocks.0 is 1.0e+00 off"):
        assert runs <= 1 and not warned and len(told) == 2
        assert "does not do what it relies on: order: the gradient of blocks.0" in told[0]
        assert 'pip install "torch==2.' in told[0]


@pytest.mark.parametrize(
    ("text", "newer"),
    [("2.11.0", False), ("2.13.1+cpu", False), ("2.14.0", True), ("2.14.0a0+git12", True), ("3.0.0", True)],
)
def test_which_versions_are_newer(monkeypatch, text, newer):
    monkeypatch.setattr(torch, "__version__", text)
    monkeypatch.setattr(version, "TESTED", ((2, 12), (2, 13)))
    assert version.is_newer() is newer
    assert version.is_older() is (text == "2.11.0")


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    refused = pytest.raises(sw.UnsupportedError, match=r"torch 2\.10\.1\+cu128")
    with sw.init("dp_shard=2", backend="fake", device="cpu") as world, refused as told:
        sw.parallelize(nn.Linear(2, 2), world)
    assert 'pip install "torch>=2.11"' in told.value.fix
