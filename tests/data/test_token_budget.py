"""Micro-batches by a budget of tokens: none has more, each sample is in one, and windows do not ask how many ranks there are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.data.order import TokenBudget
from shardwise.errors import ConfigError


class Texts:
    """Samples of unequal length, whose tokens are the number of the sample."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.full((self.lengths[i],), i), "labels": torch.full((self.lengths[i],), i)}


def loader(lengths: list[int], rank: int = 0, size: int = 1, **options: Any) -> sw.Loader:
    world = SimpleNamespace(seed=3, device=torch.device("cpu"), axis=lambda name: SimpleNamespace(rank=rank, size=size))
    given = {"global_batch": 6, "micro_tokens": 12, "collate": sw.pad_collate(input_ids=0), **options}
    return sw.Loader(Texts(lengths), world, **given)


def numbers(window: list[sw.MicroBatch]) -> list[int]:
    """The samples of a rank's micro-batches, without paddings."""
    return [n for batch in window if not batch.padding for n in batch["labels"][:, 0].tolist()]


def merged(lengths: list[int], size: int, state: Any = None) -> list[list[int]]:
    """The samples of each window of an epoch, over all ranks; each checked for its size and number of micro-batches."""
    loaders = [loader(lengths, rank, size) for rank in range(size)]
    for each in loaders:
        if state is not None:
            each.load_state_dict(state)
    found = []
    for windows in zip(*loaders, strict=True):
        assert len({len(window) for window in windows}) == 1  # no rank waits for another's collective
        indices = [batch.index for window in windows for batch in window]
        assert len(set(indices)) == len(indices)
        assert all(batch["labels"].numel() <= 12 for window in windows for batch in window)
        found.append(sorted(n for window in windows for n in numbers(window)))
    return found


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(2, 4))
def test_windows_are_the_same_for_every_number_of_ranks_and_each_sample_is_there_once(lengths, size):
    alone = merged(lengths, 1)
    assert merged(lengths, size) == alone
    assert sorted(n for window in alone for n in window) == [*range(len(lengths))]
    assert [len(window) for window in alone[:-1]] == [6] * (len(alone) - 1)
    plain = loader(lengths, micro_tokens=None, micro_batch=1)
    assert [sorted(numbers(window)) for window in plain] == alone  # as without a budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 200))
def test_a_micro_batch_is_full_and_no_larger(lengths, most):
    parts = TokenBudget(most, Texts(lengths)).parts(np.arange(len(lengths)))
    sizes = np.array(lengths)
    assert sorted(i for part in parts for i in part) == [*range(len(lengths))]
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert len(part) * sizes[part].max() <= most
        if after is not None:
            assert (len(part) + 1) * sizes[part].max() > most and sizes[after].max() <= sizes[part].min()


@pytest.mark.parametrize("workers", [0, 1])
def test_it_resumes_in_the_middle_of_an_epoch_under_another_degree(workers):
    lengths = [1 + (7 * i) % 12 for i in range(33)]
    whole = merged(lengths, 1)
    began = [loader(lengths, rank, 2, num_workers=workers) for rank in range(2)]
    seen = []
    for windows in zip(*began, strict=True):
        seen.append(sorted(n for window in windows for n in numbers(window)))
        if len(seen) == 2:
            break
    state = began[0].state_dict()
    assert state == began[1].state_dict() and state["position"] == 12
    for size in (1, 3):
        assert seen + merged(lengths, size, state=state) == whole


def test_refused_in_a_loader():
    for options, told in (
        ({"micro_batch": 2}, "each of them says how much"),
        ({"micro_tokens": None}, "each of them says how much"),
        ({"micro_tokens": 11}, "samples of up to 12 positions"),
        ({"micro_tokens": 0}, "it counts positions"),
    ):
        with pytest.raises(ConfigError, match=told):
            loader([3, 12, 4], **options)
    with pytest.raises(ConfigError, match=r"dataset\.lengths"):
        sw.Loader([{"x": 1.0}] * 3, loader([3]).world, global_batch=2, micro_tokens=8)

    class Stream:
        def __iter__(self):
            yield {"x": 1.0}

    with pytest.raises(ConfigError, match="before one is read"):
        sw.Loader(Stream(), loader([3]).world, global_batch=2, micro_tokens=8)


RECORDS = ("--data.path=a.jsonl", "--data.tokenizer=here")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--data.micro_tokens=512", "--data.micro_batch=8", *RECORDS), "micro_tokens=512 with data.micro_batch=8"),
        (("--data.micro_tokens=512",), "no effect beyond that of micro_batch"),
        (("--data.micro_tokens=512", "--data.pack=true", *RECORDS), "use data.micro_batch=4"),
        (("--data.micro_tokens=100", *RECORDS), "micro_tokens=100 with data.seq_len=128"),
    ],
)
def test_refused_before_a_rank_starts(capsys, words, told):
    assert cli.main(["train", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
