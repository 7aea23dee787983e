"""Tensor parallelism on one CUDA device: the numbers of plain torch there, dropout drawn there, the loss without logits.

Two and four ranks share the device, over gloo. Collected with `make gpu`; see test_gpu.py.
"""

import pytest
import torch
from gpu.on_device import fused_losses, trained_beside_plain
from step.linear_losses import CASES, worst_difference
from step.linear_losses import over_ranks as losses_over_ranks
from techniques.tp.dropping import HEADS, HIDDEN, WIDTH, train

import shardwise as sw

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
MODELS = (
    "linears: kv-2", "linears: qkv-kv-1", "linears: slopes", "linears: tempered", "linears: lora", "linears: norm-of-width",
    "llama", "gpt2", "t5", "qwen3", "bloom",
)  # fmt: skip


@pytest.fixture(autouse=True)
def device(request) -> torch.device:
    if not torch.cuda.is_available():
        (pytest.fail if request.config.option.markexpr.strip() == "gpu" else pytest.skip)("no CUDA device")
    torch.cuda.empty_cache()
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        *((name, "tp=2", {}) for name in MODELS),
        ("linears: kv-2", "dp_shard=2,tp=2", {}),
        ("gpt2", "dp_replicate=2,tp=2", {}),
        ("llama", "tp=2", {"remat": "full"}),
        ("linears: kv-2", "tp=2", {"compile": "blocks"}),
        ("llama", "tp=2", {"fused": True}),
        ("gpt2", "tp=2", {"fused": True}),
    ],
)
def test_the_numbers_of_plain_torch_on_the_device(ranks, name, layout, options):
    found = ranks.run(trained_beside_plain, 4 if "dp" in layout else 2, name, layout, timeout_s=200, **options)
    for error, held in found:
        assert error <= (1e-10 if name.startswith("linears") else 1e-6)  # norms of transformers compute in float32
        assert held < 0.85


def test_masks_are_equal_where_values_are_and_differ_where_parts_are(ranks):
    part, whole = {(2, HEADS // 2, 8, 8), (2, 8, HIDDEN // 2)}, {(2, 8, WIDTH)}
    one, other = runs = ranks.run(train, 2, "tp=2", False, timeout_s=200, device="cuda:0")
    assert {shape for shape, _ in one[0]} == part | whole
    for (shape, mask), (its_shape, its_mask) in zip(one[0], other[0], strict=True):
        assert shape == its_shape
        assert (mask == its_mask) == (shape in whole)
    everything = [str(mask) for found in (one, other) for shape, mask in found[0] if shape in part]
    assert len(set(everything)) == len(everything)
    assert one[1] == other[1]
    again = ranks.run(train, 2, "tp=2", False, timeout_s=200, device="cuda:0", remat="full")
    for plain, twice in zip(runs, again, strict=True):
        assert twice[1] == pytest.approx(plain[1], rel=1e-6)
        assert {str(mask) for _, mask in twice[0]} == {str(mask) for _, mask in plain[0]}


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_the_loss_without_logits_is_torchs(case):
    assert worst_difference(case, device="cuda:0") <= 1e-12


def test_the_loss_without_logits_over_ranks(ranks):
    for found in ranks.run(losses_over_ranks, 2, "tp=2", timeout_s=200, device="cuda:0"):
        assert max(found.values()) <= 1e-12


def test_the_fused_loss_in_bf16(ranks):
    for plain, fused in ranks.run(fused_losses, 2, "tp=2", timeout_s=200):
        assert fused == pytest.approx(plain, rel=2e-2)


def test_the_loss_without_logits_takes_less_memory(device):
    positions, width, vocab = 4096, 1024, 32000
    peaks = []
    for loss in (lambda h, w, y: torch.nn.functional.cross_entropy(h @ w.t(), y, reduction="sum"), sw.linear_cross_entropy):
        hidden = torch.randn(positions, width, device=device, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, requires_grad=True)
        labels = torch.randint(0, vocab, (positions,), device=device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss(hidden, weight, labels).backward()
        gradients = 4 * (hidden.numel() + weight.numel())
        peaks.append((torch.cuda.max_memory_allocated(device) - before - gradients) / (4 * positions * vocab))
    assert peaks[1] < 0.2 < 1 < peaks[0]
