"""What a step leaves out on one CUDA device: waits of the host, and copies that one rank does not need."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise._torch import fsdp2
from shardwise.run.reference import ReferenceConfig, ReferenceModel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

SMALL = ReferenceConfig(dim=64, num_layers=3, ffn=128)
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16 blocks": {"precision": "bf16", "sharding": sw.Sharding(min_unit_bytes=0)},
    "recomputed": {"precision": "bf16", "remat": "full"},
}


def training(world: sw.World, options: dict[str, Any], on_nonfinite: str = "raise") -> tuple[sw.TrainStep, sw.Loader]:
    torch.manual_seed(0)
    model = sw.parallelize(ReferenceModel(SMALL), world, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    samples = [torch.randint(SMALL.vocab, (33,), generator=torch.Generator().manual_seed(i)) for i in range(160)]
    loader = sw.Loader(samples, world, global_batch=8, micro_batch=4, prepare=sw.shift_labels)
    return sw.TrainStep(model, optim, max_grad_norm=1.0, on_nonfinite=on_nonfinite), loader


def waits(step: sw.TrainStep, loader: sw.Loader) -> list[str]:
    """The places where the host waited for the device in the tenth step, with reading its data. Before it, remat compares
    the two runs of its blocks."""
    batches = iter(loader)
    for _ in range(9):
        step(next(batches))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(next(batches))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in told if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_host_waits_for_the_device_once_in_a_step(device, options, on_nonfinite):
    with sw.init("dp_shard=1") as world:
        found = waits(*training(world, OPTIONS[options], on_nonfinite))
    assert len(found) == 1 and "reads.py" in found[0], found


@pytest.mark.parametrize("options", ["bf16", "fp16", "bf16 blocks", "recomputed"])
def test_casts_give_the_bits_of_collectives_over_one_rank(device, options):
    found = []
    for own in (True, False):
        theirs = mock.patch.object(fsdp2, "_is_whole", lambda group: False)
        with sw.init("dp_shard=1") as world, mock.MagicMock() if own else theirs:
            step, loader = training(world, OPTIONS[options])
            outs = [step(window) for window in loader]
            found.append(([(out.loss, out.grad_norm) for out in outs], sw.full_state_dict(step.model)))
    (ours, state), (wanted, other) = found
    assert ours == wanted
    assert all(torch.equal(state[name], other[name]) for name in other)


def test_labels_written_through_data_are_refused(device):
    with sw.init("dp_shard=1") as world:
        step, loader = training(world, {})
        window = next(iter(loader))
        window[0]["labels"].data[0, :5] = -100
        with pytest.raises(sw.UsageError, match=r"valid labels on the device, and 256 on the host"):
            step(window)


def test_labels_that_were_replaced_are_counted_as_they_are(device):
    with sw.init("dp_shard=1") as world:
        step, loader = training(world, {})
        window = next(iter(loader))
        window[0]["labels"][0, :5] = -100
        window[1]["labels"] = window[1]["labels"].masked_fill(window[1]["labels"] > 100, -100)
        wanted = sum(int((batch["labels"] != -100).sum()) for batch in window)
        assert step(window).num_tokens == wanted


def test_batches_are_copied_while_the_device_computes_and_none_is_overwritten_before_it_was_read(device):
    """The device is kept far behind the host, which reads, copies and drops many micro-batches meanwhile."""
    samples = [torch.full((1 << 20,), float(i)) for i in range(64)]
    busy = torch.randn(4096, 4096, device=device)
    with sw.init("dp_shard=1") as world:
        loader = sw.Loader(samples, world, global_batch=4, micro_batch=2, shuffle=False, prepare=None)
        sums = []
        for window in loader:
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            sums += [batch["input"].double().sum(1) for batch in window]
            del window
    assert torch.cat(sums).tolist() == [float(i) * (1 << 20) for i in range(64)]
