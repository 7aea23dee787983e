"""Buffers that forwards write: sums, means and extremes over the ranks bit-equal to one process, and every other difference an error
that names the buffer."""

import contextlib
import tempfile
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from step.rows import by_x, ce, mine, rows
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.testing import RankPool

LAYOUTS = {"dp_replicate=2": 2, "dp_shard=2": 2, "dp_shard=1,tp=2": 2}
NUM_EXPERTS = 4


PRODUCTS = {  # of counts [2, 4], added to a buffer [4]
    "by addmv": lambda load, rows: load.addmv_(rows.t(), torch.ones(2).to(rows)),
    "by addmm": lambda load, rows: load.view(1, -1).addmm_(torch.ones(1, 2).to(rows), rows),
    "by baddbmm": lambda load, rows: load.view(1, 1, -1).baddbmm_(torch.ones(1, 1, 2).to(rows), rows[None]),
    "by addbmm": lambda load, rows: load.view(1, -1).addbmm_(torch.ones(2, 1, 1).to(rows), rows[:, None]),
    "by addr": lambda load, rows: load.view(2, 2).addr_(torch.ones(2).to(rows), rows[0, :2], alpha=3),
    "by addcmul": lambda load, rows: load.addcmul_(rows[0], rows[1], value=2),
    "by addcdiv": lambda load, rows: load.addcdiv_(rows[0], torch.full((4,), 0.5).to(rows)),
}


class Experts(nn.Module):
    """Counts the tokens of each expert, and moves a bias by them after the step. ``how`` the counts are written in a forward."""

    def __init__(self, how: str = "added to", dtype: torch.dtype = torch.float64, persistent: bool = True) -> None:
        super().__init__()
        self.how = how
        self.router, self.up, self.down = nn.Linear(6, NUM_EXPERTS), nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("load", torch.zeros(NUM_EXPERTS, dtype=dtype), persistent)
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS, dtype=torch.float64))

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        chosen = (gate + self.bias).argmax(-1)
        if self.training:
            self.count(torch.bincount(chosen, minlength=NUM_EXPERTS))
        return self.down(torch.tanh(self.up(x))) * gate.gather(1, chosen[:, None])

    @torch.no_grad()
    def count(self, counts) -> None:
        if self.how == "set anew":
            self.load.copy_(counts)
        elif self.how == "replaced":
            self.load = counts.to(self.load.dtype)
        elif self.how == "zeroed in it":
            self.load.zero_()
            self.load += counts
        elif self.how == "moved towards":  # a running average, written with words of sums
            self.load.add_(((counts - self.load) * 0.5).to(self.load.dtype))
        elif self.how == "doubled":
            self.load.add_(self.load).add_(counts)
        elif self.how == "by a difference":
            self.load.copy_(self.load + (counts - self.load))
        elif self.how == "scaled":
            self.load = torch.add(counts, self.load, alpha=2)
        elif self.how == "out of place":
            self.load = self.load + counts
        elif self.how == "by index":
            self.load.index_add_(0, torch.arange(NUM_EXPERTS), counts.to(self.load.dtype))
        elif self.how == "by scatter":
            self.load.scatter_add_(0, torch.arange(NUM_EXPERTS), counts.to(self.load.dtype))
        elif self.how in PRODUCTS:
            rows = torch.stack((counts, 2 * counts)).to(self.load.dtype)
            PRODUCTS[self.how](self.load, rows)
        elif self.how == "decayed by a product":
            self.load.addmv_(torch.eye(NUM_EXPERTS).to(self.load), counts.to(self.load.dtype), beta=0.5)
        elif self.how == "product with itself":
            self.load.addcmul_(self.load, counts.to(self.load.dtype))
        elif self.how == "element by element":
            for i, num in enumerate(counts.tolist()):
                self.load[i] += num
        else:
            self.load += counts

    def post_optimizer_step(self) -> None:
        with torch.no_grad():
            load = self.load.double()
            self.bias += 0.05 * torch.sign(load.mean() - load)
            if self.how != "never zeroed":
                self.load.zero_()


class Late(Experts):
    """From the fifth forward on the counts are set anew, or read."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 4 and self.how == "set anew later":
            self.load.zero_()
        found = super().forward(x)
        return found * (1 + 0.1 * self.load.double().mean()) if self.calls > 4 and self.how == "read later" else found


class Reading(Experts):
    """A forward that reads the counts, ``how`` says by what: each rank would go by its own."""

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * READS[self.how](self.load))


READS = {
    "mean": lambda load: load.double().mean(),
    "item": lambda load: load[0].item(),
    "tolist": lambda load: sum(load.tolist()),
    "numpy": lambda load: float(load.numpy().mean()),
    "__array__": lambda load: float(np.abs(load).sum()),
}


def one_process(model, num=4):
    optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for window in range(num):
        micros = rows(window)
        loss = sum(ce(by_x(model, b), b) for b in micros) / sum(len(b["labels"]) for b in micros)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if hasattr(model, "post_optimizer_step"):
            model.post_optimizer_step()
        losses.append(loss.item())
    return losses, {name: b.clone() for name, b in model.named_buffers()}


def trained(layout, model, buffers, num=4, loop="step", **options):
    """Losses and buffers of this rank after some windows; or the class, name and text of an error."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        try:
            if "tp" in layout:
                options["example"] = {"x": rows(0)[3]["x"]}
            model = sw.parallelize(model, world, sharding=sw.Sharding(buffers=buffers, min_unit_bytes=0), **options)
            optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
            step = sw.TrainStep(model, optim, loss=ce, forward=by_x) if loop == "step" else None
            for window in range(num):
                micros = mine(world, rows(window))
                if step is not None:
                    losses.append(step(micros).loss)
                    continue
                _run(model, micros, loop)
                sw.local_optimizer(optim).step()
                optim.zero_grad()
                model.post_optimizer_step()
        except sw.ShardwiseError as error:
            return type(error).__name__, error.name, str(error)
        return losses, {name: b.clone() for name, b in model.named_buffers()}, sw.describe(model)


def _run(model, micros, loop: str) -> None:
    """Gradients of one step, in a loop of the user's own."""
    if loop == "window":
        with sw.window(model, micros) as w:
            for b in w:
                (ce(by_x(model, b), b) / w.num_tokens).backward()
        return
    num = sw.count_tokens(model, micros)
    for i, b in enumerate(micros):
        with sw.accumulate(model, is_last=i == len(micros) - 1):
            (ce(by_x(model, b), b) / num).backward()


def assert_refused(found, name: str, *words: str) -> None:
    for kind, where, text in found:
        assert where == name, (kind, text)
        for word in words:
            assert word in text


# ---- sums ------------------------------------------------------------------------------------------------------------

ADDED = ("added to", "out of place", "by index", "by scatter", "element by element", "never zeroed")
NOT_ADDED = (
    "decayed by a product",
    "product with itself",
    "set anew",
    "replaced",
    "zeroed in it",
    "moved towards",
    "doubled",
    "by a difference",
    "scaled",
)


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_counts_summed_are_bit_equal_to_one_process(ranks: RankPool, layout, dtype):
    for how in ADDED:
        losses, buffers = one_process(_experts(how, dtype))
        for found in ranks.run(trained, LAYOUTS[layout], layout, _experts(how, dtype), {"load": "sum"}):
            assert found[0] == pytest.approx(losses, rel=1e-12), how
            for name, value in buffers.items():
                assert torch.equal(found[1][name], value), (how, name)
            assert "load (the sum of what the data ranks add)" in found[2] and "bias (equal on all ranks)" in found[2]


@pytest.mark.quick("dtype0-dp_replicate=2", "dtype1-dp_shard=2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_counts_that_are_set_anew_in_a_forward_are_no_sum(ranks: RankPool, layout, dtype):
    for how in NOT_ADDED:
        found = ranks.run(trained, LAYOUTS[layout], layout, _experts(how, dtype), {"load": "sum"})
        assert_refused(found, "load", "not only added to")


@pytest.mark.parametrize("how", READS)
def test_counts_that_a_forward_reads_are_no_sum(ranks: RankPool, how):
    found = ranks.run(trained, 2, "dp_shard=2", _experts(how, torch.float64, kind=Reading), {"*load": "sum"})
    word = "_local_scalar_dense" if how == "item" else how
    assert_refused(found, "load", f"it ({word})", "post_optimizer_step")


@pytest.mark.parametrize("how", ["set anew later", "read later"])
def test_what_forwards_do_later_is_seen_in_the_next_window_that_is_watched(ranks: RankPool, how):
    found = ranks.run(trained, 2, "dp_shard=2", _experts(how, torch.int64, kind=Late), {"load": "sum"})
    assert_refused(found, "load", "not only added to", "windows 1, 2, 4, 8")


@pytest.mark.quick("by addcmul", "by addmm", "by addr")
@pytest.mark.parametrize("how", PRODUCTS)
def test_products_that_are_added_are_sums(ranks: RankPool, how):
    for dtype in (torch.float64, torch.int64) if how != "by addcdiv" else (torch.float64,):
        losses, buffers = one_process(_experts(how, dtype))
        for found in ranks.run(trained, 2, "dp_replicate=2", _experts(how, dtype), {"load": "sum"}):
            assert found[0] == pytest.approx(losses, rel=1e-12)
            assert torch.equal(found[1]["load"], buffers["load"]) and torch.equal(found[1]["bias"], buffers["bias"])


LOOPS = ["step", "window", "accumulate"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_bias_that_is_moved_by_counts_without_a_policy_names_both(ranks: RankPool, loop):
    """A persistent count differs itself; one that is not persistent makes the bias differ, whose error names it."""
    kept = ranks.run(trained, 2, "dp_shard=2", _experts(), "rank0", 4, loop)
    assert_refused(kept, "load", '"sum" for counts', "rank 1 has", "rank 0 has")
    passing = ranks.run(trained, 2, "dp_replicate=2", _experts("added to", torch.float64, False), "mean", 4, loop)
    assert_refused(passing, "bias", "'load', not persistent", "buffers={'load': WORD}")


@pytest.mark.parametrize("loop", LOOPS)
def test_the_policy_that_the_error_names_mends_it(ranks: RankPool, loop):
    losses, buffers = one_process(_experts("added to", torch.float64, False))
    for found in ranks.run(
        trained, 2, "dp_shard=2", _experts("added to", torch.float64, False), {"load": "sum"}, 4, loop
    ):
        assert torch.equal(found[1]["bias"], buffers["bias"])
        assert loop != "step" or found[0] == pytest.approx(losses, rel=1e-12)


def _experts(how="added to", dtype=torch.float64, persistent=True, kind=Experts):
    torch.manual_seed(0)
    model = kind(how, dtype, persistent)
    for part in (model.router, model.up, model.down):
        part.double()
    return model


# ---- means, extremes, each rank's own ----------------------------------------------------------------------------------


class Observer(nn.Module):
    """Keeps what quantisation calibrates with: the range of its inputs, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.full((6,), -1e9, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("average", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(0))  # of another length on each rank

    def forward(self, x):
        with torch.no_grad():
            self.low = torch.minimum(self.low, x.min().float())
            self.high.copy_(torch.maximum(self.high.double(), x.amax(0)))
            self.seen.fill_(bool(self.seen) or bool(x.max() > 2.5))
            self.average.mul_(0.5).add_(x.mean(0))
            self.last = x[:, 0].float().clone()
        return self.body(x)


POLICIES = {"low": "min", "h*": "max", "seen": "max", "average": "mean", "*": "own"}


def _observer():
    torch.manual_seed(0)
    model = Observer()
    model.body.double()
    return model


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_extremes_are_those_of_one_process(ranks: RankPool, layout):
    _, buffers = one_process(_observer())
    first, second = ranks.run(trained, 2, layout, _observer(), POLICIES)
    for name in ("low", "high", "seen"):
        assert torch.equal(first[1][name], buffers[name]) and torch.equal(second[1][name], buffers[name]), name
    assert torch.equal(first[1]["average"], second[1]["average"])
    assert first[1]["last"].shape != second[1]["last"].shape
    assert "last (each rank's own; a checkpoint has rank 0's)" in first[2]


def _evaluated(layout):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(_observer(), world, sharding=sw.Sharding(buffers=POLICIES))
        own = rows(7)[world.axis("dp").rank :: 2][: 2 - world.axis("dp").rank]  # unequal numbers of batches
        sw.evaluate(model, own, loss=ce, forward=by_x)
        return {name: b.clone() for name, b in model.named_buffers()}


def test_what_an_evaluation_writes_stays_and_ends_as_a_window_does(ranks: RankPool):
    plain = _observer()
    for batch in rows(7)[:3]:
        plain(batch["x"])
    for found in ranks.run(_evaluated, 2, "dp_shard=2"):
        for name in ("low", "high", "seen"):
            assert torch.equal(found[name], plain.get_buffer(name)), name


def _resumed(layout, root):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(_observer(), world, sharding=sw.Sharding(buffers=POLICIES))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=ce, forward=by_x)
        with sw.CheckpointManager(root, step, async_save=False) as manager:
            if world.size == 2:
                step(mine(world, rows(0)))
                manager.save()
            else:
                manager.load()
        return {name: b.clone() for name, b in model.named_buffers()}


def test_each_ranks_own_is_saved_from_rank_0_in_its_shape_and_loaded(ranks: RankPool):
    with tempfile.TemporaryDirectory() as root:
        saved = ranks.run(_resumed, 2, "dp_shard=2", root)[0]
        loaded = ranks.run(_resumed, 1, "dp_shard=1", root)[0]
    assert len(saved["last"]) == 1
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


# ---- what is compared ----------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Writes its persistent table in a way that each test gives."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write, self.body = write, nn.Linear(6, 3)
        self.register_buffer("table", torch.linspace(0, 1, 8).double())
        self.register_buffer("beside", torch.zeros(2), persistent=False)

    def forward(self, x):
        rank = int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0
        if self.write == "rounding":
            self.table.mul_(1 + rank * 2e-16)
        elif self.write == "digits":
            self.table.mul_(1 + rank * 1e-13)  # the same in twelve digits
        elif self.write == "data":
            self.table.data.add_(rank * 1e-9)
        elif self.write in ("counts", "fractions"):  # beside a number of which rounding is larger than their difference
            self.table.copy_(torch.tensor([1e15, *[3.0] * 7]) + (0.25 if self.write == "fractions" else 0))
            self.table[1:] += rank
        elif self.write == "shape" and rank:
            self.table = torch.zeros(9).double()
        elif self.write == "dtype" and rank:
            self.table = self.table.float()
        elif self.write == "absent" and rank:
            self._buffers.pop("table", None)
        elif self.write == "persistent now":
            self.register_buffer("beside", torch.ones(2))
        elif self.write == "removed":
            self.table = None
        elif self.write == "later":
            self.register_buffer("later", torch.ones(1))
        return self.body(x)


def _table(write):
    torch.manual_seed(0)
    model = Table(write)
    model.body.double()
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_difference_within_rounding_is_made_equal(ranks: RankPool, layout):
    first, second = ranks.run(trained, 2, layout, _table("rounding"), "rank0", 2)
    assert torch.equal(first[1]["table"], second[1]["table"])
    assert torch.equal(first[1]["table"], torch.linspace(0, 1, 8).double())


@pytest.mark.parametrize(
    ("write", "name", "words"),
    [
        ("data", "table", ("values differ", "rank 1 has")),
        ("counts", "table", ("values differ", "rank 1 has")),
        ("fractions", "table", ("values differ", "rank 1 has")),
        ("digits", "table", ("values differ", "rank 1 has")),
        (
            "shape",
            "table",
            ("rank 1 has float64 of shape [9], rank 0 has float64 of shape [8]", "buffers={'table': \"own\"}"),
        ),
        ("dtype", "table", ("rank 1 has float32 of shape [8], rank 0 has float64",)),
        ("absent", "table", ("rank 1 has none, rank 0 has float64 of shape [8]",)),
        ("persistent now", "beside", ("registered after parallelize", "persistent=False")),
        ("removed", "table", ("was removed after parallelize",)),
        ("later", "later", ("registered after parallelize", "in the constructor")),
    ],
)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=1,tp=2"])
def test_a_buffer_that_ranks_hold_differently_is_refused_by_name(ranks: RankPool, layout, write, name, words):
    assert_refused(ranks.run(trained, 2, layout, _table(write), "rank0", 2), name, *words)


def test_one_rank_is_held_to_what_a_checkpoint_needs_too(ranks: RankPool):
    assert_refused(ranks.run(trained, 1, "dp_shard=1", _table("later"), "rank0", 1), "later", "registered after")


class CutCounts(nn.Module):
    """Counts the positive outputs of a layer that tp cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        with torch.no_grad():
            self.positive += (hidden > 0).sum()
        return self.down(hidden)


class ByRank(Experts):
    """Counts differently on each rank."""

    def count(self, counts):
        super().count(counts * (1 + torch.distributed.get_rank()))


def test_ranks_of_tp_that_add_other_values_are_refused(ranks: RankPool):
    found = ranks.run(trained, 2, "dp_shard=1,tp=2", _experts(kind=ByRank), {"load": "sum"})
    assert_refused(found, "load", "ranks 0 and 1 run the same data (tp)")


@pytest.mark.parametrize("buffers", ["rank0", {"positive": "sum"}])
def test_a_count_of_what_tp_has_cut_is_not_taken_for_the_whole(ranks: RankPool, buffers):
    """Either the layers are left whole, and the count is that of one process, or it is refused."""
    torch.manual_seed(0)
    _, wanted = one_process(CutCounts().double())
    torch.manual_seed(0)
    for found in ranks.run(trained, 2, "dp_shard=1,tp=2", CutCounts().double(), buffers):
        if isinstance(found[0], str):
            assert found[1] in ("positive", None), found
        else:
            assert torch.equal(found[1]["positive"], wanted["positive"])


# ---- the option ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ({"loud": "sum"}, ("matches no buffer", "did you mean 'load'")),
        ({"load": "sum", "blocks.*": "mean"}, ("'blocks.*'", "matches no buffer")),
    ],
)
def test_a_pattern_that_matches_no_buffer_is_refused(ranks: RankPool, buffers, words):
    kind, _, text = ranks.run(trained, 1, "dp_shard=1", _experts(), buffers)[0]
    assert kind == PlanError.__name__
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("buffers", "name", "fix"),
    [
        ({"seen": "sum"}, "seen", '"max" for true where any rank has it'),
        ({"*": "mean"}, "seen", '"rank0"'),
    ],
)
def test_a_word_that_does_not_fit_a_buffers_dtype_is_refused(ranks: RankPool, buffers, name, fix):
    kind, where, text = ranks.run(trained, 1, "dp_shard=1", _observer(), buffers)[0]
    assert (kind, where) == (PlanError.__name__, name)
    assert fix in text


def _statistics(buffers):
    with sw.init("dp_replicate=2", device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        model.register_buffer("count", torch.zeros(()))
        model = sw.parallelize(model, world, sharding=sw.Sharding(buffers=buffers))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=ce, forward=lambda m, b: m(b["x"]))
        step(mine(world, rows(0, (2, 3, 4, 4))))
        return model[1].running_mean.clone()


def test_in_a_mapping_statistics_stay_those_of_rank_0_unless_they_are_matched(ranks: RankPool):
    word, mapping = ranks.run(_statistics, 2, "rank0"), ranks.run(_statistics, 2, {"count": "sum"})
    mean, matched = ranks.run(_statistics, 2, "mean"), ranks.run(_statistics, 2, {"*.running_*": "mean"})
    assert torch.equal(word[0], word[1]) and torch.equal(mean[0], mean[1])
    assert torch.equal(word[0], mapping[0]) and torch.equal(mapping[0], mapping[1])
    assert torch.equal(mean[0], matched[0]) and not torch.equal(word[0], mean[0])


# ---- ranges that a forward reads ---------------------------------------------------------------------------------------


class Ranged(nn.Module):
    """Keeps the range of its inputs, and computes with it or not, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.out, self.how = nn.Linear(6, 6), nn.Linear(6, 3), how
        self.register_buffer("high", torch.ones(()))
        self.register_buffer("low", -torch.ones(()))
        self.register_buffer("seen", torch.tensor(False))

    def observe(self, x) -> None:
        if self.how == "by torch.where":
            self.high = torch.where(x.max() > self.high, x.max(), self.high)
            self.low = torch.where(x.min() < self.low, x.min(), self.low)
        elif self.how == "averaged":
            self.high.lerp_(x.max(), 0.1)
        else:
            self.high.copy_(torch.maximum(self.high, x.max()))
            torch.minimum(self.low, x.min(), out=self.low)
        self.seen.fill_(bool(self.seen) or bool(x.max() > 2.5))

    def forward(self, x):
        hidden = torch.tanh(self.body(x)) * 3
        if self.how != "frozen":
            with torch.no_grad():
                self.observe(hidden)
        if self.how in ("scaled", "frozen", "by torch.where", "averaged"):
            scale = (self.high - self.low) / 255
            hidden = hidden + (torch.round(hidden / scale) * scale - hidden).detach()
        elif self.how == "as a number":
            hidden = torch.fake_quantize_per_tensor_affine(hidden, float(self.high) / 127, 0, -128, 127)
        elif self.how == "as a list":
            hidden = torch.fake_quantize_per_tensor_affine(hidden, self.high.tolist() / 127, 0, -128, 127)
        elif self.how == "given to a function":
            hidden = hidden.clamp(self.low, self.high)
        return self.out(hidden)


def _ranged(how, layout="dp_replicate=2"):
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        words = {"high": "mean" if how == "averaged" else "max", "low": "min", "seen": "max"}
        model = sw.parallelize(Ranged(how).double(), world, sharding=sw.Sharding(buffers=words, min_unit_bytes=0))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=ce, forward=by_x)
        for window in range(4):
            step(mine(world, rows(window)))
        told = [str(w.message) for w in seen if "computes with it" in str(w.message)]
        return told, [line for line in sw.describe(model).splitlines() if line.startswith("ranges:")]


@pytest.mark.parametrize(
    "how", ["scaled", "by torch.where", "averaged", "as a number", "as a list", "given to a function"]
)
def test_a_range_that_a_forward_writes_and_reads_is_named_once(ranks: RankPool, how):
    (told, lines), (other, _) = ranks.run(_ranged, 2, how, "dp_shard=2" if how == "scaled" else "dp_replicate=2")
    assert len(told) == 1 and not other and len(lines) == 1
    assert "high" in told[0] and "seen" not in told[0] and "post_optimizer_step" in told[0]
    assert ("low" in told[0]) == (how in ("scaled", "by torch.where", "given to a function"))


@pytest.mark.parametrize("how", ["only observed", "frozen"])
def test_a_range_that_is_written_or_read_alone_is_not_named(ranks: RankPool, how):
    assert all(not told and not lines for told, lines in ranks.run(_ranged, 2, how))


# ---- plain numbers ------------------------------------------------------------------------------------------------------


class Annealed(nn.Module):
    """A temperature that falls with each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.state = nn.Linear(6, 3), {"temperature": 1.0}

    def forward(self, x):
        if self.training:
            self.state["temperature"] *= 0.9
        return self.body(x) / self.state["temperature"]


def _warned(layout, kind, of, line):
    """Warnings of three windows that name ``of``, and the lines of the description that begin with ``line``."""
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = sw.parallelize(kind().double(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=ce, forward=by_x)
        for window in range(3):
            step(mine(world, rows(window)))
        told = [str(w.message) for w in seen if of in str(w.message)]
        return told, [text for text in sw.describe(model).splitlines() if text.startswith(line)]


def test_a_number_that_a_forward_changes_is_named_once(ranks: RankPool):
    (told, lines), (other, _) = ranks.run(_warned, 2, "dp_shard=2", Annealed, "state.temperature", "numbers:")
    assert len(told) == 1 and not other
    assert "state.step" in told[0] and len(lines) == 1
    (alone, lines), *_ = ranks.run(_warned, 1, "dp_shard=1", Annealed, "state.temperature", "numbers:")
    assert not alone and "state.temperature" in lines[0]


class Attached(nn.Module):
    """State in attributes that are no numbers; tables and what it only returns stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.rebound, self.inner, self.bank = torch.zeros(6), SimpleNamespace(t=torch.zeros(())), []
        self.array, self.table, self.held, self.last = np.zeros(2), torch.ones(6), [torch.ones(2)], None

    def forward(self, x):
        if self.training:
            self.rebound = self.rebound * 0.9 + x.detach().mean(0)
            self.inner.t += 1
            self.array += 1
            self.bank.append(x.detach())
        self.last = self.body(x - self.rebound + self.table)
        return self.last


def test_tensors_arrays_and_lists_that_a_forward_changes_are_named_once(ranks: RankPool):
    (told, lines), (other, _) = ranks.run(_warned, 2, "dp_shard=2", Attached, "of this rank only", "attributes:")
    assert len(told) == 1 == len(lines) and not other
    assert told[0].startswith("bank, array, rebound and 1 more changed") and "held" not in told[0]
    assert 'Sharding(buffers={name: "mean"})' in told[0]
    assert not ranks.run(_warned, 1, "dp_shard=1", Attached, "of this rank only", "attributes:")[0][0]


class Lazily(nn.Module):
    """Makes a mean, a count and a table when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = nn.Linear(6, 3), None

    def forward(self, x):
        if self.training:
            now = x.detach().mean(0)
            self.mean = now if self.mean is None else self.mean * 0.9 + now
            self.num = getattr(self, "num", 0) + 1
        if not hasattr(self, "table"):
            self.table = torch.ones(6, dtype=x.dtype)
        return self.body(x - self.mean + self.table) / self.num


def test_what_a_forward_makes_and_then_changes_is_named_in_the_second_window(ranks: RankPool):
    (told, lines), (other, _) = ranks.run(
        _warned, 2, "dp_shard=2", Lazily, "of this rank only", ("numbers:", "attributes:")
    )
    assert len(told) == 2 == len(lines) and not other
    assert told[0].startswith("num changed in the first windows: plain numbers") and told[1].startswith("mean changed")


class Aside(nn.Module):
    """Counts on its parameter, on its class and in a list there; the class it inherits from has a number that stays."""

    num, lengths, factor = 0, {"of": [1.0]}, 2.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.body.weight.seen, self.body.bias.steady = torch.zeros(()), 3

    def forward(self, x):
        if self.training:
            type(self).num += 1
            self.lengths["of"].append(1.0)
            self.body.weight.seen += x.detach().mean()
        return self.body(x) * self.factor + self.body.bias.steady


class AsideAgain(Aside):
    """A class of its own."""


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_what_a_forward_counts_on_parameters_and_classes_is_named(ranks: RankPool, layout):
    said = ("numbers:", "attributes:")
    (told, lines), (other, _) = ranks.run(_warned, 2, layout, AsideAgain, "of this rank only", said)
    assert len(told) == 2 == len(lines) and not other
    first, second = told  # the number of its own class is made in the first window
    assert first.startswith("Aside.lengths.of, body.weight.seen changed in the first windows: lists")
    assert second.startswith("AsideAgain.num changed in the first windows: plain numbers")


class Counter(nn.Module):
    """Counts its forwards in a buffer, which its forward goes by or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("num", torch.zeros((), dtype=torch.long))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.num += 1
            self.ready.fill_(True)
        return self.body(x)


def _counted(loop):
    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = sw.parallelize(Counter().double(), world)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(model, optim, loss=ce, forward=by_x)
        for window in range(4):
            if loop == "step":
                step(mine(world, rows(window)))
            else:
                _run(model, mine(world, rows(window)), loop)
        return [str(w.message) for w in seen if "forwards of this rank only" in str(w.message)]


@pytest.mark.parametrize("loop", ["step", "accumulate"])
def test_a_buffer_that_counts_forwards_alike_on_all_ranks_is_named_once(ranks: RankPool, loop):
    told, other = ranks.run(_counted, 2, loop)
    assert len(told) == 1 and not other
    assert told[0].startswith("num changed") and "ready" not in told[0]
    assert """Sharding(buffers={'num': "sum"})""" in told[0]


# ---- losses, and two models ---------------------------------------------------------------------------------------------


class Criterion(nn.Module):
    """A loss that counts its samples, in a buffer and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num", torch.zeros((), dtype=torch.float64))
        self.calls, self.seen = 0, []

    def forward(self, output, labels):
        if self.training:
            self.num += len(labels)
            self.calls += 1
            self.seen.append(len(labels))
        return F.cross_entropy(output, labels, reduction="sum")


class WithCriterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(6, 3), Criterion()

    def forward(self, x):
        return self.body(x)


class Total:
    """A loss with a state of its own, and no module."""

    def __init__(self, weight=0.0) -> None:
        self.num, self.parts, self.center = 0, {"n": [0]}, torch.zeros((), dtype=torch.float64)

    def __call__(self, output, batch):
        self.num += 1
        self.parts["n"][0] += 1
        self.center += output.detach().sum()
        return ce(output, batch)


def _losses(kind, layout="dp_shard=1"):
    """What a loss has kept after three windows of four micro-batches, of this rank."""
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        policies = {"*num": "sum"} if kind == "inside" else "rank0"
        model = sw.parallelize(WithCriterion().double(), world, sharding=sw.Sharding(buffers=policies))
        calls, beside, total, num = [0], Criterion(), Total(), 0

        def closed(output, batch):
            nonlocal num
            num += 1
            calls[0] += 1
            return ce(output, batch)

        loss = {
            "inside": lambda output, batch: model.criterion(output, batch["labels"]),
            "outside": lambda output, batch: beside(output, batch["labels"]),
            "method": lambda output, batch: beside.forward(output, batch["labels"]),
            "object": total,
            "closure": closed,
        }[kind]
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, forward=by_x)
        for window in range(3):
            step(mine(world, rows(window)))
        told = [str(w.message) for w in seen if "the loss writes" in str(w.message)]
        owner = model.criterion if kind == "inside" else beside
        kept = {
            "object": (total.num, total.parts["n"][0]),
            "closure": (num, calls[0]),
        }.get(kind, (owner.num.item(), owner.calls, sum(owner.seen)))
        return kept, told


def test_trials_of_a_loss_leave_what_it_keeps(ranks: RankPool):
    for kind in ("inside", "outside", "method"):
        assert ranks.run(_losses, 1, kind)[0] == ((30.0, 12, 30), []), kind
    for kind in ("object", "closure"):
        assert ranks.run(_losses, 1, kind)[0] == ((12, 12), []), kind
    assert [kept[0] for kept, _ in ranks.run(_losses, 2, "inside", "dp_shard=2")] == [30.0, 30.0]


def _large(writes: bool):
    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(WithCriterion().double(), world)
        bank = torch.zeros(9_000_000, dtype=torch.float64)

        def loss(output, batch):
            if writes:
                bank[:3] += output.detach().sum(0)
            return ce(output, batch) + 0 * bank[0]

        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, forward=by_x)
        try:
            return step(rows(0)).num_tokens
        except sw.ShardwiseError as error:
            return str(error)


def test_a_loss_that_writes_more_than_is_copied_is_refused(ranks: RankPool):
    assert ranks.run(_large, 1, False) == [10]
    assert "writes a tensor of its own, of 68 MiB" in ranks.run(_large, 1, True)[0]


def test_a_loss_that_writes_a_buffer_of_its_own_is_named(ranks: RankPool):
    (_, told), (_, other) = ranks.run(_losses, 2, "outside", "dp_replicate=2")
    assert len(told) == 1 and not other
    assert "Criterion.num" in told[0] and "sw.TaskModel" in told[0]


class Part(nn.Module):
    """One of two models: counts what it sees, with statistics beside."""

    def __init__(self, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, num_out)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return torch.tanh(self.linear(x))


def _steps_of_two(first, second, optims, windows):
    """Trains both by one loss; ``windows``: yields micro-batches and their number of labels, and a context for them."""
    for micros, num, context in windows:
        with context as w:
            for b in micros if w is None else w:
                (ce(second(first(b["x"])), b) / (num if w is None else w.num_tokens)).backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()


def _two_models(layout=None):
    torch.manual_seed(0)
    first, second = Part(6).double(), Part(3).double()
    if layout is None:
        optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        whole = [rows(window) for window in range(3)]
        _steps_of_two(first, second, optims, [(m, 10, contextlib.nullcontext()) for m in whole])
        return {"first": first.seen, "second": second.seen, "weight": second.linear.weight.detach()}
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        summed = sw.Sharding(buffers={"seen": "sum"}, min_unit_bytes=0)
        first, second = (sw.parallelize(m, world, sharding=summed) for m in (first, second))
        optims = [sw.local_optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (first, second)]
        parts = [mine(world, rows(window)) for window in range(3)]
        _steps_of_two(first, second, optims, ((m, 10, sw.window(first, m)) for m in parts))
        return {"first": first.seen, "second": second.seen, "weight": sw.full_tensor(second.linear.weight)}


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_buffers_of_a_second_model_in_the_loss_are_agreed_on_where_it_steps(ranks: RankPool, layout):
    one = _two_models()
    for found in ranks.run(_two_models, 2, layout):
        for name, value in one.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)
