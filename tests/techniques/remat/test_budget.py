"""``remat="8GiB"``: what is chosen is what is really kept, the same on all ranks, with the numbers of one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from models.recomputed import Feed, Stack, build
from techniques.remat.recompute import Kept, assert_same, kept_and_run, of_feed, one_process, settle, train
from torch import Tensor, nn

from shardwise import Compile, Remat, Sharding
from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.parallel import describe, parallelize, runtime_of
from shardwise.step.own_loop import accumulate
from shardwise.world import init

KIB = 1024


@pytest.fixture(scope="module")
def seen(ranks) -> dict[str, Kept]:
    budgets = ("none", "full", "150KiB", "300KiB", "450KiB", "700KiB", "1MiB", "1.2MiB", "8GiB")
    return {budget: ranks.run(kept_and_run, 1, budget, of_feed)[0] for budget in budgets}


class TestBytes:
    def test_the_budget_is_held_and_what_is_said_is_what_is_kept(self, seen):
        """Measured by torch's profiler. What is kept outside of the blocks (some of it the states of generators) is the same in all."""
        around = seen["full"].then - 4 * 32 * KIB  # the blocks' inputs
        for budget, limit in {"150KiB": 150, "300KiB": 300, "450KiB": 450, "700KiB": 700, "1MiB": 1024}.items():
            kept = (seen[budget].then - around) / KIB
            assert kept <= limit
            said = float(seen[budget].chosen.partition("That is ")[2].split()[0])
            unit = seen[budget].chosen.partition("That is ")[2].split()[1]
            assert (
                abs(kept - said * {"KiB": 1, "MiB": 1024}[unit]) < 45
            )  # states of generators, of blocks that run again

    def test_more_memory_means_less_work(self, seen):
        order = ("full", "150KiB", "300KiB", "450KiB", "700KiB", "1MiB", "1.2MiB", "none")
        work = [seen[budget].operators for budget in order]
        assert work == sorted(work, reverse=True) and len(set(work)) > 4

    def test_until_the_first_step_it_keeps_the_least(self, seen):
        assert {seen[budget].at_first for budget in ("300KiB", "8GiB")} == {seen["full"].at_first}

    def test_what_fits_whole_does_not_run_again(self, seen):
        assert seen["8GiB"].then == seen["none"].then and seen["8GiB"].operators == seen["none"].operators
        assert seen["8GiB"].chosen.startswith("kept for backward by 4 blocks: all. ")


@pytest.mark.quick("4KiB-fsdp-2", "9KiB-one-fsdp2")
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2", "one-fsdp2"])
@pytest.mark.parametrize("budget", ["4KiB", "9KiB", "14KiB"])
def test_gradients_with_dropout_are_one_processs(ranks, layout, budget):
    want = one_process()
    text, count, engine = LAYOUTS[layout]
    answers = ranks.run(train, count, text, engine, timeout_s=100, remat=budget)
    for answer in answers:
        assert_same(answer["grads"], want)
    assert len({tuple(n / answer["micro"] for n in answer["runs"]) for answer in answers}) == 1
    runs = [n / answers[0]["micro"] for n in answers[0]["runs"]]
    assert 2 in runs if budget != "14KiB" else 1 in runs


class Uneven(nn.Module):
    """Blocks that take another way on another rank."""

    def __init__(self, block: type[nn.Module] = Feed):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Forked(Feed):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.down(F.gelu(self.up(y))) if len(x) > 8 else y


def chosen_on(layout: str, sizes: list[int], remat, block=Feed):
    with init(layout, device="cpu", timeout_s=60) as world:
        sharding = Sharding(units=("blocks.*.up",)) if world.layout.dp_shard > 1 else None
        model = parallelize(functools.partial(Uneven, block), world, remat=remat, sharding=sharding)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            with accumulate(model, is_last=True):
                loss = model(torch.ones(sizes[world.rank], 64)).square().sum()
                loss.backward()
            losses.append(loss.item())
            optim.step()
            optim.zero_grad()
        return runtime_of(model).chosen["remat"], describe(model).splitlines()[-1], losses


@pytest.mark.quick(
    "dp_replicate=2-60KiB-Feed", "dp_replicate=2-selective-Forked", "dp_shard=2-selective-*", "dp_shard=2-60KiB-Forked"
)
@pytest.mark.parametrize("block", [Feed, Forked])
@pytest.mark.parametrize("remat", ["selective", "60KiB"])
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_ranks_with_other_batches_choose_alike(ranks, layout, remat, block):
    """Were it not so, a block with a unit in it would be gathered again on one rank only, and both would wait."""
    first, second = ranks.run(chosen_on, 2, layout, [4, 16], remat, block, timeout_s=90)
    assert first[0] == second[0] and first[1] == f"remat: {first[0]}"


def test_the_larger_batch_counts(ranks):
    (alone,) = ranks.run(chosen_on, 1, "dp_shard=1", [16], "60KiB")
    for text, _, _ in ranks.run(chosen_on, 2, "dp_replicate=2", [4, 16], "60KiB"):
        assert text == alone[0]


def too_small(layout: str):
    with init(layout, device="cpu", timeout_s=60) as world:
        model = parallelize(Stack, world, remat="100KiB")
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with accumulate(model, is_last=True):
            model(torch.ones(128 + world.rank, 64)).sum().backward()
        try:
            optim.step()
        except UsageError as error:
            return str(error), next(model.parameters()).grad is not None
    return None


def test_less_than_the_inputs_is_refused_before_the_step(ranks):
    for text, has_grad in ranks.run(too_small, 2, "dp_replicate=2"):
        assert "Remat(budget=102400), that is 100.00 KiB" in text and has_grad
        assert "their inputs alone take 129.00 KiB" in text


class InPlace(nn.Module):
    """Changes the results of its products in place, one of them through a view."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate.view(-1).sigmoid_()
        y = self.up(x).tanh_() * gate
        return x + self.down(y.square().exp().neg().exp())


def losses_of(make, remat) -> tuple[list[float], str]:
    with init("dp_shard=1", device="cpu") as world:
        torch.manual_seed(0)
        model = parallelize(make(), world, remat=remat)
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for size in (8, 8, 12, 20, 4):  # other sizes than at first too
            loss = model(torch.linspace(-1, 1, size * 64).view(size, 64)).square().mean()
            loss.backward()
            losses += [loss.item(), *(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)]
            optim.step()
            optim.zero_grad()
        return losses, runtime_of(model).chosen.get("remat", "")


def in_place() -> Stack:
    return Stack(InPlace)


@pytest.mark.parametrize("make", [in_place, of_feed])
@pytest.mark.parametrize("remat", ["selective", "9KiB", "12KiB", "20KiB", "40KiB"])
def test_steps_are_the_same_bits_whatever_is_kept(ranks, make, remat):
    plain, _ = ranks.run(losses_of, 1, make, None)[0]
    again, chosen = ranks.run(losses_of, 1, make, remat)[0]
    assert again == plain and "kept for backward by" in chosen


def test_results_that_are_changed_in_place_are_not_kept(ranks):
    """torch would refuse them; of this block only one product is left as it was."""
    chosen = ranks.run(losses_of, 1, in_place, Remat(mode="selective", save=("matmul",)))[0][1]
    assert "4 blocks: inputs only" in chosen  # what is left is the last, which the second run does not reach


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTMCell(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unsafe_chunk(2, -1)
        return self.inner(torch.cat([a.tanh(), b], -1))[0]


def recurrent() -> Stack:
    return Stack(Lstm)


@pytest.mark.parametrize("remat", ["9KiB", "25KiB", "60KiB"])
def test_of_a_recurrent_block_all_or_nothing_is_kept(ranks, remat):
    plain, _ = ranks.run(losses_of, 1, recurrent, None)[0]
    again, chosen = ranks.run(losses_of, 1, recurrent, remat)[0]
    assert again == plain and "inputs and" not in chosen


class Seldom(nn.Module):
    """Uses its last block from the third step on only."""

    def __init__(self):
        super().__init__()
        self.blocks, self.steps = nn.ModuleList(Feed() for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for block in self.blocks[: 2 if self.steps < 3 else 3]:
            x = block(x)
        return x


@pytest.mark.parametrize("remat", ["selective", "100KiB"])
def test_a_block_that_had_not_run_keeps_its_inputs(ranks, remat):
    plain, _ = ranks.run(losses_of, 1, Seldom, None)[0]
    again, chosen = ranks.run(losses_of, 1, Seldom, remat)[0]
    assert again == plain and chosen.endswith("; 1 that had not run keep their inputs only")


def settled(budget: int) -> str:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(build, world, remat=Remat(budget=budget))
        try:
            settle(model)
        except UsageError as error:
            return str(error)
        return runtime_of(model).chosen["remat"]


def test_inputs_that_all_blocks_share_count_once(ranks):
    """The mask and two tables of rotations, which each block is given, beside the tokens of each."""
    tokens, mask, rotations = 5 * 2 * 6 * 8 * 8, 6 * 6, 2 * 6 * 8  # of 3 blocks and 2 experts; for all; for all
    least = tokens + mask + rotations
    assert f"{least / KIB:.2f} KiB in a micro-batch" in ranks.run(settled, 1, least)[0]
    assert f"their inputs alone take {least / KIB:.2f} KiB" in ranks.run(settled, 1, least - 1)[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Remat(budget="8 apples"), "Remat(budget=) 8 apples"),
        (lambda: Remat(budget=0), "that is no size"),
        (lambda: Remat(budget=-5), "that is no size"),
        (lambda: Remat(budget="8GiB", mode="selective"), "a budget chooses by itself"),
        (lambda: Remat(budget="8GiB", offload=True), "remove offload, or budget"),
    ],
)
def test_budgets_that_cannot_be_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def compiled():
    with init("dp_shard=1", device="cpu") as world:
        try:
            parallelize(Stack, world, remat="8GiB", compile=Compile(backend="eager"))
        except PlanError as error:
            return str(error)
    return None


def test_a_budget_of_compiled_blocks_is_refused(ranks):
    text = ranks.run(compiled, 1)[0]
    assert "Remat(budget=) with Compile" in text and "activation_memory_budget" in text
