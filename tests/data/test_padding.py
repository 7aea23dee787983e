"""Samples of unequal length in one micro-batch."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.data.labels import make_labels
from shardwise.errors import ConfigError

ROWS = [{"input_ids": torch.arange(1, n + 1)} for n in (2, 5, 3)]


def test_sequences_are_padded_to_the_longest_and_masked():
    batch = sw.pad_collate(input_ids=0)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0], [1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert make_labels(batch)["labels"].tolist() == [[2, -100, -100, -100], [2, 3, 4, 5], [2, 3, -100, -100]]


def test_a_token_that_equals_the_padding_is_still_learned():
    batch = make_labels(
        sw.pad_collate(input_ids=2)([{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([1, 2, 2, 3])}])
    )
    assert batch["labels"].tolist() == [[2, -100, -100], [2, 2, 3]]


def test_masks_are_there_where_nothing_is_padded():
    batch = sw.pad_collate(input_ids=0)(ROWS[:1] * 2)
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]


def test_lengths_are_rounded_up():
    batch = sw.pad_collate(input_ids=9, multiple_of=4)(ROWS)
    assert batch["input_ids"].shape == (3, 8) and batch["input_ids"][1].tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert batch["attention_mask"].sum(1).tolist() == [2, 5, 3]


def test_known_names_and_other_dims():
    rows = [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long), "attention_mask": torch.ones(n),
             "features": torch.ones(n, 2), "weight": 0.5} for n in (1, 3)]  # fmt: skip
    batch = sw.pad_collate(input_ids=0, features=-1.0)(rows)
    assert batch["labels"].tolist() == [[1, -100, -100], [1, 1, 1]] and batch["attention_mask"].tolist() == [
        [1, 0, 0],
        [1, 1, 1],
    ]
    assert batch["features"].shape == (2, 3, 2) and batch["features"][0, 1].tolist() == [-1, -1]
    assert batch["weight"].tolist() == [0.5, 0.5]


def test_it_can_be_sent_to_a_worker():
    made = pickle.loads(pickle.dumps(sw.pad_collate(input_ids=7, multiple_of=2)))
    assert made(ROWS)["input_ids"][0].tolist() == [1, 2, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sw.pad_collate()(ROWS), "sw.pad_collate(input_ids=0)"),
        (
            lambda: sw.pad_collate(x=0)([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 3)}]),
            "only the first dim is padded",
        ),
        (lambda: sw.pad_collate(multiple_of=0), "it counts tokens"),
        (lambda: sw.pad_collate(input_ids=0)([{"input_ids": [1]}, {"other": [1]}]), "the same keys"),
    ],
)
def test_what_cannot_be_padded_is_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


class Causal(nn.Module):
    """A running mean of embeddings, which no later token changes."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids).cumsum(1)
        return self.head(x / torch.arange(1, x.shape[1] + 1)[:, None])


def model() -> Causal:
    torch.manual_seed(0)
    return Causal().double()


def samples() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(3)
    return [
        {"input_ids": torch.randint(0, 16, (int(n),), generator=numbers)}
        for n in torch.randint(2, 12, (24,), generator=numbers)
    ]


def padded_step(layout: str):
    with sw.init(layout, device="cpu", seed=1) as world:
        module = sw.parallelize(model(), world)
        step = sw.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.1), max_grad_norm=1.0)
        loader = sw.Loader(
            samples(), world, global_batch=12, micro_batch=3, collate=sw.pad_collate(input_ids=0), shuffle=False
        )
        outs = [step(window) for window in loader]
        return [(out.loss, out.grad_norm, out.num_tokens) for out in outs], {
            k: v.clone() for k, v in sw.full_state_dict(module).items()
        }


@pytest.mark.parametrize(("layout", "num_ranks"), [("dp_shard=1", 1), ("dp_shard=2", 2), ("dp_replicate=2", 2)])
def test_training_is_that_of_each_sequence_by_itself(ranks, layout, num_ranks):
    plain, data = model(), samples()
    optim, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for window in (data[:12], data[12:]):
        tokens = sum(len(sample["input_ids"]) - 1 for sample in window)
        losses = [
            nn.functional.cross_entropy(plain(s["input_ids"][None, :-1])[0], s["input_ids"][1:], reduction="sum")
            for s in window
        ]
        (sum(losses) / tokens).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        wanted.append((float(sum(losses).detach() / tokens), float(norm), tokens))
    for outs, weights in ranks.run(padded_step, num_ranks, layout):
        for found, other in zip(outs, wanted, strict=True):
            assert found == pytest.approx(other, rel=1e-12)
        for name, value in weights.items():
            assert torch.allclose(value, plain.state_dict()[name], rtol=0, atol=1e-13), name
