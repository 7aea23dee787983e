"""The proof on rows runs the backward: gradients that are wrong where all values are right."""

import pytest
import torch
import torch.nn.functional as F
from techniques.cp.sequences import VOCAB, WIDTH, Block, batch
from torch import nn

from shardwise.model.row_facts import Differs
from shardwise.model.row_gradients import BackwardDiffers
from shardwise.techniques.row_search import Search
from shardwise.techniques.sequences import sequences_in


def mean_of(x):
    """0, with the gradient of a mean over positions."""
    mean = x.mean(1, keepdim=True)
    return mean - mean.detach()


class Unit(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class Odd(Block):
    """A block with one thing of its own."""

    def __init__(self, how, number):
        super().__init__("", "")
        self.how, self.number, self.relu = how, number, nn.ReLU()
        self.gain, self.aux = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, WIDTH)
        self.unit = Unit()
        if how == "a buffer of one block":
            self.register_buffer("share", torch.tensor(float(number == 7)))

    def forward(self, x, mask=None):
        h = x * self.gain
        if self.how == "last 32" and x.shape[1] > 32:
            h = torch.cat([h[:, :-32].detach(), h[:, -32:]], 1)
        if self.how == "behind an infinite one":
            h = h + torch.sqrt(self.relu(h)) + mean_of(h)
        if self.how == "behind a huge one":  # of rows of zeros
            h = h + self.unit(h * (h[..., :1] > 0)) + mean_of(h)
        if self.how == "huge":
            h = h + self.unit(h * (h[..., :1] > 0))
        if self.how == "infinite":
            h = h + torch.sqrt(self.relu(h))
        if self.how == "of a detached layer":
            h = h + mean_of(F.linear(x.detach(), self.aux.weight, self.aux.bias))
        if self.how == "a buffer of one block":
            h = h + self.share * mean_of(h)
        if self.how == "a number of one block":
            h = h + float(self.number == 7) * mean_of(h)
        if self.how == "in bfloat16":
            h = (x.bfloat16() * self.gain.to(torch.bfloat16)).to(x.dtype)
        if self.how == "detached in place":
            z = self.norm2(x)
            z.detach_()
            h = h + z
        if self.how == "written by its caller":
            h = self.aux(h)
            h.add_(1.3)
        return super().forward(x + h, mask)


class Words(nn.Module):
    def __init__(self, how, num_blocks=2):
        super().__init__()
        self.how, self.inputs = how, nn.Linear(4, WIDTH)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Odd(how, i) for i in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.places = nn.Parameter(torch.randn(WIDTH))

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places
        for i, block in enumerate(self.blocks):
            if self.how == "that ends at a length" and i and x.shape[1] <= 12:
                x = x.detach()
            x = block(x)
        return self.head(F.layer_norm(x, (WIDTH,)))


class Features(nn.Module):
    """Has no parameter but those of its layers."""

    def __init__(self):
        super().__init__()
        self.into, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = F.layer_norm(block(x + mean_of(x)), (WIDTH,))
        return x


def proof_of(model, num=24, **inputs):
    inputs = inputs or {"input_ids": batch(1, num)["input_ids"]}
    return Search(model, next(sequences_in(((), inputs))), 2, "zigzag").run()


@pytest.mark.parametrize(
    ("how", "num"),
    [
        ("behind a huge one", 24),
        ("behind an infinite one", 24),
        ("of a detached layer", 24),
        ("last 32", 300),
        ("that ends at a length", 24),
    ],
)
def test_a_gradient_of_other_positions_is_seen(how, num):
    with pytest.raises(BackwardDiffers):
        proof_of(Words(how), num)


@pytest.mark.parametrize("how", ["a buffer of one block", "a number of one block"])
def test_blocks_that_hide_gradients_are_all_run(how):
    with pytest.raises(BackwardDiffers, match=r"blocks\.7"):
        proof_of(Words(how, 12))


def test_layers_without_weights_have_gradients():
    model = Features()
    with pytest.raises(Differs):
        proof_of(model, x=torch.randn(2, 24, 4))


@pytest.mark.parametrize(
    "how", ["in bfloat16", "detached in place", "written by its caller", "last 32", "huge", "infinite"]
)
def test_what_is_right_is_not_refused(how):
    """Rounding is not compared; copies take the place of tensors that code looks at."""
    assert proof_of(Words(how)).output == "rows"
