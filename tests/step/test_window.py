"""A loop of one's own over a window: exact against plain torch, paddings included; and windows that are refused."""

import copy
import warnings

import pytest
import torch
from models.tied import Tied
from step.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss, values
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, RankError, UnsupportedError, UsageError
from shardwise.parallel import runtime_of

TWO = [("dp_replicate=2", None), ("dp_shard=2", None), ("dp_replicate=2", "fsdp2")]


# ---- the user's own loop ------------------------------------------------------------------------------------------


class Samples:
    """Eleven sequences: no split over two ranks is even, so some micro-batches are paddings."""

    def __len__(self):
        return 11

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 11, (6,), generator=generator)
        mask = torch.ones(6, dtype=torch.long)
        mask[6 - i % 3 :] = 0
        return {"input_ids": ids, "attention_mask": mask}


class Counting(Tied):
    """With running statistics and a counter: a padding must leave no trace in them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids)


def build_counting():
    torch.manual_seed(3)
    return Counting().double()


def _own_loop(layout, engine):
    world, model = shard(layout, engine=engine, build=build_counting, buffers={"calls": "sum"})
    with world:
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = sw.Loader(Samples(), world, global_batch=6, micro_batch=2)
        tokens, paddings, norms, own_calls = [], 0, [], []
        for batches in loader:
            with sw.window(model, batches) as w:
                for b in w:
                    paddings += b.padding
                    (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
                own_calls.append(float(model.calls))
            norms.append(float(sw.clip_grad_norm_(model, 0.05)))
            optim.step()
            optim.zero_grad()
            tokens.append(w.num_valid)
        return values(model), tokens, paddings, norms, [*own_calls, float(model.calls)]


@pytest.mark.parametrize(("layout", "engine"), TWO)
def test_an_own_loop_with_paddings_is_exact(ranks, layout, engine):
    world = type("One", (), {"seed": 0, "device": torch.device("cpu"), "axis": lambda self, name: _One()})()
    plain = build_counting()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    tokens, norms = [], []
    for batches in sw.Loader(Samples(), world, global_batch=6, micro_batch=2):
        plain_backward(plain, batches)
        tokens.append(sum(int((b["labels"] != -100).sum()) for b in batches))
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)))
        optim.step()
        optim.zero_grad()
    found = ranks.run(_own_loop, 2, layout, engine)
    assert sum(paddings for _, _, paddings, _, _ in found) == 2  # windows of 3 and 3 micro-batches for two ranks
    # Two real micro-batches a window on rank 0, one and a padding on rank 1: three, as in one process.
    assert [calls for *_, calls in found] == [[2.0, 5.0, 6.0], [1.0, 4.0, 6.0]]
    assert float(plain.calls) == 6.0
    for got, counted, _, clipped, _ in found:
        assert_close(got, {n: p.detach() for n, p in plain.named_parameters()})
        assert counted == tokens
        assert clipped == pytest.approx(norms, rel=1e-12)


class _One:
    rank, size = 0, 1


def _accumulates(layout, engine):
    """Two windows without zero_grad between them."""
    world, model = shard(layout, engine=engine)
    with world:
        for turn in range(2):
            with sw.window(model, mine([batch(i + 4 * turn) for i in range(4)], world)) as w:
                for b in w:
                    (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        return gradients(model)


@pytest.mark.parametrize(("layout", "engine"), TWO)
def test_gradients_of_the_window_before_are_added_to_once(ranks, layout, engine):
    plain = build()
    for turn in range(2):
        plain_backward(plain, [batch(i + 4 * turn) for i in range(4)])
    for found in ranks.run(_accumulates, 2, layout, engine):
        assert_close(found, {n: p.grad for n, p in plain.named_parameters()})


def _by_parts(layout):
    """``count_tokens`` and ``accumulate`` by themselves."""
    world, model = shard(layout)
    with world:
        batches = mine([batch(i) for i in range(6)], world)
        num = sw.count_tokens(model, batches)
        for i, b in enumerate(batches):
            with sw.accumulate(model, is_last=i == len(batches) - 1):
                (sum_loss(model(b["input_ids"]), b) / num).backward()
        return gradients(model), num


@pytest.mark.parametrize(("layout", "_engine"), TWO[:2])
def test_the_parts_of_a_window(ranks, layout, _engine):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(6)])
    for found, num in ranks.run(_by_parts, 2, layout):
        assert num == sum(int((batch(i)["labels"] != -100).sum()) for i in range(6))
        assert_close(found, {n: p.grad for n, p in plain.named_parameters()})


def _weighted():
    world, model = shard("dp_shard=2")
    with world:
        batches = mine([batch(i) for i in range(2)], world)
        half = sw.count_tokens(model, batches, count=lambda b: torch.tensor(0.25))
        fifth = sw.count_tokens(model, batches, count=lambda b: 0.1)
        told = sw.evaluate(
            model,
            batches,
            loss=lambda output, b: output.double().sum() * 0 + 0.1 * len(output),
            count=lambda b: 0.1 * len(b["input_ids"]),
        )
        with pytest.raises(ConfigError) as caught:
            sw.count_tokens(model, batches, count=lambda b: torch.tensor(float("nan")))
        return half, fifth, told["loss"], str(caught.value)


def test_a_count_may_be_a_sum_of_weights(ranks):
    for half, fifth, mean, text in ranks.run(_weighted, 2):
        assert half == 0.5 and fifth == 0.2  # numbers of Python, in float64
        assert mean == 1.0
        assert "a window of nan tokens" in text


class Named(Tied):
    """A model whose attribute ``count`` has nothing to do with tokens."""

    def count(self, trainable_only=False):
        return sum(param.numel() for param in self.parameters())


def _counted_by_labels():
    world, model = shard("dp_shard=1", build=lambda: Named().double())
    with world:
        with sw.window(model, [batch(0)]) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        return (
            w.num_valid,
            sw.count_tokens(model, [batch(0)]),
            sw.evaluate(model, [batch(0)], loss=sum_loss)["num_tokens"],
        )


def test_an_attribute_count_of_a_model_is_not_asked_in_a_loop_of_ones_own(ranks):
    labels = int((batch(0)["labels"] != -100).sum())
    assert ranks.run(_counted_by_labels, 1) == [(labels,) * 3]


class Rows(nn.Module):
    """A loss with a parameter, whose mean is over rows: it has a count of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, logits, batch):
        return sum_loss(logits, batch) * self.scale.sum()

    @staticmethod
    def count(batch):
        return 2 * batch["labels"].shape[0]


def _counted_by_the_model(layout):
    """A loop of one's own over a task, and what each verb counts."""
    world, model = shard(layout, build=lambda: sw.TaskModel(build(), Rows()))
    with world:
        batches = mine([batch(i) for i in range(2)], world)
        with sw.window(model, batches) as w:
            for b in w:
                (model(b) / w.num_tokens).backward()
        found, counts = gradients(model), [w.num_valid, sw.count_tokens(model, batches)]
        counts.append(sw.evaluate(model, batches, loss=None)["num_tokens"])
        model.zero_grad()
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=None)
        counts.append(step(batches).num_tokens)
        return found, counts


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_model_with_a_count_of_its_own_is_counted_by_it_in_every_loop(ranks, layout):
    plain = sw.TaskModel(build(), Rows())
    num = sum(Rows.count(batch(i)) for i in range(2))
    assert num != sum(int((batch(i)["labels"] != -100).sum()) for i in range(2))
    for i in range(2):
        (plain(batch(i)) / num).backward()
    for found, counts in ranks.run(_counted_by_the_model, 2, layout):
        assert counts == [num] * 4
        assert_close(found, {n: p.grad for n, p in plain.named_parameters()})


# ---- windows that are refused -------------------------------------------------------------------------------------


def _run(model, batches, use):
    with sw.window(model, batches) as w:
        use(w)


def _misused(layout):
    world, model = shard(layout)
    with world:
        batches = mine([batch(i) for i in range(4)], world)

        def nested(w):
            with sw.window(model, batches):
                pass

        def left_early(w):
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
                break

        def twice(w):
            for _ in range(2):
                for b in w:
                    (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()

        texts = []
        for use in (nested, left_early, twice, lambda w: None):
            with pytest.raises(UsageError) as caught:
                _run(model, batches, use)
            texts.append(caught.value.given)
            assert not runtime_of(model).in_window and all(p.grad is None for p in model.parameters())
        with pytest.raises(UsageError) as caught:
            list(sw.window(model, batches))
        texts.append(caught.value.given)
        with pytest.raises(UsageError) as caught:
            sw.window(nn.Linear(2, 2), batches)
        texts.append(caught.value.given)
        _run(model, batches, lambda w: [(sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward() for b in w])
        return texts, gradients(model)


@pytest.mark.parametrize(("layout", "_engine"), TWO[:2])
def test_misuse_is_named_and_the_next_window_is_exact(ranks, layout, _engine):
    plain = build()
    plain_backward(plain, [batch(i) for i in range(4)])
    for texts, found in ranks.run(_misused, 2, layout):
        assert texts == [
            "a window inside a window",
            "a window left after 1 of 2 micro-batches",
            "a window iterated twice",
            "a window left after 0 of 2 micro-batches",
            "a window used outside its with block",
            "a Linear that was not sharded",
        ]
        assert_close(found, {n: p.grad for n, p in plain.named_parameters()})


def _unequal(per_rank):
    world, model = shard("dp_shard=2")
    with world:
        batches = [batch(i) for i in range(per_rank[world.rank])]
        with pytest.raises((RankError, UsageError)) as caught, sw.window(model, batches):
            pass
        error = caught.value
        return type(error).__name__, str(error), getattr(error, "ranks", None)


def test_unequal_windows_name_the_lengths_and_the_rank(ranks):
    for kind, text, _ in ranks.run(_unequal, 2, (3, 2)):
        assert kind == "RankError" and "[3, 2]" in text and "sw.Loader pads" in text


def test_an_empty_window_names_itself_and_its_rank(ranks):
    (there, text, _), (here, own, _) = ranks.run(_unequal, 2, (2, 0))
    assert here == "UsageError" and own.startswith("an empty window")
    assert there == "RankError" and "rank 1 could not start window 1" in text and "an empty window" in text


def _uncountable():
    world, model = shard("dp_shard=2")
    texts = []
    with world:
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
        b = batch(world.rank)
        for bad, use in (
            ({"input_ids": b["input_ids"]}, lambda bad: step([bad])),
            ({**b, "labels": b["input_ids"]}, lambda bad: sw.TrainStep(model, step.optim)([bad])),
        ):
            with pytest.raises(ConfigError) as caught:
                use(bad)
            texts.append(str(caught.value))
    return texts


def test_nothing_to_count_and_labels_that_are_the_inputs(ranks):
    for none, same in ranks.run(_uncountable, 2):
        assert "count=lambda batch" in none and "['input_ids']" in none
        assert same.startswith("labels that equal input_ids") and "prepare=sw.shift_labels" in same


# ---- a module that changed -----------------------------------------------------------------------------------------


def _replace_parameter(model):
    model.blocks[1].bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))


def _replace_layer(model):
    model.blocks[2] = nn.Linear(5, 5).double()


def _add_layer(model):
    model.blocks.append(nn.Linear(5, 5).double())


def _add_parameter(model):
    model.blocks[0].extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def _remove_layer(model):
    del model.blocks[1]


def _freeze(model):
    model.blocks[0].weight.requires_grad_(False)


def _unfreeze(model):
    model.blocks[2].bias.requires_grad_(True)


CHANGES = {
    "replaced parameter": (_replace_parameter, "a parameter was replaced", "blocks.1.bias"),
    "replaced layer": (_replace_layer, "a Linear was added or replaced", "blocks.2"),
    "added layer": (_add_layer, "a Linear was added or replaced", "blocks.3"),
    "added parameter": (_add_parameter, "a parameter was added", "blocks.0.extra"),
    "removed layer": (_remove_layer, "a parameter was replaced", "blocks.1.weight"),
    "frozen": (_freeze, "a parameter was frozen", "blocks.0.weight"),
    "unfrozen": (_unfreeze, "a parameter was unfrozen", "blocks.2.bias"),
}


def build_partly_frozen():
    model = build()
    model.blocks[2].bias.requires_grad_(False)
    return model


def _changed(layout, engine, change, gathered):
    world, model = shard(layout, engine=engine, build=build_partly_frozen)
    with world:
        batches = mine([batch(i) for i in range(2)], world)
        for _ in range(2):  # gathered and resharded by the engine: no alarm
            _run(model, batches, lambda w: [sum_loss(model(b["input_ids"]), b).backward() for b in w])
            with torch.no_grad():
                model(batches[0]["input_ids"])
        if not gathered and hasattr(model, "reshard"):
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
        CHANGES[change][0](model)
        with pytest.raises(UsageError) as caught:
            _run(model, batches, lambda w: None)
        return caught.value.given, caught.value.name


@pytest.mark.combinations("pairs")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("layout", "engine", "gathered"),
    [("dp_replicate=2", None, False), ("dp_shard=2", None, False), ("dp_shard=2", None, True)],
)
def test_a_change_after_sharding_is_named(ranks, layout, engine, gathered, change):
    for given, name in ranks.run(_changed, 2, layout, engine, change, gathered):
        assert given == f"the module changed after it was sharded: {CHANGES[change][1]}"
        assert name == CHANGES[change][2]


def _copied(layout):
    world, model = shard(layout)
    with world, pytest.raises(UnsupportedError) as caught:
        copy.deepcopy(model)
    return str(caught.value)


@pytest.mark.parametrize(("layout", "_engine"), TWO[:2])
def test_deepcopy_of_a_sharded_module_is_refused(ranks, layout, _engine):
    for text in ranks.run(_copied, 2, layout):
        assert text.startswith("deepcopy of a sharded module") and "sw.full_state_dict" in text


# ---- the count that a sum is divided by ----------------------------------------------------------------------------------------------


def _unread():
    """How often each way to use windows of a loop of one's own is warned of."""
    told = {}
    with sw.init("dp_shard=-1", device="cpu") as world:
        for name, (num, divide) in DIVIDED.items():
            model = sw.parallelize(build(), world)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    model.zero_grad()
                    with sw.window(model, [batch(i) for i in range(num)]) as w:
                        for given in w:
                            loss = sum_loss(model(given["input_ids"]), given)
                            (loss / w.num_tokens if divide == "inside" else loss).backward()
                    if divide in ("behind", "valid"):
                        count = w.num_tokens if divide == "behind" else w.num_valid
                        for param in model.parameters():
                            param.grad /= count
            told[name] = [str(each.message) for each in caught if "num_tokens" in str(each.message)]
    return told


DIVIDED = {
    "by nothing": (2, "never"),
    "by nothing, one micro-batch": (1, "never"),
    "each loss": (2, "inside"),
    "the gradients": (2, "behind"),
    "by the count as it is": (2, "valid"),
}


def test_a_window_whose_count_nothing_reads_is_warned_of_once(ranks):
    first, second = ranks.run(_unread, 2)
    assert {name: len(told) for name, told in first.items()} == {
        name: int(divide == "never") for name, (_, divide) in DIVIDED.items()
    }
    assert "are sums over 4 micro-batches of all ranks, and those of a mean 4 times too large" in first["by nothing"][0]
    assert "over 2 micro-batches" in first["by nothing, one micro-batch"][0] and not any(second.values())
    (alone,) = ranks.run(_unread, 1)
    assert [name for name, told in alone.items() if told] == ["by nothing"]
