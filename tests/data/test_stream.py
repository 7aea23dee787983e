"""Datasets that are read by iterating: the samples of one process under any number of ranks, none twice or missed."""

import copy
import itertools

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shardwise as sw
from shardwise.data.loader import Loader
from shardwise.data.stream import first_of
from shardwise.errors import ConfigError, RankError, UsageError
from shardwise.state.checkpoint import CheckpointManager


class Numbers:
    """``count`` samples a pass; counts what is read. Without a state: it begins anew each time."""

    def __init__(self, count: int = 22):
        self.count, self.epoch, self.num_read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.count):
            self.num_read += 1
            yield {"x": torch.tensor(1000.0 * self.epoch + number)}


class Going(Numbers):
    """Goes on from a state, as torchdata and Hugging Face have it: the number of samples given in this pass."""

    def __init__(self, count: int = 22):
        super().__init__(count)
        self.given = 0

    def __iter__(self):
        while self.given < self.count:
            self.given += 1
            self.num_read += 1
            yield {"x": torch.tensor(1000.0 * self.epoch + self.given - 1)}

    def state_dict(self):
        return {"given": self.given, "parts": [self.given, {"deep": torch.tensor(self.given)}]}

    def load_state_dict(self, state):
        assert int(state["parts"][1]["deep"]) == state["given"]
        self.given = state["given"]


class Torchs(IterableDataset):
    """torch's class, which has an ``[i]`` that raises."""

    def __iter__(self):
        return (torch.tensor(float(i)) for i in range(22))


class Epochs:
    """Shuffles by the epoch, which is in its state."""

    def __init__(self):
        self.epoch = self.given = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        self.epoch, self.given = state["epoch"], state["given"]

    def __iter__(self):
        order = torch.randperm(22, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.given < 22:
            self.given += 1
            yield torch.tensor(float(order[self.given - 1]))
        self.given = 0


class Stays(Epochs):
    """At its end when it has ended."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 22 - self.given)


class Drawn(Epochs):
    """Draws an order for each pass from a generator that goes on, which is in its state. It is told no epoch."""

    set_epoch = None

    def __init__(self):
        self.generator, self.order, self.given = torch.Generator().manual_seed(3), None, 0

    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": self.order, "given": self.given}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order, self.given = state["order"], state["given"]

    def __iter__(self):
        self.order = self.order or torch.randperm(22, generator=self.generator).tolist()
        while self.given < 22:
            self.given += 1
            yield torch.tensor(float(self.order[self.given - 1]))
        self.order, self.given = None, 0


class Asked(Drawn):
    """As torchdata's nodes: asked for its state before it was iterated, it makes an iterator that the next iter() gives, whatever is
    loaded in between; what is loaded holds from the next one on."""

    _iter_for_state_dict, _loaded = False, None
    is_begun = False

    def state_dict(self):
        self._iter_for_state_dict, self.is_begun = not self.is_begun, True
        return super().state_dict()

    def load_state_dict(self, state):
        self._loaded = state

    def __iter__(self):
        was_asked, self._iter_for_state_dict, self.is_begun = self._iter_for_state_dict, False, True
        if self._loaded is not None and not was_asked:
            super().load_state_dict(self._loaded)
            self._loaded = None
        return super().__iter__()


class Axis:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


class World:
    seed, device = 0, torch.device("cpu")

    def __init__(self, rank=0, size=1):
        self._axis = Axis(rank, size)

    def axis(self, name):
        return self._axis


def loader_on(dataset, rank=0, size=1, global_batch=8, micro_batch=2, **options) -> Loader:
    return Loader(dataset, World(rank, size), global_batch=global_batch, micro_batch=micro_batch, **options)


def seen(window) -> list[float]:
    return [x for batch in window if not batch.padding for x in next(iter(batch.values())).tolist()]


def rows(loader, count=None) -> list[list[float]]:
    found = []
    for window in loader:
        found.append(seen(window))
        if count is not None and len(found) == count:
            break
    return found


DATASETS = [Numbers, Going]


@pytest.mark.parametrize("make", [*DATASETS, Torchs])
def test_windows_are_the_samples_in_their_order(make):
    loader = loader_on(make())
    assert rows(loader) == [list(range(8)), list(range(8, 16)), list(range(16, 22))]
    assert loader.epoch == 1 and [len(row) for row in rows(loader)] == [8, 8, 6]


@pytest.mark.parametrize("make", DATASETS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_each_window(make, size):
    loaders = [iter(loader_on(make(), rank, size)) for rank in range(size)]
    for start in (0, 8, 16):
        windows = [next(loader) for loader in loaders]
        assert len({len(window) for window in windows}) == 1
        indices = sorted(batch.index for window in windows for batch in window)
        assert indices == list(range(len(indices)))
        assert sorted(x for window in windows for x in seen(window)) == list(range(start, min(start + 8, 22)))


@pytest.mark.parametrize("make", DATASETS)
def test_each_epoch_is_told_and_read_from_the_start(make):
    loader = loader_on(make())
    first, second = rows(loader), rows(loader)
    assert second == [[1000 + x for x in row] for row in first]


@pytest.mark.parametrize("make", DATASETS)
def test_a_loop_that_was_left_goes_on_without_reading_again(make):
    dataset = make()
    loader = loader_on(dataset)
    assert rows(loader, 1) == [list(range(8))]
    assert rows(loader) == [list(range(8, 16)), list(range(16, 22))]
    assert dataset.num_read == 22


@pytest.mark.parametrize("make", DATASETS)
@pytest.mark.parametrize("trained", range(4))
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("count", [22, 24])  # the last window is smaller; or not, and its end is to be noticed
def test_a_position_is_resumed_under_any_degree_and_batch(make, trained, epochs, count):
    first = loader_on(make(count), 1, 2)
    for _ in range(epochs):
        rows(first)
    if trained:
        rows(first, trained)  # the loop is left within the last window too
    state = copy.deepcopy(first.state_dict())
    dataset = make(count)
    others = [
        loader_on(dataset if not rank else make(count), rank, 4, global_batch=4, micro_batch=1) for rank in range(4)
    ]
    for other in others:
        other.load_state_dict(state)
    rest = [sorted(x for row in rows for x in row) for rows in zip(*(rows(other) for other in others), strict=True)]
    want = [1000.0 * epochs + x for x in range(min(8 * trained, count), count)]
    assert [x for row in rest for x in row] == (want or [1000.0 * (epochs + 1) + x for x in range(count)])
    assert dataset.num_read == (len(want) or count if make is Going else count)  # a state saves reading again
    following = (
        epochs + 1 if want else epochs + 2
    )  # a position at the end is one before the next epoch, which was read above
    assert seen(next(iter(others[0])))[0] == 1000.0 * following


def _plain(make, epochs) -> list[float]:
    dataset, found = make(), []
    for epoch in range(epochs):
        if dataset.set_epoch:
            dataset.set_epoch(epoch)
        found.append([float(x) for x in dataset])
    return found


@pytest.mark.parametrize("global_batch", [8, 11])  # the last window is smaller; or not
@pytest.mark.parametrize("make", [Epochs, Stays, Drawn, Asked])
def test_each_epoch_has_the_order_that_the_dataset_gives_it_also_in_a_run_that_resumes(make, global_batch):
    dataset = make()
    if make is not Stays:
        dataset.load_state_dict = lambda state: pytest.fail("from epoch to epoch it goes on by itself")
    loader = loader_on(dataset, global_batch=global_batch, micro_batch=1)
    found, states = [], []
    for _ in range(3):
        found.append([])
        for window in loader:
            found[-1] += seen(window)
            loader.mark_used(window[0].window)
            states += [
                (sum(map(len, found)), copy.deepcopy(state))
                for state in (loader.used_state_dict(1)[0], loader.state_dict())
            ]
        states.append((sum(map(len, found)), copy.deepcopy(loader.state_dict())))
    assert found == _plain(Epochs if make is Stays else make, 3) and found[0] != found[1] != found[2]
    whole = [x for epoch in found for x in epoch]
    for num_read, state in states:
        other = loader_on(make(), global_batch=global_batch, micro_batch=1)
        other.load_state_dict(state)
        rest = []
        while len(rest) < len(whole) - num_read:
            rest += [x for row in rows(other) for x in row]
        assert rest == whole[num_read:], (num_read, state)


def test_another_loader_of_the_stream_in_between_changes_no_epoch():
    dataset = Epochs()
    loader, other = loader_on(dataset), loader_on(dataset)
    first = rows(loader)
    rows(other, 1)
    assert [first, rows(loader)] == [[r[:8], r[8:16], r[16:]] for r in _plain(Epochs, 2)]


def test_a_position_can_be_taken_back_in_the_same_process():
    for make in DATASETS:
        loader = loader_on(make())
        rows(loader, 1)
        state = copy.deepcopy(loader.state_dict())
        assert rows(loader) == [list(range(8, 16)), list(range(16, 22))]
        loader.load_state_dict(state)
        assert rows(loader) == [list(range(8, 16)), list(range(16, 22))]


def test_what_was_read_ahead_is_not_counted_as_trained():
    for make in DATASETS:
        loader = loader_on(make())
        windows = iter(loader)
        first = next(windows)
        next(windows), next(windows)
        assert loader.used_state_dict(0)[0]["position"] == 0
        loader.mark_used(first[0].window)
        state, lost = loader.used_state_dict(1)
        other = loader_on(make())
        other.load_state_dict(copy.deepcopy(state))
        assert (state["position"], lost) == (8, 0) and rows(other)[0] == list(range(8, 16))


class Breaks(Numbers):
    """Its connection breaks once, within the second window."""

    broken = False

    def __iter__(self):
        for number, sample in enumerate(super().__iter__()):
            if number == 11 and not self.broken:
                self.broken = True
                raise OSError("reset by peer")
            yield sample


@pytest.mark.parametrize("loads", [False, True])
def test_a_stream_that_raised_goes_on_where_it_was(loads):
    loader = loader_on(Breaks())
    found = []
    with pytest.raises(OSError, match="reset by peer"):
        for window in loader:
            found.append(seen(window))
    if loads:
        loader.load_state_dict(loader.state_dict())
    assert found + rows(loader) == [list(range(8)), list(range(8, 16)), list(range(16, 22))]


def test_the_first_samples_can_be_looked_at():
    dataset = Going()
    assert [int(sample["x"]) for sample in first_of(dataset, 2)] == [0, 1]
    assert rows(loader_on(dataset), 1) == [list(range(8))]


def _shuffled():
    data = datasets.Dataset.from_dict({"x": [float(i) for i in range(40)]}).to_iterable_dataset(num_shards=2)
    return data.shuffle(seed=3, buffer_size=12)


def _mixed():
    return datasets.interleave_datasets([_shuffled(), _shuffled()])


@pytest.mark.parametrize("make", [_shuffled, _mixed])
def test_a_shuffle_buffer_loses_nothing(make):
    """Its state has not the samples in the buffer: the stream is read again, and what came before is left out."""
    whole = rows(loader_on(make()))
    assert sorted(x for row in whole for x in row)[:: 2 if make is _mixed else 1] == list(range(40))
    first = loader_on(make())
    assert rows(first, 2) == whole[:2]
    again = loader_on(make())
    again.load_state_dict(first.state_dict())
    assert rows(again) == whole[2:]


def test_a_data_loader_that_gives_samples_is_a_stream():
    """As torchdata's StatefulDataLoader(..., batch_size=None), with workers of its own."""
    found = rows(loader_on(torch.utils.data.DataLoader(Torchs(), batch_size=None)))
    assert found == [list(range(8)), list(range(8, 16)), list(range(16, 22))]
    with pytest.raises(UsageError, match="a DataLoader where a dataset goes"):
        loader_on(torch.utils.data.DataLoader(Torchs(), batch_size=2))


def test_another_stream_than_that_of_the_position_is_told():
    state = loader_on(Numbers())
    rows(state, 2)
    other = loader_on(Numbers(5))
    other.load_state_dict(state.state_dict())
    with pytest.raises(UsageError, match="a stream of 5 samples, for a position after 16"):
        rows(other)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: loader_on(iter([1, 2])), UsageError, "which can be read once only"),
        (lambda: loader_on(map(float, [1, 2])), UsageError, "which can be read once only"),
        (lambda: loader_on(Numbers(), shuffle=True), ConfigError, "it is read in its own order"),
        (lambda: loader_on(Numbers(), num_workers=2), ConfigError, "each worker has a copy of it"),
        (lambda: rows(loader_on(Numbers(0))), ConfigError, "an empty dataset"),
        (lambda: len(loader_on(Numbers())), TypeError, "is seen when an epoch has ended"),
    ],
)
def test_what_cannot_be_is_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_a_list_of_windows_can_be_made():
    assert len(list(loader_on(Numbers()))) == 3  # list() asks for the length first


# ---- trained on ranks ----------------------------------------------------------------------------------------------------


class Tokens:
    """Texts of a stream, as [T] of tokens; with a part of its own for each rank if ``splits``."""

    def __init__(self, splits: int | None = None, has_state: bool = False):
        self.splits, self.next = splits, 0
        if has_state:
            self.state_dict, self.load_state_dict = self._state, self._load

    def _state(self):
        return {"next": self.next}

    def _load(self, state):
        self.next = state["next"]

    def __iter__(self):
        if not hasattr(self, "state_dict"):
            self.next = 0
        while self.next < 40:
            number, self.next = self.next, self.next + 1
            if self.splits is None or number % 2 == self.splits:
                yield torch.randint(0, 16, (7,), generator=torch.Generator().manual_seed(number))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()


def trained(layout: str, folder: str | None = None, stop: int | None = None, has_state: bool = False, epochs: int = 2):
    """Losses of the steps on this rank; stopped after ``stop`` of them, with a checkpoint in ``folder``."""
    with sw.init(layout, device="cpu", seed=1) as world:
        model = sw.parallelize(small(), world)
        step = sw.TrainStep(model, torch.optim.Adam(model.parameters(), lr=0.05), max_grad_norm=1.0)
        loader = sw.Loader(Tokens(has_state=has_state), world, global_batch=12, micro_batch=3)
        losses: list[float] = []
        with CheckpointManager(folder, step, keep=1) if folder else sw_null() as checkpoints:
            if checkpoints is not None:
                checkpoints.resume(loader)
            while loader.epoch < epochs:
                for window in loader:
                    losses.append(step(window).loss)
                    if checkpoints is not None:
                        checkpoints.save()
                    if stop is not None and len(losses) == stop:
                        return losses
        return losses


def sw_null():
    import contextlib

    return contextlib.nullcontext()


def test_losses_are_those_of_one_process(ranks):
    want = ranks.run(trained, 1, "dp_shard=1")[0]
    assert len(want) == 8  # 40 samples are three windows and a smaller one
    for layout, size in (("dp_shard=2", 2), ("dp_replicate=2", 2), ("dp_shard=2,tp=2", 4)):
        for found in ranks.run(trained, size, layout):
            assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.combinations("values")
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_run_that_stopped_goes_on_at_another_degree(ranks, tmp_path, stop, has_state):
    """In the first epoch, at its end, in the second."""
    want = ranks.run(trained, 1, "dp_shard=1")[0]
    first = ranks.run(trained, 2, "dp_shard=2", str(tmp_path), stop, has_state, timeout_s=20)[0]
    second = ranks.run(trained, 1, "dp_shard=1", str(tmp_path), None, has_state, timeout_s=20)[0]
    assert first + second == pytest.approx(want, rel=1e-12)


def split():
    with sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(small(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for window in sw.Loader(Tokens(splits=world.rank), world, global_batch=4, micro_batch=1):
                step(window)
        except RankError as error:
            return str(error)
    return None


def test_a_stream_that_splits_itself_over_ranks_is_told(ranks):
    for text in ranks.run(split, 2):
        assert "has read other samples of its stream than rank" in text and "no part for each rank" in text
