"""The loader: the same windows for every data-parallel degree, each sample once an epoch, a position that resumes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.labels import shift_labels
from shardwise.data.loader import Loader, MicroBatch, default_collate, sample_order
from shardwise.errors import ConfigError, UsageError

SIZES = st.integers(1, 40)
DEGREES = st.integers(1, 6)
EXAMPLES = settings(max_examples=60, deadline=None)


def fake_world(rank: int = 0, size: int = 1, seed: int = 0) -> SimpleNamespace:
    axes = {"dp": SimpleNamespace(rank=rank, size=size)}
    return SimpleNamespace(seed=seed, device=torch.device("cpu"), axis=axes.__getitem__)


class Numbers:
    """A dataset whose sample i is the number i, so that a batch tells which samples it holds."""

    def __init__(self, length: int):
        self.length, self.read = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"i": torch.tensor(index)}


def make(length, micro, accumulate, *, rank=0, size=1, seed=0, **options) -> Loader:
    world = fake_world(rank, size, seed)
    return Loader(Numbers(length), world, global_batch=micro * accumulate, micro_batch=micro, **options)


def windows_of(loaders: list[Loader]) -> list[dict[int, list[int]]]:
    """One epoch over all ranks: per window, micro-batch index -> samples; paddings are checked and left out."""
    out = []
    for per_rank in zip(*loaders, strict=True):
        assert len({len(window) for window in per_rank}) == 1, "every rank has equally many micro-batches"
        real: dict[int, list[int]] = {}
        indices = [batch.index for window in per_rank for batch in window]
        assert len(set(indices)) == len(indices), "no index twice in a window"
        for batch in (batch for window in per_rank for batch in window if not batch.padding):
            real[batch.index] = batch["i"].tolist()
        seen = set(map(tuple, real.values()))
        for batch in (batch for window in per_rank for batch in window if batch.padding):
            assert tuple(batch["i"].tolist()) in seen, "a padding is a copy of a micro-batch of its window"
            assert batch.index >= len(real)
        out.append(real)
    return out


@EXAMPLES
@given(length=SIZES, micro=st.integers(1, 4), accumulate=st.integers(1, 5), size=DEGREES, shuffle=st.booleans())
def test_same_windows_for_every_degree(length, micro, accumulate, size, shuffle):
    one = windows_of([make(length, micro, accumulate, shuffle=shuffle)])
    many = windows_of([make(length, micro, accumulate, rank=r, size=size, shuffle=shuffle) for r in range(size)])
    assert many == one
    assert len(one) == len(make(length, micro, accumulate))


@EXAMPLES
@given(length=SIZES, micro=st.integers(1, 4), accumulate=st.integers(1, 5), size=DEGREES, seed=st.integers(0, 99))
def test_each_sample_once_an_epoch_and_only_the_last_window_is_smaller(length, micro, accumulate, size, seed):
    loaders = [make(length, micro, accumulate, rank=r, size=size, seed=seed) for r in range(size)]
    for epoch in range(2):
        assert [loader.epoch for loader in loaders] == [epoch] * size
        windows = windows_of(loaders)
        samples = [[i for g in sorted(real) for i in real[g]] for real in windows]
        assert sorted(i for part in samples for i in part) == list(range(length))
        assert all(len(part) == micro * accumulate for part in samples[:-1])


@EXAMPLES
@given(data=st.data(), length=SIZES, micro=st.integers(1, 3), accumulate=st.integers(1, 3))
def test_resume_under_another_degree_repeats_and_misses_nothing(data, length, micro, accumulate):
    before, after = data.draw(DEGREES), data.draw(DEGREES)
    first = [make(length, micro, accumulate, rank=r, size=before, seed=7) for r in range(before)]
    stop = data.draw(st.integers(0, 2 * len(first[0])))
    seen, done = [], 0
    while done < stop:  # leave the loop in the middle of an epoch, or exactly at its end
        for per_rank in zip(*first, strict=True):
            seen += [i for w in per_rank for b in w if not b.padding for i in b["i"].tolist()]
            done += 1
            if done == stop:
                break
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    # Another world seed: the interrupted order must win.
    second = [make(length, micro * 2, accumulate, rank=r, size=after, seed=8) for r in range(after)]
    for loader in second:
        loader.load_state_dict(states[0])
    epoch = second[0].epoch
    seen += [i for real in windows_of(second) for g in sorted(real) for i in real[g]]
    assert np.bincount(seen, minlength=length).tolist() == [epoch + 1] * length
    assert second[0].epoch == epoch + 1


def test_micro_batches_are_dealt_in_turn():
    dealt = [[batch.index for batch in next(iter(make(10, 1, 5, rank=r, size=2)))] for r in range(2)]
    assert dealt == [[0, 2, 4], [1, 3, 5]]
    padding = [[batch.padding for batch in next(iter(make(10, 1, 5, rank=r, size=2)))] for r in range(2)]
    assert padding == [[False, False, False], [False, False, True]]


def test_a_rank_without_a_micro_batch_copies_one_of_the_window():
    (window,) = list(make(2, 1, 2, rank=2, size=3, shuffle=False))
    assert [(b.index, b.padding, b["i"].tolist()) for b in window] == [(2, True, [0])]


def test_a_rank_reads_its_own_samples_only():
    loader = make(12, 2, 3, rank=1, size=3, shuffle=False)
    list(loader)
    assert loader.dataset.read == [2, 3, 8, 9]


def test_order_differs_by_epoch_and_seed_and_is_not_the_datasets():
    def order(loader):
        return [i for real in windows_of([loader]) for g in sorted(real) for i in real[g]]

    loader = make(50, 1, 5)
    orders = [order(loader), order(loader), order(make(50, 1, 5, seed=1)), list(range(50))]
    assert len({tuple(o) for o in orders}) == 4
    assert order(make(50, 1, 5)) == orders[0]
    plain = make(50, 1, 5, shuffle=False)
    assert order(plain) == order(plain) == list(range(50))


@EXAMPLES
@given(length=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_sample_order_is_a_permutation(length, seed, epoch):
    order = sample_order(np.arange(length), length, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


def test_sample_order_reaches_every_order_about_equally_often():
    counts: dict[tuple, int] = {}
    for seed in range(2400):
        order = tuple(sample_order(np.arange(4), 4, seed=seed, epoch=0).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert min(counts.values()) > 50 and max(counts.values()) < 160  # 100 expected, sigma 10


def test_sample_order_of_a_stored_run_stays_what_it_was():
    # Positions are saved in checkpoints: a change of this order would make resumed runs repeat samples.
    assert sample_order(np.arange(10), 10, seed=0, epoch=0).tolist() == [1, 4, 3, 5, 6, 8, 9, 7, 2, 0]
    # A position far out in a dataset that would not fit as a list.
    assert 0 <= sample_order(np.array([10**12]), 10**13, seed=3, epoch=1)[0] < 10**13


def test_iter_goes_on_where_a_loop_was_left():
    loader = make(10, 1, 3, shuffle=False)
    first = next(iter(loader))
    rest = list(loader)
    assert [b["i"].item() for w in [first, *rest] for b in w] == list(range(10))
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)


def test_position_inside_the_loop_is_behind_the_window():
    loader = make(10, 1, 4)
    assert [loader.state_dict()["position"] for _ in loader] == [4, 8, 0]


def test_leaving_at_the_last_window_starts_the_next_epoch():
    loader = make(4, 1, 2)
    for n, _ in enumerate(loader, 1):
        if n == 2:
            break
    assert loader.epoch == 0
    assert len(list(loader)) == 2 and loader.epoch == 2


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"shuffle": "False"}, "shuffle='False'"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"pin_memory": "yes"}, "pin_memory='yes'"),
    ],
)
def test_flags_are_true_or_false(option, told):
    with pytest.raises(ConfigError, match=told):
        Loader([{"x": 1}], fake_world(0, 1), global_batch=1, micro_batch=1, **option)


def test_two_loops_over_one_loader_are_refused():
    loader = make(10, 1, 2)
    outer = iter(loader)
    next(outer)
    next(iter(loader))
    with pytest.raises(UsageError, match="two loops would share"):
        next(outer)


def test_loading_a_position_inside_the_loop_is_refused():
    loader = make(10, 1, 2)
    with pytest.raises(UsageError, match="repositioned inside"):
        for _ in loader:
            loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_samples": 11}, "num_samples=11 for a loader with num_samples=10"),
        ({"shuffle": False}, "shuffle=False for a loader with shuffle=True"),
    ],
)
def test_a_position_of_another_order_is_refused(change, text):
    loader = make(10, 1, 2)
    with pytest.raises(ConfigError, match=text):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_half_a_position_is_refused():
    with pytest.raises(ConfigError, match="without position, seed, num_samples, shuffle"):
        make(10, 1, 2).load_state_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "text"),
    [
        (10, 4, r"use micro_batch=2, or global_batch=12"),
        (3, 4, r"use micro_batch=3, or global_batch=4"),
        (0, 1, r"global_batch=0"),
        (4, -1, r"micro_batch=-1"),
        (4.0, 2, r"global_batch=4.0"),
        (4, True, r"micro_batch=True"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(global_batch, micro_batch, text):
    with pytest.raises(ConfigError, match=text):
        Loader(Numbers(10), fake_world(), global_batch=global_batch, micro_batch=micro_batch)


def test_datasets_without_samples_or_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"an empty dataset \(Numbers\)"):
        make(0, 1, 1)
    with pytest.raises(UsageError, match="type generator, which can be read once only"):
        Loader((i for i in range(3)), fake_world(), global_batch=1, micro_batch=1)
    with pytest.raises(ConfigError, match="a dict with train, test"):
        Loader({"train": [1], "test": [1]}, fake_world(), global_batch=2, micro_batch=1)
    with pytest.raises(UsageError, match=r"type object without len\(\)"):
        Loader(object(), fake_world(), global_batch=1, micro_batch=1)


def test_collate_and_prepare_are_used_and_checked():
    loader = make(
        4, 2, 1, shuffle=False, collate=lambda s: {"n": torch.tensor(len(s))}, prepare=lambda b: {**b, "x": b["n"]}
    )
    assert list(next(iter(loader))[0]) == ["n", "x"]
    with pytest.raises(ConfigError, match="collate returned a mapping with n: int"):
        next(iter(make(4, 2, 1, collate=lambda s: {"n": len(s)})))
    with pytest.raises(ConfigError, match="prepare returned NoneType"):
        next(iter(make(4, 2, 1, prepare=lambda b: None)))


def test_loader_gives_shifted_tokens_by_default_and_none_leaves_them():
    rows = torch.arange(12).reshape(3, 4)
    loader = Loader(rows, fake_world(), global_batch=3, micro_batch=3, shuffle=False)
    (batch,) = next(iter(loader))
    assert torch.equal(batch["input_ids"], rows[:, :-1]) and torch.equal(batch["labels"], rows[:, 1:])
    (batch,) = next(iter(Loader(rows, fake_world(), global_batch=3, micro_batch=3, shuffle=False, prepare=None)))
    assert torch.equal(batch["input_ids"], rows) and "labels" not in batch


def test_shift_labels_cuts_masks_and_hides_padded_targets():
    ids, mask = torch.arange(10).reshape(2, 5), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    out = shift_labels({"input_ids": ids, "attention_mask": mask, "weight": torch.ones(2)})
    assert out["input_ids"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert out["labels"].tolist() == [[1, 2, 3, 4], [6, 7, -100, -100]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert out["weight"].shape == (2,)


def test_a_loader_makes_labels_where_there_are_none_and_leaves_aligned_ones():
    ids = torch.arange(5)
    for sample in ({"input_ids": ids}, {"input_ids": ids[:4], "labels": ids[1:]}):
        ((batch,),) = Loader([sample], fake_world(), global_batch=1, micro_batch=1)
        assert batch["input_ids"].tolist() == [[0, 1, 2, 3]] and batch["labels"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("shape", [(4,), (2, 1), (2, 0)])
def test_shift_labels_needs_two_tokens(shape):
    with pytest.raises(ConfigError, match="at least two tokens"):
        shift_labels({"input_ids": torch.zeros(shape, dtype=torch.long)})


def test_default_collate_names_and_stacks():
    assert {k: v.shape for k, v in default_collate([torch.zeros(3, 4)] * 2).items()} == {"input": (2, 3, 4)}
    assert {k: v.shape for k, v in default_collate([torch.zeros(3).long()] * 2).items()} == {"input_ids": (2, 3)}
    pair = default_collate([(torch.zeros(3, 4), 1), (torch.ones(3, 4), 0)])
    assert pair["input"].shape == (2, 3, 4) and pair["labels"].tolist() == [1, 0]
    mixed = default_collate([{"x": np.ones(2, np.float32), "n": 3}, {"n": 4, "x": np.zeros(2, np.float32)}])
    assert mixed["x"].dtype == torch.float32 and mixed["n"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([torch.zeros(3), torch.zeros(4)], r"'input' has the shapes \[\(3,\), \(4,\)\]"),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], r"keys \['a'\] and \['b'\]"),
        (["text"], "a sample of type str"),
        ([(torch.zeros(1),) * 3], "a sample of type tuple with 3 parts"),
    ],
)
def test_default_collate_refuses_what_it_does_not_know(samples, text):
    with pytest.raises(ConfigError, match=text):
        default_collate(samples)


def test_micro_batch_is_a_mapping_that_knows_its_place():
    batch = MicroBatch({"x": torch.zeros(2, 3)}, index=4, padding=True)
    assert dict(batch).keys() == {"x"} and (batch.index, batch.padding) == (4, True)
    assert repr(batch) == "MicroBatch(index=4, padding=True, x[2, 3])"
