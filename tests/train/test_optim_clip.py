"""Clipping counts each element once, whatever the mesh: norms and clipped gradients against torch in one process."""

import math

import pytest
import torch
from train.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss

import shardwise as sw
from shardwise.errors import ConfigError

LAYOUTS = [  # (layout, engine, ranks): rows that do not divide evenly, replicas, a 0-dim parameter, a tie
    ("dp_replicate=2", None, 2),
    ("dp_replicate=2", "fsdp2", 2),
    ("dp_shard=4", None, 4),
    ("dp_replicate=2,dp_shard=2", None, 4),
    ("dp_shard=1", "fsdp2", 1),
]


def _backward(world, model):
    with sw.window(model, mine([batch(i) for i in range(4)], world)) as w:
        for b in w:
            (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()


def _clipped(layout, engine, norm_type, max_norm):
    world, model = shard(layout, engine=engine)
    with world:
        _backward(world, model)
        norm = sw.clip_grad_norm_(model, max_norm, norm_type=norm_type)
        return norm, gradients(model)


@pytest.mark.parametrize("max_norm", [1e-2, math.inf], ids=["clips", "measures"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("layout", "engine", "size"), LAYOUTS)
def test_norm_and_clipped_gradients(ranks, layout, engine, size, norm_type, max_norm):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(4)])
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type=norm_type)
    for norm, grads in ranks.run(_clipped, size, layout, engine, norm_type, max_norm):
        assert norm.dtype == torch.float64 and norm.dim() == 0
        assert float(norm) == pytest.approx(float(wanted), rel=1e-12)
        assert_close(grads, {n: p.grad for n, p in plain.named_parameters()})


def _clamped(layout, engine, value):
    world, model = shard(layout, engine=engine)
    with world:
        _backward(world, model)
        before = world.agreement.num_exchanges
        sw.clip_grad_value_(model, value)
        return gradients(model), world.agreement.num_exchanges - before


@pytest.mark.parametrize(("layout", "engine", "size"), LAYOUTS)
def test_clamped_gradients(ranks, layout, engine, size):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(4)])
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    for grads, num_exchanges in ranks.run(_clamped, size, layout, engine, 1e-3):
        assert_close(grads, {n: p.grad for n, p in plain.named_parameters()})
        assert num_exchanges == 0


def _nothing_to_clip():
    world, model = shard("dp_shard=2")
    with world:
        return [float(sw.clip_grad_norm_(model, 1.0, norm_type=p)) for p in (1.0, 2.0, math.inf)]


def test_without_gradients_the_norm_is_zero(ranks):
    assert ranks.run(_nothing_to_clip, 2) == [[0.0, 0.0, 0.0]] * 2


def _refused():
    world, model = shard("dp_shard=1")
    texts = []
    with world:
        for call in (
            lambda: sw.clip_grad_norm_(model, 0.0),
            lambda: sw.clip_grad_norm_(model, 1.0, norm_type=-1),
            lambda: sw.clip_grad_norm_(model, math.nan),
            lambda: sw.clip_grad_value_(model, 0),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.0),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), on_nonfinite="ignore"),
        ):
            with pytest.raises(ConfigError) as caught:
                call()
            texts.append(caught.value.given)
    return texts


def test_bad_arguments_are_refused(ranks):
    (texts,) = ranks.run(_refused, 1)
    assert texts == [
        "clip_grad_norm_(max_norm=0.0, norm_type=2.0)",
        "clip_grad_norm_(max_norm=1.0, norm_type=-1)",
        "clip_grad_norm_(max_norm=nan, norm_type=2.0)",
        "clip_grad_value_(value=0)",
        "max_grad_norm=0.0",
        "on_nonfinite='ignore'",
    ]
