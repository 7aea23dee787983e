"""The cross entropy that holds no logits is that of torch: loss and every gradient, alone and over ranks."""

import pytest
import torch
import torch.nn.functional as F
from step import linear_losses as cases
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from shardwise.step import linear_loss


class Largest(TorchDispatchMode):
    """Within: the largest number of elements that an operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_it_is_torchs(case):
    assert cases.worst_difference(case) <= 1e-13


@pytest.mark.quick("2-a fifth")
@pytest.mark.parametrize(
    "stride", [pytest.param(1, id="all"), pytest.param(5, id="a fifth")]
)  # 5: with each option, and without
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_it_is_torchs_over_ranks_that_have_a_part_of_the_vocabulary(ranks, num_ranks, stride):
    some = cases.CASES[::stride]
    for of_rank in ranks.run(cases.over_ranks, num_ranks, f"tp={num_ranks}", some):
        assert len(of_rank) == len(some) and max(of_rank.values()) <= 1e-13, of_rank


@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_in_other_dtypes(dtype, gate):
    """Sums are in float32. Of float16 the gradients are made in the backward, from the loss scale."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(40, 32), torch.randn(50, 32) / 5, torch.randint(0, 50, (40,))
    plain = [x.to(dtype).float().requires_grad_() for x in (hidden, weight)]
    mine = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    want = F.cross_entropy(plain[0] @ plain[1].t(), labels, reduction="sum")
    loss = sw.linear_cross_entropy(*mine, labels, chunk_size=7)
    assert loss.dtype == torch.float32 and abs(loss - want).item() <= gate * want.item()
    (want / 1000).backward()
    scale = 65536.0 if dtype == torch.float16 else 1.0
    (loss * (scale / 1000)).backward()
    for one, other in zip(mine, plain, strict=True):
        assert one.grad.dtype == dtype
        assert (one.grad.float() / scale - other.grad).abs().max() <= gate * other.grad.abs().max()


def test_gradients_of_float16_that_only_the_loss_scale_keeps():
    """A probability of 1e-8 is 0 in float16; times 65536 it is not."""
    hidden, weight = torch.ones(1, 1, dtype=torch.float16), torch.tensor([[9.0], [-9.0]], dtype=torch.float16)
    weight.requires_grad_()
    (sw.linear_cross_entropy(hidden, weight, torch.tensor([0])) * 65536).backward()
    assert weight.grad[1].item() / 65536 == pytest.approx(torch.sigmoid(torch.tensor(-18.0)).item(), rel=1e-2)


def test_logits_are_never_held():
    hidden, weight = torch.randn(240, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    labels = torch.randint(0, 500, (240,))
    with Largest() as plain:
        F.cross_entropy(hidden @ weight.t(), labels, reduction="sum").backward()
    with Largest() as mine:
        sw.linear_cross_entropy(hidden, weight, labels).backward()
    assert plain.numel == 240 * 500 and mine.numel == 240 * 500 // 12


def test_small_integers_and_autocast():
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    labels = torch.tensor([0, 1, 8, 3, -100, 5])
    plain = sw.linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(plain, sw.linear_cross_entropy(hidden, weight, labels.to(torch.int16)))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sw.linear_cross_entropy(hidden.bfloat16(), weight, labels)
        want = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    assert mixed.item() == pytest.approx(want.item(), rel=1e-6)
    mixed.backward()
    assert weight.grad.dtype == torch.float32


def test_only_gradients_that_are_wanted_are_made():
    hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True), torch.randint(0, 9, (6,))
    with torch.no_grad():
        assert not sw.linear_cross_entropy(hidden, weight, labels).requires_grad
    sw.linear_cross_entropy(hidden, weight, labels).backward()
    assert hidden.grad is None and weight.grad is not None
    loss = sw.linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # the gradients were multiplied in place; a second time they would be wrong


def test_a_label_that_is_no_class_where_reading_it_would_wait_for_the_device(monkeypatch):
    """There the loss is not a number, which a step refuses."""
    monkeypatch.setattr(linear_loss, "_refuse_unknown_label", lambda *_: None)
    hidden, weight, labels = torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, 9, -100])
    assert sw.linear_cross_entropy(hidden, weight, labels).isnan()
    labels[1] = 8
    assert sw.linear_cross_entropy(hidden, weight, labels).isfinite()


def test_unfit_arguments_are_refused():
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(9, 4), torch.randint(0, 9, (2, 3))
    with pytest.raises(ConfigError, match=r"a label 9 of 9 classes.*\n.*from 0 to 8, or -100"):
        sw.linear_cross_entropy(hidden, weight, torch.full_like(labels, 9))
    with pytest.raises(ConfigError, match=r"labels of torch\.float32"):
        sw.linear_cross_entropy(hidden, weight, labels.float())
    with pytest.raises(UsageError, match=r"hidden \[2, 3, 4\], weight \[9, 4\], labels \[2, 2\]"):
        sw.linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(UsageError, match=r"bias \[8\]"):
        sw.linear_cross_entropy(hidden, weight, labels, torch.zeros(8))
    with pytest.raises(UsageError, match="chunk_size=0"):
        sw.linear_cross_entropy(hidden, weight, labels, chunk_size=0)
    with pytest.raises(UsageError, match="vocab_size=10 with a weight of 9 rows"):
        sw.linear_cross_entropy(hidden, weight, labels, vocab_size=10)
