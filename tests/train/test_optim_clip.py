"""Clipping counts each element once, whatever the mesh: norms and clipped gradients against torch in one process."""

import math
import time

import pytest
import torch
from train.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss

import shardwise as sw
from shardwise.errors import ConfigError, RankError

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


def _not_finite(layout, norm_type, value):
    """A gradient that is not finite, on the last rank only."""
    world, model = shard(layout)
    with world:
        _backward(world, model)
        if world.rank == world.size - 1:
            model.blocks[0].weight.grad.to_local()[-1, 0] = value
        return float(sw.clip_grad_norm_(model, 1.0, norm_type=norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_on_one_rank_shows_on_all(ranks, norm_type, value):
    assert [str(norm) for norm in ranks.run(_not_finite, 2, "dp_shard=2", norm_type, value)] == [str(value)] * 2


def _same_norm_as_a_step(layout, engine):
    world, model = shard(layout, engine=engine)
    with world:
        _backward(world, model)
        norm = float(sw.clip_grad_norm_(model, math.inf))
        model.zero_grad()
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        return norm, step(mine([batch(i) for i in range(4)], world)).grad_norm


@pytest.mark.parametrize(("layout", "engine", "size"), LAYOUTS)
def test_an_own_loop_measures_the_norm_of_a_step(ranks, layout, engine, size):
    for norm, step_norm in ranks.run(_same_norm_as_a_step, size, layout, engine):
        assert norm == pytest.approx(step_norm, rel=1e-15)


def _one_does_not_clip(norm_type):
    world = sw.init("dp_shard=2", device="cpu", timeout_s=3)
    model = sw.parallelize(build(), world)
    _backward(world, model)
    if world.rank == 1:
        world.watch.at("a long lunch")
        time.sleep(4.0)
        return None
    with pytest.raises(RankError) as caught:
        sw.clip_grad_norm_(model, 1.0, norm_type=norm_type)
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_rank_that_does_not_come_to_clip_is_named(ranks, norm_type):
    text, who = ranks.run(_one_does_not_clip, 2, norm_type, timeout_s=30)[0]
    assert who == (1,)
    assert f"rank 0 waited 3 s at clipping (max_norm=1.0, norm_type={norm_type})" in text
    assert "rank 1 waits at a long lunch" in text


def _clip_differently(arguments):
    world, model = shard("dp_shard=2")
    with world:
        _backward(world, model)
        with pytest.raises(RankError) as caught:
            sw.clip_grad_norm_(model, **arguments[world.rank])
        return str(caught.value)


@pytest.mark.parametrize(
    "other", [{"max_norm": 1.0, "norm_type": 3.0}, {"max_norm": 2.0}, {"max_norm": 1.0, "norm_type": math.inf}], ids=str
)
def test_ranks_that_clip_differently_are_told(ranks, other):
    for text in ranks.run(_clip_differently, 2, ({"max_norm": 1.0}, other)):
        assert "rank 1 came to clipping (max_norm=" in text
        assert "the others to clipping (max_norm=1.0, norm_type=2.0)" in text


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
