"""float16: the loss is scaled, gradients are unscaled before the clip, and a step that overflows anywhere is skipped everywhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layouts import every_layout
from step.plain import batch, build, sum_loss
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.step.scale import LossScale

BLOCKS = sw.Sharding(min_unit_bytes=0)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in runtime_of(model).parameters.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step_on(world: sw.World, *, precision="fp16", sharding=BLOCKS, **options) -> sw.TrainStep:
    """On the tied model with a 0-dim parameter, with momentum and a scheduler."""
    model = sw.parallelize(build().float(), world, precision=precision, sharding=sharding)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    return sw.TrainStep(model, optim, **{"loss": sum_loss, "scheduler": scheduler, "max_grad_norm": 0.05, **options})


def window(world: sw.World, index: int = 0) -> list[dict[str, Tensor]]:
    return [batch(index * 4 + 2 * i + world.axis("dp").rank % 2) for i in range(2)]


# ---- the scale -------------------------------------------------------------------------------------------------------


def scaled_by(layout: str, scale: float) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        step = step_on(world, precision="fp32", scaler=scaler)
        seen: list[float] = []
        step.model.head.register_full_backward_pre_hook(lambda _m, grads: seen.append(float(grads[0].abs().max())))
        outs = [step(window(world, i)) for i in range(3)]
        return max(seen[:2]), [(out.loss, out.grad_norm, out.loss_scale) for out in outs], values(step.model)


@every_layout("one", "fsdp-2", "hsdp-2x2", "ddp-2", soak=("hsdp-2x2",))
def test_a_scale_shows_in_backward_and_nowhere_else(ranks, layout):
    """In fp32 a power of two changes no digit: norm, clipping and parameters are bit-equal, so it is unscaled before the clip."""
    for (low, few, plain), (high, many, scaled) in zip(
        ranks.run(scaled_by, layout.num_ranks, layout.text, 1.0),
        ranks.run(scaled_by, layout.num_ranks, layout.text, 1024.0),
        strict=True,
    ):
        assert high == 1024 * low > 0
        assert [out[:2] for out in few] == [out[:2] for out in many] and few[0][1] > 0.05
        assert [out[2] for out in many] == [1024, 1024, 2048]  # it grows after two steps without overflow
        assert same(plain, scaled)


def clipped_under(layout: str, scale: float, norm_type, value) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        step = step_on(world, precision="fp32", scaler=scaler, norm_type=norm_type, clip_grad_value=value)
        outs = [step(window(world, i)) for i in range(2)]
        return [(out.grad_norm, out.skipped) for out in outs], values(step.model)


@pytest.mark.parametrize(("norm_type", "value"), [("inf", 1e-3), (8.0, None)])
def test_every_kind_of_clipping_is_of_unscaled_gradients(ranks, norm_type, value):
    """With a scale of 2^40: the 8th powers of such gradients are above all float32 numbers."""
    (plain, wanted) = ranks.run(clipped_under, 2, "dp_shard=2", 1.0, norm_type, value)[0]
    (scaled, got) = ranks.run(clipped_under, 2, "dp_shard=2", 2.0**40, norm_type, value)[0]
    assert [norm for norm, _ in scaled] == pytest.approx([norm for norm, _ in plain], rel=1e-6)
    assert not any(skipped for _, skipped in (*plain, *scaled))
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-7)


def small_gradients(layout: str, enabled: bool) -> tuple:
    """Each token's part of the gradient is 1e-9 of the usual, below all float16 numbers."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        scaler = None if enabled else torch.amp.GradScaler(enabled=False)
        step = step_on(world, loss=lambda out, b: sum_loss(out.float(), b) * 1e-9, count=lambda b: int((b["labels"] != -100).sum()),
                       max_grad_norm=None, scaler=scaler)  # fmt: skip
        out = step(window(world))
        return out.grad_norm, out.loss_scale, step.scaler is not None


def test_gradients_that_float16_cannot_hold_survive(ranks):
    (norm, scale, has) = ranks.run(small_gradients, 2, "dp_shard=2", True)[0]
    (lost, none, without) = ranks.run(small_gradients, 2, "dp_shard=2", False)[0]
    assert (scale, has) == (65536.0, True) and (none, without) == (None, False)
    assert norm > 1e-10 and lost < 0.5 * norm


# ---- skipped steps ---------------------------------------------------------------------------------------------------


class Burst(nn.Module):
    """Its gradient is ``x`` times what comes; forward is small whatever x is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.gate = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = F.dropout(x, 0.5, self.training)
        for layer in self.layers:
            x = layer(x)
        return x * self.gate


def burst(world: sw.World, **options) -> sw.TrainStep:
    torch.manual_seed(0)
    model = sw.parallelize(Burst(), world, precision="fp16", sharding=BLOCKS)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    return sw.TrainStep(model, optim, loss=spiked, count=lambda b: 1, scheduler=scheduler, **options)


def spiked(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    """Overflows in backward where the batch's weight is large, and not in forward."""
    return (out.float() * b["weight"]).sum() * b["times"]


def spike(world: sw.World, weight: float, times: float = 1.0) -> list[dict[str, Tensor]]:
    """A window with ``weight`` on the last rank, a small one on the others."""
    weight = weight if world.rank == world.size - 1 else 1e-3
    return [{"x": torch.ones(2, 4), "weight": torch.tensor(weight), "times": torch.tensor(times)}]


def one_overflow(layout: str) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        step = burst(world, max_grad_norm=1.0)
        outs = [step(spike(world, 1e-3))]
        before, state = values(step.model), step.optim.state_dict()["state"]
        momentum = {key: whole(entry["momentum_buffer"]) for key, entry in state.items()}
        outs.append(step(spike(world, 4.0)))  # 4 * 65536 is infinite in float16, on the last rank
        kept = same(before, values(step.model))
        after = step.optim.state_dict()["state"]
        kept &= all(torch.equal(momentum[key], whole(entry["momentum_buffer"])) for key, entry in after.items())
        rates = [step.scheduler.last_epoch]
        seen = float(step.model.seen)
        outs.append(step(spike(world, 1e-3)))
        rates.append(step.scheduler.last_epoch)
        told = [(out.step, out.skipped, out.loss_scale, out.grad_norm) for out in outs]
        return told, kept, rates, seen, (step.num_steps, step.num_skipped), step.scaler.get_scale()


@every_layout("one", "fsdp-2", "hsdp-2x2", soak=("hsdp-2x2",))
def test_an_overflow_on_one_rank_is_skipped_on_all(ranks, layout):
    found = ranks.run(one_overflow, layout.num_ranks, layout.text)
    for told, kept, rates, seen, counts, scale in found:
        assert [entry[:3] for entry in told] == [(1, False, 65536.0), (2, True, 65536.0), (3, False, 32768.0)]
        assert not torch.tensor(told[1][3]).isfinite() and told[0][3] < 1e3
        assert kept and rates == [1, 2] and seen == 1.0  # parameters, momentum, scheduler and buffers as they were
        assert counts == (3, 1) and scale == 32768.0
    assert all(str(entry) == str(found[0]) for entry in found)


def beyond_the_scaler(how: str) -> tuple:
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        step = burst(world, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
        skipped = 0
        try:
            for _ in range(4):
                big = spike(world, 1.0, float("inf")) if how == "loss" else spike(world, 1e6)
                skipped += step(big).skipped
        except sw.NonFiniteError as error:
            return str(error), skipped, error.ranks
        return "", skipped, ()


@pytest.mark.parametrize(("how", "skips"), [("loss", 0), ("gradient", 2)])
def test_what_no_scale_can_help_is_raised(ranks, how, skips):
    """A loss that is infinite, and gradients that are at a scale of 1: 4 and 2 were tried before."""
    for text, skipped, _ in ranks.run(beyond_the_scaler, 2, how):
        assert skipped == skips and "loss scale" in text and "bf16" in text


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


def own_loop(layout: str, weights: list[float]) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = sw.parallelize(Burst(), world, precision="fp16", sharding=BLOCKS)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        told = []
        for weight in weights:
            with sw.window(model, spike(world, weight), count=lambda b: 1) as w:
                for b in w:
                    scaler.scale(spiked(model(b["x"]), b) / w.num_tokens).backward()
            finite = sw.unscale_gradients_(model, optim, scaler)
            norm = float(sw.clip_grad_norm_(model, 1.0))
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            told.append((finite, scaler.get_scale(), norm))
        return told, values(model)


def own_step(layout: str, weights: list[float]) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        step = burst(world, max_grad_norm=1.0)
        step.scheduler = None
        outs = [step(spike(world, weight)) for weight in weights]
        return [(not out.skipped, out.grad_norm) for out in outs], values(step.model)


@every_layout("one", "fsdp-2")
def test_a_loop_of_ones_own_is_the_step(ranks, layout):
    weights = [1e-3, 4.0, 2e-3]
    for (told, found), (steps, expected) in zip(
        ranks.run(own_loop, layout.num_ranks, layout.text, weights),
        ranks.run(own_step, layout.num_ranks, layout.text, weights),
        strict=True,
    ):
        assert [scale for _, scale, _ in told] == [65536.0, 32768.0, 32768.0]
        assert [finite for finite, _, _ in told] == [finite for finite, _ in steps] == [True, False, True]
        assert told[0][2] == steps[0][1] and told[2][2] == steps[2][1]
        assert same(found, expected)


def infinite_on_one(layout: str) -> tuple:
    """Only the last rank's own shards hold an infinite gradient."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        step = burst(world)
        with sw.accumulate(step.model, is_last=True):
            step.scaler.scale(spiked(step.model(torch.ones(2, 4)), spike(world, 1e-3)[0])).backward()
        if world.rank == world.size - 1:
            runtime_of(step.model).gradients()["layers.1.weight"].view(-1)[0] = float("inf")
        finite, before = sw.unscale_gradients_(step.model, step.optim, step.scaler), values(step.model)
        step.scaler.step(step.optim)
        step.scaler.update()
        return finite, same(before, values(step.model)), step.scaler.get_scale()


def test_a_shard_of_one_rank_is_enough_to_skip(ranks):
    assert ranks.run(infinite_on_one, 2, "dp_shard=2") == [(False, True, 32768.0)] * 2


def scaled_loop(models: list[nn.Module], of: list[list[nn.Module]], backward, unscale) -> tuple:
    """Three windows of a loop with an optimizer for each of ``of``; a gradient of the first one's is infinite in the second window."""
    optims = [torch.optim.SGD([p for m in each for p in m.parameters()], lr=0.1) for each in of]
    scaler, told = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for number in range(3):
        backward(models, number, scaler)
        if number == 1:
            models[0].up.weight.grad.mul_(float("inf"))
        told.append([unscale(models[0], optim, scaler) for optim in optims])
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()
    return told, scaler.get_scale()


class UpDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


OPTIMIZERS = {
    "one of two models": lambda a, b: [[a, b]],
    "two of a model": lambda a, b: [[a.up, b], [a.down]],
    "one of a part": lambda a, b: [[a.down], [a.up], [b]],
}


def loops(layout: str, how: str) -> tuple:
    """What the loop says, and the largest difference to one process with torch's own ``unscale_``."""

    def made() -> list[nn.Module]:
        torch.manual_seed(1)
        return [UpDown(), UpDown()]

    def data(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (3, 1, 4, 2)]

    def alone(models: list[nn.Module], number: int, scaler) -> None:
        for x in data(number):
            scaler.scale(models[1](models[0](x)).square().sum() / 10).backward()

    with sw.init(layout, device="cpu", timeout_s=20) as world:

        def parallel(models: list[nn.Module], number: int, scaler) -> None:
            axis = world.axis("dp")
            with sw.window(
                models[0], [{"x": x} for x in data(number)[axis.rank :: axis.size]], count=lambda b: len(b["x"])
            ) as w:
                for b in w:
                    scaler.scale(models[1](models[0](b["x"])).square().sum() / w.num_tokens).backward()

        plain, example = made(), {"x": torch.zeros(2, 4, dtype=torch.float64)}
        _, scale = scaled_loop(plain, OPTIMIZERS[how](*plain), alone, lambda _, optim, scaler: scaler.unscale_(optim))
        models = [sw.parallelize(model, world, sharding=BLOCKS, example=example) for model in made()]
        told, found = scaled_loop(models, OPTIMIZERS[how](*models), parallel, sw.unscale_gradients_)
        pairs = zip(models, plain, strict=True)
        off = max(
            float((whole(a) - b.detach()).abs().max())
            for one, other in pairs
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )
        return told, found == scale, off


@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize(
    "layout", ["dp_shard=2", *(pytest.param(each, marks=pytest.mark.soak) for each in ("dp_replicate=2", "tp=2"))]
)
def test_gradients_are_unscaled_and_judged_for_each_optimizer(ranks, layout, how):
    """One optimizer over two models; several over one, of which that with the infinite gradient alone is skipped."""
    for told, same_scale, off in ranks.run(loops, 2, layout, how):
        assert same_scale and off < 1e-12
        assert told[0] == told[2] == [True] * len(told[0])
        assert (
            told[1]
            == {"one of two models": [False], "two of a model": [False, True], "one of a part": [True, False, True]}[
                how
            ]
        )


def others_unscaled(layout: str) -> list[float]:
    """Gradients of parameters of no model of ours: dense, sparse, and of torch's own FSDP2."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(UpDown(), world, sharding=BLOCKS)
        plain, table = nn.Linear(4, 4, dtype=torch.float64), nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
        sharded = fully_shard(nn.Linear(4, 4, dtype=torch.float64))
        params = [*plain.parameters(), *table.parameters(), *sharded.parameters()]
        optim, scaler = torch.optim.SGD(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(table(torch.tensor([1, 1])).sum())
        for param in (*plain.parameters(), *sharded.parameters()):
            param.grad = torch.full_like(param, 8.0)
        table.weight.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), 8.0, dtype=torch.float64), (4, 2))
        assert sw.unscale_gradients_(model, optim, scaler)
        found = [param.grad.to_dense() if param.grad.is_sparse else whole(param.grad) for param in params]
        return [float(grad.max()) for grad in found]


def test_gradients_of_any_kind_of_tensor_are_unscaled(ranks):
    assert ranks.run(others_unscaled, 2, "dp_replicate=2") == [[1.0, 1.0, 2.0, 1.0, 1.0]] * 2


def joined(layout: str, has_scaler: bool) -> tuple:
    """What a step says whose loss comes to a second model; the second one's gradients; whether the first one has changed."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(1)
        first, second = (sw.parallelize(UpDown(), world, sharding=BLOCKS) for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if has_scaler else None
        step = sw.TrainStep(first, torch.optim.SGD(first.parameters(), lr=0.1), loss=None, scaler=scaler, count=lambda b: len(b["x"]),
                            forward=lambda model, b: second(model(b["x"])).square().sum())  # fmt: skip
        for param in second.parameters():
            param.grad = torch.ones_like(param)
        before, said = values(first), ""
        try:
            step([{"x": torch.ones(2, 4, dtype=torch.float64)}])
        except sw.UnsupportedError as error:
            said = str(error)
        return said, [whole(param.grad) for param in second.parameters()], same(before, values(first))


def test_a_scaled_step_that_comes_to_another_model_is_refused(ranks):
    """Its gradients are what they were."""
    for said, grads, is_same in ranks.run(joined, 2, "dp_shard=2", True):
        assert said.startswith("a TrainStep with a gradient scaler, whose loss comes to another model") and is_same
        assert all(bool((grad == 1).all()) for grad in grads)
    for said, grads, is_same in ranks.run(joined, 2, "dp_shard=2", False):
        assert not said and not is_same and not all(bool((grad == 1).all()) for grad in grads)


# ---- checkpoints and misuse ------------------------------------------------------------------------------------------


def resumed(layout: str) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        whole_run = burst(world)
        for weight in (1e-3, 4.0):
            whole_run(spike(world, weight))
        state, model = whole_run.state_dict(), values(whole_run.model)
        optim = copy.deepcopy(whole_run.optim.state_dict())
        fresh = burst(world)
        for name, param in runtime_of(fresh.model).parameters.items():
            with torch.no_grad():
                param.copy_(runtime_of(whole_run.model).parameters[name])
        assert same(model, values(fresh.model))
        fresh.optim.load_state_dict(optim)
        fresh.load_state_dict(state)
        outs = [step(spike(world, 1e-3)) for step in (whole_run, fresh)]
        refused = []
        for broken in ({k: v for k, v in state.items() if k != "scaler"}, {**state, "model": 1}, {}):
            try:
                fresh.load_state_dict(broken)
            except sw.CheckpointError as error:
                refused.append(str(error))
        return outs, same(values(whole_run.model), values(fresh.model)), state, refused


def test_the_state_of_a_step_goes_on_where_it_was(ranks):
    for outs, equal, state, refused in ranks.run(resumed, 2, "dp_shard=2"):
        assert outs[0] == outs[1] and outs[1].step == 3 and outs[1].loss_scale == 32768.0 and equal
        assert (
            state["scaler"]["scale"] == 32768.0 and state["num_skipped"] == 1 and state["scheduler"]["last_epoch"] == 1
        )
        assert (
            "has a scaler, which it lacks" in refused[0] and "has no model" in refused[1] and "num_steps" in refused[2]
        )


def misuse() -> dict[str, str]:
    found = {}

    def told(key: str, call) -> None:
        try:
            call()
        except (sw.ShardwiseError, AssertionError) as error:
            found[key] = str(error)

    with sw.init("dp_shard=1", device="cpu") as world:
        told("kind", lambda: step_on(world, scaler=2.0**16))
        half = sw.parallelize(build().half(), world)
        optim = torch.optim.SGD(half.parameters(), lr=0.1)
        told("storage", lambda: sw.TrainStep(half, optim, loss=sum_loss))
        off = torch.amp.GradScaler(enabled=False)
        assert sw.TrainStep(half, optim, loss=sum_loss, scaler=off).scaler is None
        step = step_on(world)
        loss = sum_loss(step.model(batch(0)["input_ids"]), batch(0))
        step.scaler.scale(loss).backward()
        sw.unscale_gradients_(step.model, step.optim, step.scaler)
        told("twice", lambda: sw.unscale_gradients_(step.model, step.optim, step.scaler))
        assert not LossScale(runtime_of(step.model), step.optim, None).explains(float("nan"))
    return found


def test_what_a_scaler_cannot_do_is_refused(ranks):
    found = ranks.run(misuse, 1)[0]
    assert "torch.amp.GradScaler" in found["kind"]
    assert found["storage"].startswith("gate: ") and 'precision="fp16"' in found["storage"]
    assert "twice" in found["twice"]


def differ() -> str:
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        try:
            step_on(world, scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + world.rank)))
        except sw.RankError as error:
            return str(error)
        return ""


def test_ranks_with_other_scales_are_told(ranks):
    assert all("scaler" in text for text in ranks.run(differ, 2))
