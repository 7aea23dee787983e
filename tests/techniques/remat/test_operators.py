"""Which results selective keeps, asked of the policy itself: what needs an accelerator to happen is seen here too."""

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.errors import PlanError
from shardwise.techniques.remat import act as remat
from shardwise.techniques.remat.operators import keep_policy

aten = torch.ops.aten
MANY = torch.zeros(1, 1, 2, 4)


def keeps(save: tuple[str, ...], op, *args, **kwargs) -> bool:
    return keep_policy(save)(None, op, *args, **kwargs) is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(
    ("save", "op", "kept"),
    [
        (("matmul",), aten.addmm.default, True),
        (("matmul",), aten.bmm.default, True),
        (("matmul",), aten.tanh.default, False),
        (("attention",), aten.mm.default, False),
        (("aten.gelu",), aten.gelu.default, True),
        (("gelu",), aten.gelu.default, True),
        (("gelu",), aten.topk.default, True),  # routing: always
        (("gelu",), aten.max.dim, True),
        (("gelu",), aten.max.default, False),
        (("gelu",), aten._local_scalar_dense.default, True),  # waits for the device
    ],
)
def test_what_is_kept(save, op, kept):
    assert keeps(save, op, torch.zeros(2)) == kept


@pytest.mark.parametrize(
    "op", [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_t30_attention_with_dropout_is_run_again(op, dropout):
    """Kept, its random numbers would go to the next dropout of the block."""
    assert keeps(("attention",), op, MANY, MANY, MANY, dropout) == (dropout == 0)
    assert keeps(("attention",), op, MANY, MANY, MANY, dropout_p=dropout) == (dropout == 0)
    assert keeps(("attention",), op, MANY, MANY, MANY)  # the default is none


def test_t30_copies_to_the_host_are_kept():
    away, here = torch.zeros(2, device="meta"), torch.zeros(2)
    assert keeps(("gelu",), aten._to_copy.default, away, device=torch.device("cpu"))
    assert not keeps(("gelu",), aten._to_copy.default, here, device=torch.device("cpu"))
    assert not keeps(("gelu",), aten._to_copy.default, away, dtype=torch.float64)


@pytest.mark.parametrize("word", ["aten.rand_like", "native_dropout", "aten.linear", "mm_", "nothing.here", ""])
def test_what_cannot_be_kept_is_refused(word):
    with pytest.raises(PlanError) as caught:
        keep_policy((word,))
    assert repr(word) in str(caught.value)


def test_offload_takes_what_a_block_keeps_and_gives_it_back(monkeypatch):
    """On cuda; here the two functions stand in that would move it."""
    moved = []
    monkeypatch.setattr(remat, "_to_host", lambda t: moved.append(t.shape) or t.numpy(force=True))
    monkeypatch.setattr(remat, "_from_host", lambda kept: torch.from_numpy(kept))
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    block(x * 2).sum().backward()
    want = [block[0].weight.grad.clone(), x.grad.clone()]
    block.zero_grad()
    x.grad = None
    buffers = remat.BlockBuffers("block", [*block.modules()], [], [])
    block.__dict__[remat._STATE] = remat._State(block, "block", {"offload": True}, None, torch.device("cpu"), buffers)
    block.forward = types.MethodType(remat._forward, block)
    block(x * 2).sum().backward()
    moved = [shape for shape in moved if shape != (0,)]  # torch 2.11 keeps an empty one beside it
    assert moved == [(3, 4)]  # the input alone: what is computed in the block is not kept at all
    assert torch.equal(block[0].weight.grad, want[0]) and torch.equal(x.grad, want[1])


def test_parameters_and_masks_stay_where_they_are():
    device = torch.zeros(2, device="meta")
    for kept in (torch.zeros(2), device.bool(), nn.Parameter(device)):
        assert remat._to_host(kept) is kept
