"""Clipping counts each element once, whatever the mesh: norms and clipped gradients against torch in one process."""

import math
import time

import pytest
import torch
from layouts import every_layout
from step.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss, values
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, NonFiniteError, RankError, UnsupportedError
from shardwise.parallel import runtime_of
from shardwise.run.reference import ReferenceConfig, ReferenceModel
from shardwise.step.norm import norm_power_sum

# Rows that do not divide evenly, replicas, a 0-dim parameter, a tie.
MESHES = ("ddp-2", "fsdp2-2x1", "fsdp-4", "hsdp-2x2", "one-fsdp2")


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


@pytest.mark.quick(
    "ddp-2-1.0-clips",
    "ddp-2-2.0-measures",
    "ddp-2-inf-clips",
    "fsdp2-2x1-1.0-measures",
    "fsdp2-2x1-3.0-clips",
    "fsdp-4-2.0-clips",
    "fsdp-4-inf-measures",
    "hsdp-2x2-1.0-clips",
    "hsdp-2x2-3.0-measures",
    "hsdp-2x2-inf-clips",
    "one-fsdp2-2.0-measures",
    "one-fsdp2-3.0-clips",
)
@pytest.mark.parametrize("max_norm", [1e-2, math.inf], ids=["clips", "measures"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@every_layout(*MESHES)
def test_norm_and_clipped_gradients(ranks, layout, norm_type, max_norm):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(4)])
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type=norm_type)
    for norm, grads in ranks.run(_clipped, layout.num_ranks, layout.text, layout.engine, norm_type, max_norm):
        assert norm.dtype == torch.float64 and norm.dim() == 0
        assert float(norm) == pytest.approx(float(wanted), rel=1e-12)
        assert_close(grads, {n: p.grad for n, p in plain.named_parameters()})


def _counted(layout, engine):
    world, model = shard(layout, engine=engine)
    with world:
        _backward(world, model)
        runtime = runtime_of(model)
        return {name: sum(x.numel() for x in runtime.owned(name, grad)) for name, grad in runtime.gradients().items()}


@pytest.mark.quick("ddp-2", "fsdp2-2x1", "hsdp-2x2", "one-fsdp2")
@every_layout(*MESHES)
def test_each_element_is_counted_on_one_rank_and_each_rank_counts_about_as_many(ranks, layout):
    by_rank = ranks.run(_counted, layout.num_ranks, layout.text, layout.engine)
    sizes = {name: param.numel() for name, param in build().named_parameters()}
    assert {name: sum(counted[name] for counted in by_rank) for name in sizes} == sizes
    totals = [sum(counted.values()) for counted in by_rank]
    assert max(totals) - min(totals) <= 2 * max(sizes.values())


def blocks():
    return ReferenceModel(ReferenceConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn=32, vocab=32))


def with_a_frozen_part():
    """A model whose largest parameter is frozen: that it is counted is no work."""
    return nn.Sequential(nn.Linear(64, 64).requires_grad_(False), *(nn.Linear(4, 4) for _ in range(6)))


def _counted_of(build_model, layout):
    with sw.init(layout, device="cpu") as world:
        runtime = runtime_of(sw.parallelize(build_model(), world))
        local = runtime.local_tensors()
        return {name: sum(x.numel() for x in runtime.owned(name, local[name])) for name in runtime.trainable}


@pytest.mark.quick("blocks-dp_replicate=2,tp=2", "with_a_frozen_part-dp_replicate=4")
@pytest.mark.parametrize(
    ("build_model", "layout"),
    [(blocks, "dp_replicate=2,tp=2"), (blocks, "tp=4"), (with_a_frozen_part, "dp_replicate=4")],
)
def test_each_element_is_counted_once_under_tensor_parallel_and_frozen_ones_are_no_work(ranks, build_model, layout):
    by_rank = ranks.run(_counted_of, 4, build_model, layout)
    sizes = {name: param.numel() for name, param in build_model().named_parameters() if param.requires_grad}
    assert {name: sum(counted[name] for counted in by_rank) for name in sizes} == sizes
    totals = [sum(counted.values()) for counted in by_rank]
    assert max(totals) - min(totals) <= max(sizes.values())


def _clamped(layout, engine, value):
    world, model = shard(layout, engine=engine)
    with world:
        _backward(world, model)
        before = world.agreement.num_exchanges
        sw.clip_grad_value_(model, value)
        return gradients(model), world.agreement.num_exchanges - before


@pytest.mark.quick("ddp-2", "fsdp2-2x1", "hsdp-2x2", "one-fsdp2")
@every_layout(*MESHES)
def test_clamped_gradients(ranks, layout):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(4)])
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    for grads, num_exchanges in ranks.run(_clamped, layout.num_ranks, layout.text, layout.engine, 1e-3):
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


@pytest.mark.quick("ddp-2", "fsdp2-2x1", "hsdp-2x2", "one-fsdp2")
@every_layout(*MESHES)
def test_an_own_loop_measures_the_norm_of_a_step(ranks, layout):
    for norm, step_norm in ranks.run(_same_norm_as_a_step, layout.num_ranks, layout.text, layout.engine):
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


@pytest.mark.quick("2.0")
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


CLIPS = [
    {"max_grad_norm": 1e-2, "norm_type": "inf"},
    {"max_grad_norm": 1e-2, "norm_type": 1},
    {"max_grad_norm": 1e-2, "norm_type": 3.0, "clip_grad_value": 1e-3},
    {"clip_grad_value": 1e-3},
    {"norm_type": math.inf},
]


def _plain_steps(max_grad_norm=math.inf, norm_type=2.0, clip_grad_value=None):
    """Two steps of a script for one process."""
    torch.manual_seed(0)
    model, norms = build(), []
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for number in range(2):
        plain_backward(model, [batch(4 * number + i) for i in range(4)])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm, norm_type=norm_type)))
        if clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_grad_value)
        optim.step()
        optim.zero_grad()
    return norms, values(model)


def _clipped_steps(layout, engine):
    """The same steps by a ``TrainStep``, once for each kind of clipping."""
    done = []
    for clip in CLIPS:
        world, model = shard(layout, engine=engine)
        with world:
            optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            step = sw.TrainStep(model, optim, loss=sum_loss, **clip)
            norms = [step(mine([batch(4 * n + i) for i in range(4)], world)).grad_norm for n in range(2)]
            done.append((norms, values(model)))
    return done


@every_layout("ddp-2", "hsdp-2x2")
def test_steps_with_every_kind_of_clipping(ranks, layout):
    plain = [_plain_steps(**clip) for clip in CLIPS]
    bare = _plain_steps()
    assert all(
        float((tensors["embed.weight"] - bare[1]["embed.weight"]).abs().max()) > 1e-4 for _, tensors in plain[:-1]
    )
    for done in ranks.run(_clipped_steps, layout.num_ranks, layout.text, layout.engine):
        for (norms, tensors), (wanted_norms, wanted) in zip(done, plain, strict=True):
            assert norms == pytest.approx(wanted_norms, rel=1e-12)
            assert_close(tensors, wanted)


class Mixed(nn.Module):
    """Real and complex parameters of two dtypes, one in an order of its own, and one that no sample uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(5, 7, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))  # in a bucket of its own, of one number
        self.unused = nn.Linear(11, 13)

    def forward(self, x):
        return (self.head((self.conv(x).mean((2, 3)) * self.turn).abs().double()) * self.scale.double()).square().sum()


def _pictures():
    torch.manual_seed(1)
    return [{"x": torch.randn(2, 3, 4, 4)} for _ in range(4)]


def _told_norms(layout, build_model, bucket_mb, norm_type):
    """The gradient norms that two steps tell, of one window."""
    is_mixed = build_model is Mixed
    own = {"loss": lambda out, _: out, "count": lambda b: len(b["x"]), "forward": lambda model, b: model(b["x"])}
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build_model(), world, ddp=sw.DDP(bucket_cap_mb=bucket_mb))
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        step = sw.TrainStep(model, optim, norm_type=norm_type, **(own if is_mixed else {}))
        batches = _pictures() if is_mixed else [batch(i) for i in range(4)]
        return [step(mine(batches, world)).grad_norm for _ in range(2)]


@pytest.mark.quick(
    "Mixed-dp_replicate=2-25.0-2.0",
    "Mixed-dp_replicate=2-25.0-inf",
    "Mixed-dp_replicate=4-0.0001-inf",
    "blocks-dp_replicate=2,tp=2-25.0-2.0",
    "blocks-dp_replicate=4-0.001-2.0",
)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(
    ("build_model", "layout", "bucket_mb"),
    [
        (Mixed, "dp_replicate=2", 25.0),
        (Mixed, "dp_replicate=4", 1e-4),
        (blocks, "dp_replicate=2,tp=2", 25.0),
        (blocks, "dp_replicate=4", 1e-3),
    ],
)
def test_a_step_tells_the_norm_of_replicas(ranks, build_model, layout, bucket_mb, norm_type):
    """Of copies each rank counts a part of what they are packed in, however the parameters lie in it."""
    alone = ranks.run(_told_norms, 1, "dp_replicate=1", build_model, bucket_mb, norm_type)[0]
    assert alone[0] > 0.01 and alone[0] != alone[1]
    for norms in ranks.run(
        _told_norms, 2 if layout == "dp_replicate=2" else 4, layout, build_model, bucket_mb, norm_type
    ):
        assert norms == pytest.approx(alone, rel=1e-5 if build_model is blocks else 1e-2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_norm_of_millions_of_numbers(norm_type):
    """torch's own, in float32 on the CPU, is 2e-4 off."""
    torch.manual_seed(0)
    weight = torch.randn(2_000, 3_000)
    wanted = float(torch.linalg.vector_norm(weight.double(), norm_type))
    assert float(norm_power_sum([weight], norm_type)) ** (1 / norm_type) == pytest.approx(wanted, rel=1e-6)


def _plain_steps_changed():
    """A loop for one process that clips each step in another way."""
    torch.manual_seed(0)
    model, norms = build(), []
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, clip in enumerate(CLIPS):
        plain_backward(model, [batch(4 * number + i) for i in range(4)])
        max_norm, norm_type = clip.get("max_grad_norm", math.inf), clip.get("norm_type", 2.0)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type)))
        if "clip_grad_value" in clip:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip["clip_grad_value"])
        optim.step()
        optim.zero_grad()
    return norms, values(model)


def _steps_changed():
    """The same by attributes of one step; then values that none of them takes; then ranks that set one differently."""
    world, model = shard("dp_shard=2")
    with world:
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=sum_loss)
        norms = []
        for number, clip in enumerate(CLIPS):
            step.max_grad_norm, step.clip_grad_value = clip.get("max_grad_norm"), clip.get("clip_grad_value")
            step.norm_type = clip.get("norm_type", 2.0)
            norms.append(step(mine([batch(4 * number + i) for i in range(4)], world)).grad_norm)
        done, refused = values(model), []
        for name, value in (("max_grad_norm", "x"), ("norm_type", "max"), ("clip_grad_value", "1")):
            before = getattr(step, name)
            setattr(step, name, value)
            with pytest.raises(ConfigError) as caught:
                step(mine([batch(i) for i in range(4)], world))
            refused.append(caught.value.given)
            setattr(step, name, before)
        step.max_grad_norm = torch.tensor(0.5)  # a number all the same
        step(mine([batch(i) for i in range(4)], world))
        step.max_grad_norm = 0.5 + world.rank
        with pytest.raises(RankError) as apart:
            step(mine([batch(i) for i in range(4)], world))
        return norms, done, refused, str(apart.value)


def test_limits_and_the_kind_of_norm_may_be_changed_between_steps(ranks):
    wanted_norms, wanted = _plain_steps_changed()
    for norms, tensors, refused, apart in ranks.run(_steps_changed, 2):
        assert norms == pytest.approx(wanted_norms, rel=1e-12)
        assert_close(tensors, wanted)
        assert refused == ["max_grad_norm='x'", "norm_type='max'", "clip_grad_value='1'"]
        assert "max_grad_norm=0.5" in apart and "max_grad_norm=1.5" in apart


class Turned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.tensor([0.6 + 0.8j, 1.0 + 0.0j]))

    def forward(self, x):
        return (x * self.turn).real


def _complex_by_value():
    with sw.init(device="cpu") as world:
        model = sw.parallelize(Turned(), world)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.TrainStep(model, optim, max_grad_norm=1.0)
        with pytest.raises(UnsupportedError) as caught:
            sw.TrainStep(model, optim, clip_grad_value=1.0)
        with pytest.raises(UnsupportedError, match="clip_grad_value_"):
            sw.clip_grad_value_(model, 1.0)
        return caught.value.given, caught.value.name


def test_a_complex_gradient_is_not_clamped(ranks):
    assert ranks.run(_complex_by_value, 1) == [("clip_grad_value=1.0", "turn")]


def _powers_overflow(norm_type):
    world, model = shard("dp_shard=1")
    with world:
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), norm_type=norm_type,
                            loss=lambda output, b: sum_loss(output, b) * 1e6)  # fmt: skip
        with pytest.raises(NonFiniteError) as caught:
            step([batch(0)])
        return str(caught.value)


def test_powers_that_overflow_are_named_and_no_gradient_is(ranks):
    (text,) = ranks.run(_powers_overflow, 1, 100.0)
    assert "loss and gradients are finite, the sum of their powers for norm_type=100 is not" in text


def _refused():
    world, model = shard("dp_shard=1")
    texts = []
    with world:
        for call in (
            lambda: sw.clip_grad_norm_(model, 0.0),
            lambda: sw.clip_grad_norm_(model, 1.0, norm_type=-1),
            lambda: sw.clip_grad_norm_(model, math.nan),
            lambda: sw.clip_grad_value_(model, 0),
            lambda: sw.clip_grad_norm_(model, "1"),
            lambda: sw.clip_grad_norm_(model, 1.0, norm_type=True),
            lambda: sw.clip_grad_value_(model, "1"),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm="1.0"),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=[1.0]),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_grad_value="1"),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.0),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), on_nonfinite="ignore"),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_grad_value=-1.0),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), norm_type="max"),
            lambda: sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), norm_type=0),
        ):
            with pytest.raises(ConfigError) as caught:
                call()
            texts.append(caught.value.given)
    return texts


def test_bad_arguments_are_refused(ranks):
    (texts,) = ranks.run(_refused, 1)
    assert texts == [
        "clip_grad_norm_(max_norm=0.0)",
        "norm_type=-1",
        "clip_grad_norm_(max_norm=nan)",
        "clip_grad_value_(value=0)",
        "clip_grad_norm_(max_norm='1')",
        "norm_type=True",
        "clip_grad_value_(value='1')",
        "max_grad_norm='1.0'",
        "max_grad_norm=[1.0]",
        "clip_grad_value='1'",
        "max_grad_norm=0.0",
        "on_nonfinite='ignore'",
        "clip_grad_value=-1.0",
        "norm_type='max'",
        "norm_type=0",
    ]
