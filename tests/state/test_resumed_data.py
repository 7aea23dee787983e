"""A resumed run sees every sample once and as it would have: with readers ahead of training, and datasets that keep a state."""

import queue
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw


class Plain:
    """Samples by number; remembers which were read."""

    def __init__(self, num: int = 24):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        return {"x": torch.full((3,), i / 24), "number": torch.tensor(i)}


class Counting(Plain):
    """A curriculum: what it gives depends on how often it was asked, on all ranks."""

    def __init__(self):
        super().__init__()
        self.level = 0.0

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]

    def __getitem__(self, i):
        self.level += 1
        return {**super().__getitem__(i), "level": torch.tensor(self.level)}


class Draws(Plain):
    """Augmentation from generators of its own, one of them inside a transform."""

    def __init__(self):
        super().__init__()
        self.rng, self.transforms = torch.Generator().manual_seed(3), [Noise()]

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        sample["x"] = self.transforms[0](sample["x"] + torch.rand(3, generator=self.rng))
        return sample


class Noise:
    def __init__(self):
        self.numbers, self.python = np.random.default_rng(4), random.Random(5)

    def __call__(self, x):
        return x + float(self.numbers.normal()) + self.python.random()


class Ahead:
    """A thread that reads ahead of training, as torch-style prefetchers do."""

    def __init__(self, loader, depth=4):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        full: queue.Queue = queue.Queue(self.depth)
        threading.Thread(target=self._read, args=(full,), daemon=True).start()
        while (window := full.get()) is not None:
            yield self.given(window)

    def _read(self, full):
        for window in self.loader:
            full.put(window)
        full.put(None)

    def given(self, window):
        return window


class Delegates(Ahead):
    """Says where the Loader is, which is ahead of what it has given."""

    def state_dict(self):
        return {"inner": self.loader.state_dict()}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state["inner"])


class Careful(Ahead):
    """Says where the Loader was at the last window that it gave."""

    state = None

    def _read(self, full):
        for window in self.loader:
            full.put((window, self.loader.state_dict()))
        full.put(None)

    def given(self, window):
        window, self.state = window
        return window

    def state_dict(self):
        return self.state or self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class AsDicts(Ahead):
    """Puts tensors elsewhere, and loses what a micro-batch knows of itself."""

    def given(self, window):
        return [dict(batch) for batch in window]


def summed(output, batch):
    return ((output.squeeze(-1) - batch["x"].sum(-1)) ** 2).sum()


def script(layout, root, dataset, until, wrap=None, given=None, override=(), num_workers=0):
    """Trains to step ``until`` and saves; numbers of the samples, what was seen of them, what was said."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(lambda: nn.Linear(3, 1), world)
        step = sw.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.01), loss=summed, count=lambda b: len(b["x"]),
            forward=lambda model, batch: model(batch["x"]),
        )  # fmt: skip
        loader = sw.Loader(dataset(), world, global_batch=4, micro_batch=2, num_workers=num_workers)
        reader = loader if wrap is None else wrap(loader)
        seen = []
        with warnings.catch_warnings(record=True) as caught, sw.CheckpointManager(root, step, async_save=False) as ckpt:
            warnings.simplefilter("always")
            ckpt.resume(reader if given == "reader" else loader, override=override)
            for window in reader:
                out = step(window)
                mine = [
                    (
                        batch["number"].tolist(),
                        batch["x"].sum().item(),
                        batch["level"].tolist() if "level" in batch else None,
                    )
                    for batch in window
                ]
                seen.append((sorted(n for part in world.gather(mine) for ns, *_ in part for n in ns), mine, out.loss))
                if out.step == until:
                    ckpt.save()
                    ckpt.save() if wrap is AsDicts else None
                    break
        said = [str(w.message) for w in caught if "random streams outside" not in str(w.message)]
        return seen, said


def in_pieces(layout, root, *args):
    return [script(layout, root, *args[:1], until, *args[1:]) for until in (2, 5, 6)]


READERS = [(None, None), (Ahead, None), (Delegates, None), (Delegates, "reader"), (Careful, "reader")]


def exact(layout, root, datasets, readers):
    wrong = []
    for dataset in datasets:
        whole = script(layout, root / "whole" / dataset.__name__, dataset, 6)[0]
        for n, (wrap, given) in enumerate(readers):
            pieces = in_pieces(layout, root / f"{dataset.__name__}{n}", dataset, wrap, given)
            if [seen for piece, _ in pieces for seen in piece] != whole or any(said for _, said in pieces):
                wrong.append((dataset.__name__, n, [said for _, said in pieces]))
    return wrong


@pytest.mark.quick("dp_replicate=2")
@pytest.mark.parametrize(
    ("layout", "num", "datasets", "readers"),
    [
        ("dp_shard=1", 1, (Plain, Counting, Draws), READERS),
        ("dp_replicate=2", 2, (Counting, Draws), READERS[2:4]),
        pytest.param("dp_replicate=2", 2, (Plain, Counting, Draws), READERS, marks=pytest.mark.soak),
    ],
    ids=["dp_shard=1", "dp_replicate=2", "dp_replicate=2-all"],
)
def test_readers_ahead_and_datasets_with_a_state_are_resumed_exactly(ranks, tmp_path, layout, num, datasets, readers):
    assert ranks.run(exact, num, layout, tmp_path, datasets, readers) == [[]] * num


def with_workers(layout, root):
    """Runs whose data other numbers of workers read, in pieces, against one in one piece."""
    wrong = []
    for dataset, first in ((Plain, 0), (Draws, 0)):
        whole = script(layout, root / "all" / dataset.__name__, dataset, 6, num_workers=first)[0]
        folder = root / dataset.__name__
        pieces = [
            script(layout, folder, dataset, until, wrap, num_workers=num)
            for until, num, wrap in ((2, 2, None), (4, 1, Ahead), (6, first, None))
        ]
        if [seen for piece, _ in pieces for seen in piece] != whole or any(said for _, said in pieces):
            wrong.append((dataset.__name__, [said for _, said in pieces]))
    return wrong


@pytest.mark.quick("dp_replicate=2-2")
@pytest.mark.parametrize(("layout", "num"), [("dp_shard=1", 1), ("dp_replicate=2", 2)])
def test_what_workers_have_read_ahead_is_read_again_where_it_was_not_trained(ranks, tmp_path, layout, num):
    assert ranks.run(with_workers, num, layout, tmp_path) == [[]] * num


def lost(root):
    _, said = script("dp_shard=1", root, Plain, 2, AsDicts)
    return said, script("dp_shard=1", root, Plain, 6)[0][0][0]


def test_windows_read_ahead_that_do_not_say_where_they_are_from_are_told_at_the_save(ranks, tmp_path):
    ((said, _),) = ranks.run(lost, 1, tmp_path)
    assert len(said) == 1 and "windows were read from the Loader and not trained" in said[0]


def no_state(root):
    try:
        script("dp_shard=1", root, Plain, 2, Ahead, "reader")
    except sw.ConfigError as error:
        return str(error)


def test_a_reader_without_a_state_is_refused(ranks, tmp_path):
    assert "resume(Ahead)" in ranks.run(no_state, 1, tmp_path)[0]


def extra_windows(root):
    """A loop that is left with a window in its hand, and one that saves before it trains."""
    found = []
    for early in (False, True):
        numbers = []
        for until in (2, 4, 6):
            with sw.init("dp_shard=1", device="cpu") as world:
                model = sw.parallelize(lambda: nn.Linear(3, 1), world)
                optim = torch.optim.SGD(model.parameters(), lr=0.01)
                step = sw.TrainStep(
                    model, optim, loss=summed, count=lambda b: len(b["x"]), forward=lambda m, b: m(b["x"])
                )  # fmt: skip
                with sw.CheckpointManager(root / str(early), step, async_save=False, keep=None) as ckpt:
                    for window in ckpt.resume(sw.Loader(Draws(), world, global_batch=4, micro_batch=2)):
                        if step.num_steps == until:
                            break
                        if early:
                            ckpt.save()
                        step(window)
                        numbers.append(sorted(n for b in window for n in b["number"].tolist()))
                    if not early:
                        ckpt.save()
        found.append(numbers)
    return found


def test_a_window_that_was_read_and_not_trained_is_not_lost(ranks, tmp_path):
    ((late, early),) = ranks.run(extra_windows, 1, tmp_path)
    assert len(late) == 6 and sorted(n for ns in late for n in ns) == list(range(24))
    assert early[:2] == late[:2] and early[2] == early[1]  # the last save was before the second window


def elsewhere(layout, root, dataset, override=()):
    try:
        return script(layout, root, dataset, 6, override=override)
    except sw.ConfigError as error:
        return error.given, error.fix


class Shared(Counting):
    """The same on every rank, whatever it reads."""

    def __getitem__(self, i):
        return {**Plain.__getitem__(self, i), "level": torch.tensor(self.level)}

    def state_dict(self):
        return {"level": self.level + 7}


class PenaltyGradients(Counting):
    def state_dict(self):
        return {"level": self.level, "mine": torch.distributed.get_rank()}


class DrawsApart(Draws):
    def __init__(self):
        super().__init__()
        self.rng.manual_seed(torch.distributed.get_rank())


def test_another_number_of_ranks_takes_what_ranks_share_and_says_what_it_cannot(ranks, tmp_path):
    for dataset in (Shared, DrawsApart, PenaltyGradients):
        ranks.run(script, 2, "dp_shard=2", tmp_path / dataset.__name__, dataset, 2)
    ((seen, said),) = ranks.run(elsewhere, 1, "dp_shard=1", tmp_path / "Shared", Shared)
    assert seen[0][1][0][2] == [7.0, 7.0] and said == []
    ((seen, said),) = ranks.run(elsewhere, 1, "dp_shard=1", tmp_path / "DrawsApart", DrawsApart)
    assert len(seen) == 4 and len(said) == 1
    assert said[0].startswith(
        "dataset.rng: random numbers start from their seed, since the checkpoint has those of 2 ranks"
    )
    ((given, fix),) = ranks.run(elsewhere, 1, "dp_shard=1", tmp_path / "PenaltyGradients", PenaltyGradients)
    assert given == "the state of dataset of 2 ranks, on 1" and "override=('dataset',)" in fix
    ((seen, said),) = ranks.run(
        elsewhere, 1, "dp_shard=1", tmp_path / "PenaltyGradients", PenaltyGradients, ("dataset",)
    )
    assert len(seen) == 4
