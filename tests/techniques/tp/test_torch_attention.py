"""Torch's own attention: written out as linear layers it gives torch's numbers, and cut over ranks those of one process."""

import copy
import warnings

import models
import pytest
import torch
from techniques.tp import states
from torch import nn

import shardwise as sw
from shardwise.errors import UnsupportedError
from shardwise.model.attention import attentions, write_out

BATCH, LENGTH, HEADS, WIDTH = 3, 5, 2, 8
MASKS = {
    "none": lambda: None,
    "booleans": lambda: torch.eye(LENGTH).roll(1, 0).bool(),
    "numbers": lambda: torch.randn(LENGTH, LENGTH, dtype=torch.float64),
    "of each head": lambda: torch.randn(BATCH * HEADS, LENGTH, LENGTH, dtype=torch.float64),
    "causal": lambda: torch.ones(LENGTH, LENGTH).triu(1).bool(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("needs_weights", [True, False])
@pytest.mark.parametrize("options", [{"batch_first": True}, {"bias": False}, {"dropout": 0.3}], ids=str)
def test_written_out_it_is_torchs(options, needs_weights, mask):
    """Outputs, weights and gradients; dropout draws the same numbers."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    written = copy.deepcopy(plain)
    write_out(written, is_cut=False)
    given = {"attn_mask": MASKS[mask](), "need_weights": needs_weights, "is_causal": mask == "causal"}
    for pads in (None, torch.arange(LENGTH).expand(BATCH, -1) > torch.tensor([[4], [3], [2]])):
        x, found = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), []
        x = x if options.get("batch_first") else x.transpose(0, 1)
        for module in (plain, written):
            torch.manual_seed(1)
            inputs = x.clone().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y, weights = module(inputs, inputs, inputs, key_padding_mask=pads, **given)
            module.zero_grad()
            (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
            found.append([y, weights, inputs.grad, *(param.grad.clone() for param in module.parameters())])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-11, atol=1e-12, equal_nan=True)


def test_a_single_sample_and_weights_of_each_head():
    plain = nn.MultiheadAttention(WIDTH, HEADS).double()
    written = copy.deepcopy(plain)
    write_out(written, is_cut=False)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    for one, other in zip(*(m(x, x, x, average_attn_weights=False) for m in (plain, written)), strict=True):
        assert one.shape == other.shape and torch.allclose(one, other)


def test_which_can_be_written_out():
    model = nn.ModuleList(
        [
            nn.MultiheadAttention(WIDTH, HEADS),
            nn.MultiheadAttention(WIDTH, HEADS, kdim=4),
            nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True),
            nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True),
        ]
    )
    assert attentions(model) == ["0"]


def test_cut_heads_are_no_attention_to_other_values():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    write_out(module, is_cut=True)
    x = torch.randn(LENGTH, BATCH, WIDTH)
    with pytest.raises(UnsupportedError, match="other keys and values than in the example"):
        module(x, x + 1, x + 1)


CELLS = [
    (name, layout, layout != "tp=2" and name.partition(": ")[2] not in ("encoder", "weights"))
    for name in models.select("torch attention")
    for layout in ("tp=2", "dp_shard=2,tp=2", "tp=4")
]


@pytest.mark.quick(
    "torch attention: causal, padded-tp=2", "torch attention: weights-dp_shard=2,tp=2", "torch attention: crossed-tp=2"
)
@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*cell, marks=[pytest.mark.soak] if slow else []) for *cell, slow in CELLS]
)
def test_training_is_that_of_one_process(ranks, name, layout):
    model = models.get(name)
    units = {"sharding": sw.Sharding(min_unit_bytes=0)} if "dp_shard" in layout else {}
    report = sw.verify(model.build, layout, batches=model.windows(2, 3), run=ranks.run, **units)
    whole = 8 * sum(param.numel() for param in model.build().parameters())
    is_left = name.endswith(("in use", "crossed"))
    assert max(report.bytes_per_rank) / whole < (1.0 if is_left else 0.63)


@pytest.mark.parametrize("name", ["encoder", "causal, padded"])
def test_without_gradients_torchs_own_kernel_is_not_given_parts(ranks, name):
    off, text = ranks.run(states.off_by, 2, f"torch attention: {name}", "tp=2", None, True)[0]
    assert off < 1e-5 and "computes its projections as linear layers" in text
