"""Loops of one's own give the gradients of one process, under replicas whatever the loop does; torch's own reducer is off,
hangs or ends in an error in most of them."""

import contextlib
import gc
import os
import warnings

import pytest
import torch
from models.towers import TwoTowers
from techniques.data.loops import LOOPS
from torch import nn

from shardwise import DDP
from shardwise.errors import RankError, UsageError
from shardwise.parallel import parallelize
from shardwise.step.clip import clip_grad_norm_, clip_grad_value_
from shardwise.step.local_optimizer import local_optimizer
from shardwise.step.own_loop import accumulate, count_tokens
from shardwise.step.scale import unscale_gradients_
from shardwise.step.window import window
from shardwise.world import init

WHOLE = ("encoders_by_themselves", "gradients_by_hand", "a_gradient_penalty")  # need parameters that are not cut


def model() -> nn.Module:
    torch.manual_seed(5)
    return TwoTowers().double()


def batch(index: int) -> dict:
    x = torch.randn(2 + index % 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
    return {"x": x}


def count(given: dict) -> int:
    return len(given["x"])


def one_process(loop: str, num: int) -> dict:
    plain = model()
    batches = [batch(i) for i in range(num)]
    for given in batches:
        LOOPS[loop](plain, given["x"], float(sum(map(count, batches))))
    return {name: param.grad for name, param in plain.named_parameters()}


def whole(sharded: nn.Module) -> dict:
    grads = {name: param.grad for name, param in sharded.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def in_a_window(layout: str, loop: str, accumulate_num: int, bucket_cap_mb: float) -> dict:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(model(), world, ddp=DDP(bucket_cap_mb=bucket_cap_mb))
        given = [batch(i) for i in range(world.rank, accumulate_num * world.size, world.size)]
        with window(sharded, given, count=count) as w:
            for each in w:
                LOOPS[loop](sharded, each["x"], w.num_tokens)
        return whole(sharded)


def assert_equal(found: dict, want: dict) -> None:
    for name, grad in want.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            torch.testing.assert_close(
                found[name], grad, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.combinations("pairs")
@pytest.mark.parametrize("accumulate_num", [1, 2])
@pytest.mark.parametrize("bucket_cap_mb", [25.0, 1e-4])
@pytest.mark.parametrize("loop", list(LOOPS))
def test_replicas(ranks, loop, accumulate_num, bucket_cap_mb):
    want = one_process(loop, 2 * accumulate_num)
    for found in ranks.run(in_a_window, 2, "dp_replicate=2", loop, accumulate_num, bucket_cap_mb):
        assert_equal(found, want)


@pytest.mark.parametrize("loop", list(LOOPS))
def test_shards(ranks, loop):
    want = one_process(loop, 4)
    try:
        results = ranks.run(in_a_window, 2, "dp_shard=2", loop, 2, 25.0, timeout_s=40)
    except RankError:
        assert loop in WHOLE
        return
    for found in results:
        assert_equal(found, want)


# ---- accumulate ------------------------------------------------------------------------------------------------------


def backwards_by_themselves(layout: str, zero_between: bool) -> dict:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(model(), world, ddp=DDP(bucket_cap_mb=1e-4))
        for i in range(3):
            if zero_between:
                sharded.zero_grad()
            with accumulate(sharded, is_last=True):
                LOOPS["forward_backward_twice"](sharded, batch(2 * i + world.rank)["x"], 1.0)
        return whole(sharded)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
@pytest.mark.parametrize("zero_between", [True, False])
def test_each_backward_is_summed_once(ranks, layout, zero_between):
    """A sum over the ranks that is in .grad already must not be summed again: it was 3x too large after two."""
    plain = model()
    for i in range(4 if zero_between else 0, 6):
        LOOPS["forward_backward_twice"](plain, batch(i)["x"], 1.0)
    for found in ranks.run(backwards_by_themselves, 2, layout, zero_between):
        want = {name: param.grad for name, param in plain.named_parameters()}
        assert_equal(found, want)


class Scaled(nn.Module):
    """With a 0-dim parameter, which FSDP2 keeps whole, and one that is used only where the number is odd."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, number: int) -> torch.Tensor:
        y = self.first(batch(number)["x"]) * self.scale + self.empty.sum()
        return (self.rare(y) if number % 2 else y).sum()


def scaled() -> nn.Module:
    torch.manual_seed(7)
    return Scaled().double()


def scaled_by_itself(layout: str, way: str) -> dict:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(scaled(), world)
        for i in range(3):
            with accumulate(sharded, is_last=i > 0 or way == "inside"):
                (sharded(2 * i + world.rank) * (sharded.scale if way == "outside" else 1)).backward()
        return whole(sharded)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
@pytest.mark.parametrize("way", ["inside", "outside", "accumulate"])
def test_a_0_dim_parameter_in_accumulate(ranks, layout, way):
    """Ranks drifted apart: each had its own gradient of it."""
    plain = scaled()
    for i in range(6):
        (plain(i) * (plain.scale if way == "outside" else 1)).backward()
    want = {name: param.grad for name, param in plain.named_parameters()}
    for found in ranks.run(scaled_by_itself, 2, layout, way):
        assert_equal(found, want)


def a_gradient_taken_before_the_step(layout: str) -> tuple[dict, dict]:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded, given = parallelize(model(), world), batch(world.rank)
        with window(sharded, [given], count=count) as w:
            for each in w:
                (sharded(each["x"]).sum() / w.num_tokens).backward()
        before = {name: None if grad is None else grad.clone() for name, grad in whole(sharded).items()}
        x = given["x"].clone().requires_grad_()
        torch.autograd.grad(sharded(x).sum(), [x])
        return before, whole(sharded)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_autograd_grad_leaves_gradients_alone(ranks, layout):
    for before, after in ranks.run(a_gradient_taken_before_the_step, 2, layout):
        assert before["text.0.weight"] is not None
        assert_equal(after, before)


def a_step_by_autograd_grad(layout: str, where: str) -> tuple[list[str], dict]:
    with init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sharded, given = parallelize(model(), world), batch(world.rank)
        params = list(sharded.parameters())
        with window(sharded, [given], count=count) as w:
            for each in w:
                found = torch.autograd.grad(sharded(each["x"]).sum() / w.num_tokens, params, allow_unused=True)
                if where == "inside":
                    for param, grad in zip(params, found, strict=True):
                        param.grad = grad
        gradients = whole(sharded)
        if where == "outside":
            for param, grad in zip(params, found, strict=True):
                param.grad = grad
        torch.optim.SGD(params, lr=0.0).step()
        return [str(each.message) for each in told if "autograd.grad" in str(each.message)], gradients


@pytest.mark.parametrize(("layout", "where", "num"), [
    ("dp_replicate=2", "outside", 1), ("dp_replicate=2", "inside", 0), ("dp_replicate=1", "outside", 0),
])  # fmt: skip
def test_a_step_by_gradients_of_one_rank_is_warned_of(ranks, layout, where, num):
    """Replicas drifted apart without a word. Put into param.grad inside a window they are summed, as any others."""
    for told, gradients in ranks.run(a_step_by_autograd_grad, int(layout[-1]), layout, where):
        assert len(told) == num
        if where == "inside":
            plain, total = model(), sum(count(batch(rank)) for rank in range(2))
            for rank in range(2):
                (plain(batch(rank)["x"]).sum() / total).backward()
            assert_equal(gradients, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


def with_the_parts(layout: str, bucket_cap_mb: float) -> dict:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(model(), world, ddp=DDP(bucket_cap_mb=bucket_cap_mb))
        for step in range(2):  # the second on top of the first, which is summed already
            given = [batch(4 * step + i) for i in range(world.rank, 4, 2)]
            n = count_tokens(sharded, given, count=count)
            for i, each in enumerate(given):
                with accumulate(sharded, is_last=i == 1):
                    LOOPS["one_forward_two_backwards"](sharded, each["x"], float(n))
        return whole(sharded)


@pytest.mark.parametrize(
    ("layout", "bucket_cap_mb"), [("dp_replicate=2", 25.0), ("dp_replicate=2", 1e-4), ("dp_shard=2", 25.0)]
)
def test_the_parts_of_a_window(ranks, layout, bucket_cap_mb):
    plain = model()
    for step in range(2):
        given = [batch(4 * step + i) for i in range(4)]
        for each in given:
            LOOPS["one_forward_two_backwards"](plain, each["x"], float(sum(map(count, given))))
    for found in ranks.run(with_the_parts, 2, layout, bucket_cap_mb):
        want = {name: param.grad for name, param in plain.named_parameters()}
        assert_equal(found, want)


def without_the_last(layout: str, then: str) -> str:
    """What ``then`` says after two micro-batches of which neither was the last."""
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(model(), world)
        optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for i in range(2):
            with accumulate(sharded, is_last=False):
                sharded(batch(2 * i + world.rank)["x"]).sum().backward()
        if then == "a local step":
            local_optimizer(optim)
        try:
            if then == "clip_grad_norm_":
                clip_grad_norm_(sharded, 1.0)
            elif then == "clip_grad_value_":
                clip_grad_value_(sharded, 1.0)
            elif then == "unscale_gradients_":
                unscale_gradients_(sharded, optim, torch.amp.GradScaler("cpu"))
            elif then == "a window":
                with window(sharded, [batch(0)], count=count):
                    pass
            else:
                optim.step()
        except UsageError as error:
            return str(error)
        return "no error"


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
@pytest.mark.parametrize(
    "then", ["clip_grad_norm_", "clip_grad_value_", "unscale_gradients_", "a window", "a step", "a local step"]
)
def test_a_step_before_the_last_micro_batch_is_refused(ranks, layout, then):
    """It stepped by each rank's own gradients, and the ranks drifted apart."""
    for text in ranks.run(without_the_last, 2, layout, then):
        assert then.removeprefix("a local ").removeprefix("a ") in text and "is_last=True" in text


def a_failed_micro_batch(layout: str) -> dict:
    with init(layout, device="cpu", timeout_s=20) as world:
        sharded = parallelize(scaled(), world)
        optim = torch.optim.SGD(sharded.parameters(), lr=0.0)
        with accumulate(sharded, is_last=True):
            (sharded(6 + world.rank) * sharded.scale).backward()
        with accumulate(sharded, is_last=False):
            (sharded(world.rank) * sharded.scale).backward()
        with contextlib.suppress(ZeroDivisionError), accumulate(sharded, is_last=False):
            (sharded(world.rank) * sharded.scale).backward()
            raise ZeroDivisionError
        with accumulate(sharded, is_last=True):
            (sharded(2 + world.rank) * sharded.scale).backward()
        clip_grad_norm_(sharded, 1e9)
        optim.step()
        return whole(sharded)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_micro_batch_that_raised_drops_those_since_the_last_sum(ranks, layout):
    plain = scaled()
    for i in (6, 7, 2, 3):
        (plain(i) * plain.scale).backward()
    want = {name: param.grad for name, param in plain.named_parameters()}
    for found in ranks.run(a_failed_micro_batch, 2, layout):
        assert_equal(found, want)


def threads_left(layout: str) -> int:
    with init(layout, device="cpu", timeout_s=20) as world:
        plain = nn.Sequential(nn.Linear(4, 4), nn.PReLU(1), nn.Linear(4, 4)).double()
        plain.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))  # 0-dim: never cut
        sharded = parallelize(plain, world)
        with accumulate(sharded, is_last=True):
            (sharded(batch(world.rank)["x"]) * sharded.scale).sum().backward()
    del plain, sharded, world
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_model_that_is_gone_leaves_no_threads(ranks, layout):
    """Hooks live in C++, where a cycle through them kept the engine, its groups and their threads for good."""
    counts = [ranks.run(threads_left, 2, layout)[0] for _ in range(4)]
    kept = (
        0 if torch.__version__ >= "2.12" or layout != "dp_shard=2" else 3
    )  # by torch 2.11, of each world with DTensors
    assert max(counts[1:]) <= counts[0] + 2 + kept * (len(counts) - 1), counts


# ---- two models ------------------------------------------------------------------------------------------------------


def generator() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def adversaries(layout: str, freezes: bool, steps: int = 3) -> list[float]:
    """The usual loop of two models that train each other; the norms of both."""
    with init(layout, device="cpu", timeout_s=20) as world:
        gen, dis = parallelize(generator(), world), parallelize(model(), world)
        optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (gen, dis)]
        norms = []
        for step in range(steps):
            given = [batch(8 * step + i) for i in range(world.rank, 4, world.size)]
            with window(dis, given, count=count) as w:
                for each in w:
                    with torch.no_grad():
                        fake = gen(each["x"])
                    ((dis(each["x"]).sum() - dis(fake).pow(2).sum()) / w.num_tokens).backward()
            norms.append(float(clip_grad_norm_(dis, 1.0)))
            optims[1].step()
            optims[1].zero_grad()
            if freezes:
                dis.requires_grad_(False)
            with window(gen, given, count=count) as w:
                for each in w:
                    (dis(gen(each["x"])).sum() / w.num_tokens).backward()
            if freezes:
                dis.requires_grad_(True)
            norms.append(float(clip_grad_norm_(gen, 1.0)))
            if not freezes:  # what the generator's loss left there, as in one process
                norms.append(float(clip_grad_norm_(dis, 1e9)))
            for optim in optims:
                optim.step()
                optim.zero_grad()
        return norms


@pytest.mark.parametrize("freezes", [True, False])
def test_two_models_that_train_each_other(ranks, freezes):
    (want,) = ranks.run(adversaries, 1, "dp_shard=1", freezes)
    for layout in ("dp_replicate=2", "dp_shard=2"):
        for found in ranks.run(adversaries, 2, layout, freezes):
            assert found == pytest.approx(want, rel=1e-12)
