"""Cases that computed something else without a word, found by reading the code as an adversary; each as a user wrote it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


class Ema(nn.Module):
    """A running average in a buffer, written the ways people write it."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.body = how, nn.Linear(4, 3)
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "data":
            self.ema.data.mul_(0.9).add_(0.1 * mean)
        elif self.how == "reassigned":
            self.ema = 0.9 * self.ema + 0.1 * mean
        else:
            self.ema.mul_(0.9).add_(0.1 * mean)
        return self.body(x - self.ema)


def sum_loss(output, batch):
    return F.cross_entropy(output, batch["labels"], reduction="sum")


def batch_of(rank, value=None):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 4, generator=generator) if value is None else torch.full((2, 4), value)
    return {"x": x, "labels": torch.tensor([0, 2])}


def step_of(world, model, **options):
    sharded = sw.parallelize(model, world, sharding=options.pop("sharding", None))
    return sw.TrainStep(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), **{"loss": sum_loss, **options})


def ema_of_ranks(how, layout, policy):
    with sw.init(layout, device="cpu") as world:
        step = step_of(world, Ema(how), sharding=sw.Sharding(buffers={"ema": policy}))
        step([batch_of(world.rank)])
        return step.model.ema.clone()


@pytest.mark.parametrize("how", ["in place", "data", "reassigned"])
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_buffer_stays_equal_on_all_ranks_however_it_is_written(ranks, how, layout):
    own = [0.1 * batch_of(rank)["x"].mean(0) for rank in (0, 1)]
    for policy, expected in (("rank0", own[0]), ("mean", (own[0] + own[1]) / 2)):
        for found in ranks.run(ema_of_ranks, 2, how, layout, policy):
            torch.testing.assert_close(found, expected)


def skip_with(how):
    with sw.init("dp_shard=1", device="cpu") as world:
        step = step_of(world, Ema(how), on_nonfinite="skip")
        step([batch_of(0)])
        before = step.model.ema.clone()
        skipped = step([batch_of(0, float("nan"))]).skipped
        return skipped, torch.equal(before, step.model.ema), step([batch_of(0)]).loss


@pytest.mark.parametrize("how", ["in place", "data", "reassigned"])
def test_a_skipped_step_leaves_buffers_as_they_were_however_they_are_written(ranks, how):
    skipped, same, loss = ranks.run(skip_with, 1, how)[0]
    assert skipped and same and loss == loss


def odd_metrics():
    def loss(output, batch):
        total = sum_loss(output, batch)
        return {"loss": total, "extra": total.detach()} if sw_rank else {"loss": total}

    with sw.init("dp_replicate=2", device="cpu") as world:
        sw_rank = world.rank
        step = step_of(world, Ema("in place"), loss=loss)
        try:
            return step([batch_of(world.rank)])
        except sw.RankError as error:
            return str(error)


def test_ranks_whose_losses_have_other_metrics_are_named(ranks):
    for text in ranks.run(odd_metrics, 2):
        assert isinstance(text, str) and "different exchanges" in text and "sum of extra" in text


def old_gradients():
    with sw.init("dp_shard=1", device="cpu") as world:
        step = step_of(world, Ema("in place"), max_grad_norm=1.0)
        for param in step.model.parameters():
            param.grad = torch.full_like(param, 100.0)
        try:
            step([batch_of(0)])
        except sw.UsageError as error:
            return str(error)
    return None


def test_gradients_from_elsewhere_do_not_pass_by_clipping(ranks):
    assert "gradients that were there before the step" in ranks.run(old_gradients, 1)[0]


def counts():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 3), world)
        batches = [{"x": torch.ones(1, 4), "labels": torch.tensor([1])}]
        by_hand = {"loss": sw.next_token_loss, "count": lambda batch: 1000}
        with sw.window(model, batches, **by_hand) as w:
            for batch in w:
                (sw.next_token_loss(model(batch["x"]), batch) / w.num_tokens).backward()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        optim.zero_grad()
        out = sw.TrainStep(model, optim, **by_hand)(batches)
        return w.num_tokens, sw.count_tokens(model, batches, **by_hand), out.num_tokens


def test_a_count_that_was_given_counts(ranks):
    assert ranks.run(counts, 1)[0] == (1000, 1000, 1000)


def evaluate_ignored():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 3), world)
        try:
            return sw.evaluate(model, [{"x": torch.ones(1, 4), "labels": torch.tensor([-100])}])
        except sw.UsageError as error:
            return str(error)


def test_an_evaluation_without_a_valid_token_is_no_perfect_score(ranks):
    assert "without a valid token" in ranks.run(evaluate_ignored, 1)[0]


def nothing_in_a_window(layout, folder):
    """Three windows, the second without a valid label: outputs, learning rates, weights, warnings, checkpoints."""
    windows = [[{"x": batch_of(i)["x"].double(), "labels": torch.tensor(labels)}] for i, labels in enumerate(LABELS)]
    with warnings.catch_warnings(record=True) as caught, sw.init(layout, device="cpu") as world:
        warnings.simplefilter("always")
        model = sw.parallelize(seeded(), world)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        scheduler = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.1, 10)
        step = sw.TrainStep(model, optim, scheduler=scheduler, loss=with_a_metric, forward=lambda m, b: m(b["x"]))
        outs = []
        with sw.CheckpointManager(folder, step, keep=1, best="loss") as manager:
            for window in windows:
                outs.append(step(window))
                manager.save_every(1, outs[-1])
        kept = [int(found.name.removeprefix("step-")) for found in sorted(folder.glob("step-*"))]
        return {
            "losses": [out.loss for out in outs],
            "metrics": [out.metrics["twice"] for out in outs],
            "skipped": [out.skipped for out in outs],
            "lr": scheduler.get_last_lr(),
            "weights": sw.full_state_dict(model),
            "warned": [str(each.message) for each in caught if "nothing to train on" in str(each.message)],
            "kept": kept,
        }


LABELS = ([0, 2], [-100, -100], [-100, -100], [1, 1])


def seeded():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def with_a_metric(output, batch):
    loss = sum_loss(output, batch)
    return {"loss": loss, "twice": 2 * loss.detach()}


def test_a_window_in_which_nothing_counts_is_left_out_and_its_loss_is_never_the_best(ranks, tmp_path):
    """In plain torch its mean is NaN; a sum divided by max(count, 1) is a loss of 0, and AdamW goes on by momentum and decay."""
    plain = seeded()
    optim = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    wanted = []
    for i in (0, 3):
        given = batch_of(i)
        loss = F.cross_entropy(plain(given["x"].double()), torch.tensor(LABELS[i]))
        wanted.append(loss.item())
        optim.zero_grad()
        loss.backward()
        optim.step()
        optim.param_groups[0]["lr"] = 0.1 * (1 - 0.09)
    for number, layout in enumerate(("dp_shard=2", "dp_replicate=2")):
        found = ranks.run(nothing_in_a_window, 2, layout, tmp_path / str(number))
        for told in found:
            losses, twice = told["losses"], told["metrics"]
            assert [losses[0], losses[3]] == pytest.approx(wanted, rel=1e-12) and twice[3] == pytest.approx(
                2 * wanted[1]
            )
            assert all(value != value for value in (*losses[1:3], *twice[1:3]))
            assert told["skipped"] == [False, True, True, False]
            assert told["lr"] == pytest.approx([0.1 * (1 - 0.18)])
        for name, value in plain.state_dict().items():
            assert torch.allclose(found[0]["weights"][name], value, rtol=0, atol=1e-12), name
        assert [len(told["warned"]) for told in found] == [1, 0]
        assert wanted[0] < wanted[1] and found[0]["kept"] == [1, 4]


class Force(nn.Module):
    """Differentiates inside forward, as force fields and gradient penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        energy = x
        for block in self.blocks:
            energy = torch.tanh(block(energy))
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def force(layout, min_unit_bytes=None):
    with sw.init(layout, device="cpu") as world:
        step = step_of(
            world,
            Force(),
            loss=lambda output, batch: output.pow(2).sum(),
            sharding=sw.Sharding(min_unit_bytes=min_unit_bytes),
        )
        try:
            return step([batch_of(0)]).loss
        except sw.UnsupportedError as error:
            return str(error)


def test_a_gradient_inside_forward_is_refused_by_name_where_it_would_crash(ranks):
    one = ranks.run(force, 1, "dp_shard=1")[0]
    assert ranks.run(force, 2, "dp_replicate=2")[0] == pytest.approx(one, rel=1e-6)
    assert ranks.run(force, 2, "dp_shard=2")[0] == pytest.approx(one, rel=1e-6)  # one unit: gathered throughout
    for text in ranks.run(force, 2, "dp_shard=2", 0):
        assert isinstance(text, str) and "inside the model's own forward" in text


def unfit(name):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 4, bias=False), world)
        optim = getattr(torch.optim, "SGD" if name == "ReduceLROnPlateau" else name)(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optim) if name == "ReduceLROnPlateau" else None
        try:
            sw.TrainStep(model, optim, scheduler=scheduler)
        except sw.ShardwiseError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor", "ReduceLROnPlateau"])
def test_what_cannot_step_on_shards_is_refused_by_name(ranks, name):
    for text in ranks.run(unfit, 2, name):
        assert name in text and "fix:" in text


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.empty.sum()


def complex_norm(layout):
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        out = step_of(world, Complex())([batch_of(0)])
        return out.grad_norm, out.loss


def test_complex_and_empty_parameters_train(ranks):
    one = ranks.run(complex_norm, 1, "dp_shard=1")[0]
    torch.manual_seed(0)
    plain = Complex()
    (sum_loss(plain(batch_of(0)["x"]), batch_of(0)) / 2).backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None and p.numel()]
    assert one[0] == pytest.approx(float(torch.stack([g.abs().pow(2).sum() for g in grads]).sum().sqrt()), rel=1e-5)
    assert ranks.run(complex_norm, 2, "dp_shard=2")[1] == pytest.approx(one, rel=1e-5)


def masks():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(F.dropout(torch.ones(64), 0.5))
            return x[:, :3] * self.weight

    seen: list[Tensor] = []
    with sw.init("dp_replicate=2", device="cpu") as world:
        step = step_of(world, Dropped())
        for _ in range(2):
            step([batch_of(0), batch_of(0)])
        return [(mask > 0).tolist() for mask in seen]


def test_every_step_micro_batch_and_rank_has_masks_of_its_own(ranks):
    first, second = ranks.run(masks, 2)
    assert len(first) == 4 and len({tuple(mask) for mask in first + second}) == 8


class Seen(nn.Module):
    """Writes a buffer in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen.mul_(0.5).add_(x.detach().mean(0))
        return self.body(x)


def evaluate_taken():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 1), world)

        def loss(out, batch):
            return {"loss": out.sum(), "num_tokens": out.abs().sum()}

        with pytest.raises(sw.ConfigError, match="an entry 'num_tokens'"):
            sw.evaluate(model, [{"x": torch.ones(2, 4)}], loss=loss, count=lambda batch: len(batch["x"]))
    return True


def test_an_entry_with_the_name_of_the_number_of_tokens_is_refused(ranks):
    assert ranks.run(evaluate_taken, 1) == [True]


def evaluated_buffer(layout, policy):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(Seen(), world, sharding=sw.Sharding(buffers={"seen": policy}, min_unit_bytes=0))
        batches = [batch_of(10 * world.rank + i) for i in range((3, 1)[world.rank])]
        sw.evaluate(model, batches, loss=sum_loss)
        return model.seen.clone()


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_buffer_written_by_an_evaluation_is_equal_on_all_ranks_and_knows_no_uncounted_copies(ranks, layout, policy):
    def after(first, num):
        seen = torch.zeros(4)
        for i in range(first, first + num):
            seen = 0.5 * seen + batch_of(i)["x"].mean(0)
        return seen

    expected = after(0, 3) if policy == "rank0" else (after(0, 3) + after(10, 1)) / 2
    for found in ranks.run(evaluated_buffer, 2, layout, policy):
        torch.testing.assert_close(found, expected)


# ---- ranks that are at different places of the data ----------------------------------------------------------------------


def of_different_windows(script: str) -> tuple[str, tuple[int, ...]]:
    """The loop of the docs, with something that rank 1 alone does."""
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(3)
        model = sw.parallelize(nn.Sequential(nn.Embedding(32, 4), nn.Linear(4, 32)), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        samples = [torch.arange(i, i + 9) % 32 for i in range(32)]
        loader = sw.Loader(samples, world, global_batch=8, micro_batch=4)
        if script == "looks at a batch" and world.rank == 1:
            next(iter(loader))
        try:
            for number, window in enumerate(loader):
                try:
                    if script == "catches its own error" and world.rank == 1 and number == 1:
                        raise KeyError("a flaky disk")
                    step(window)
                except KeyError:
                    continue
        except sw.RankError as error:
            return str(error), error.ranks
        return "", ()


@pytest.mark.parametrize(("script", "sample"), [("catches its own error", 16), ("looks at a batch", 8)])
def test_ranks_that_bring_different_windows_of_a_loader(ranks, script, sample):
    """Each trained samples of another window than its peers, to the end of the run and with exit code 0."""
    for text, who in ranks.run(of_different_windows, 2, script):
        assert who == (1,) and "different windows of a Loader" in text
        assert f"rank 1 has epoch 0 from sample {sample} on, rank 0 epoch 0 from sample {sample - 8} on" in text


class Modes(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.body, self.inner = nn.Linear(4, 3), nn.ModuleList(inner)

    def forward(self, x):
        return self.body(x)


def steps_in_eval_mode():
    told = {}
    cases = {  # the model, and how its mode is set
        "dropout": (lambda: Modes(nn.Dropout(0.1)), lambda model: model.eval()),
        "batch norm": (lambda: Modes(nn.BatchNorm1d(3)), lambda model: model.eval()),
        "LSTM": (lambda: Modes(nn.LSTM(3, 3, num_layers=2, dropout=0.5)), lambda model: model.eval()),
        "GRU": (lambda: Modes(nn.GRU(3, 3, num_layers=2, dropout=0.5)), lambda model: model.eval()),
        "attention": (lambda: Modes(nn.MultiheadAttention(4, 2, dropout=0.1)), lambda model: model.eval()),
        "drawn slopes": (lambda: Modes(nn.RReLU()), lambda model: model.eval()),
        "instance norm": (lambda: Modes(nn.InstanceNorm1d(3, track_running_stats=True)), lambda model: model.eval()),
        "in train mode": (lambda: Modes(nn.Dropout(0.1)), lambda model: model),
        "frozen batch norm": (lambda: Modes(nn.BatchNorm1d(3)), lambda model: model.inner[0].eval()),
        "nothing that acts by mode": (
            lambda: Modes(
                nn.LayerNorm(3), nn.Dropout(0.0), nn.LSTM(3, 3, 2), nn.InstanceNorm1d(3), nn.MultiheadAttention(4, 2)
            ),
            lambda model: model.eval(),
        ),
    }
    with sw.init("dp_shard=1", device="cpu") as world:
        for name, (build, change) in cases.items():
            step = step_of(world, build())
            change(step.model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step([batch_of(0)])
                step([batch_of(1)])
            told[name] = sum("eval mode: 'inner.0' (dropout" in str(each.message) for each in caught)
    return told


def test_a_training_step_in_eval_mode_is_told_once_where_the_mode_matters(ranks):
    told = ranks.run(steps_in_eval_mode, 1)[0]
    silent = ("in train mode", "frozen batch norm", "nothing that acts by mode")
    assert told == {name: int(name not in silent) for name in told} and len(told) == 10


class Assigns(torch.optim.Optimizer):
    """An optimizer of a user's own, which writes ``how``."""

    def __init__(self, params, how: str, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.how = how

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if self.how == "in place":
                    param.data.sub_(group["lr"] * param.grad)
                elif self.how == "whole":
                    sw.full_tensor(param).sub_(group["lr"] * sw.full_tensor(param.grad))
                else:
                    param.data = param.data - group["lr"] * param.grad


def stepped_by_own(layout: str, how: str, lr: float = 0.1):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 3), world)
        before = sw.full_state_dict(model)
        step = sw.TrainStep(
            model,
            Assigns(model.parameters(), how, lr),
            loss=sum_loss,
            forward=lambda m, b: m(b["x"]),
            count=lambda b: 2,
        )
        try:
            step([batch_of(world.rank)])
        except sw.UsageError as error:
            return str(error)
        after = sw.full_state_dict(model)
        return any(not torch.equal(before[key], after[key]) for key in before)


def test_an_optimizer_that_moves_nothing_is_refused(ranks):
    """p.data = ... trains replicas, and under FSDP2 changed nothing without a word; what is gathered is a copy."""
    for told in ranks.run(stepped_by_own, 2, "dp_shard=2", "data"):
        assert "weight: an assignment to .data" in told and "p.copy_(values)" in told
    for told in ranks.run(stepped_by_own, 2, "dp_shard=2", "whole"):
        assert "weight: Assigns.step() that changes no parameter" in told and "p.sub_(lr * p.grad)" in told
    assert ranks.run(stepped_by_own, 2, "dp_shard=2", "in place")[0] is True
    assert ranks.run(stepped_by_own, 2, "dp_replicate=2", "data")[0] is True
    assert ranks.run(stepped_by_own, 2, "dp_shard=2", "whole", 0.0)[0] is False  # a warm-up that begins at 0
