"""The cross entropy that holds no logits, on one CUDA device. Collected with `make gpu`; see test_gpu.py."""

import pytest
import torch
from step.linear_losses import CASES, worst_difference

import shardwise as sw

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_the_numbers_of_torch(case):
    assert worst_difference(case, device="cuda:0") <= 1e-12


def test_it_takes_less_memory(device):
    positions, width, vocab = 4096, 1024, 32000
    peaks = []
    for loss in (
        lambda h, w, y: torch.nn.functional.cross_entropy(h @ w.t(), y, reduction="sum"),
        sw.linear_cross_entropy,
    ):
        hidden = torch.randn(positions, width, device=device, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, requires_grad=True)
        labels = torch.randint(0, vocab, (positions,), device=device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss(hidden, weight, labels).backward()
        gradients = 4 * (hidden.numel() + weight.numel())
        peaks.append((torch.cuda.max_memory_allocated(device) - before - gradients) / (4 * positions * vocab))
    assert peaks[1] < 0.2 < 1 < peaks[0]
