"""Models whose code around the blocks adds to what they return: ``x + block(x)``. The module that runs the blocks is on rows too."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw

WIDTH = 16


class Attention(nn.Module):
    asks_for_length = False

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        is_causal = not self.asks_for_length or x.shape[1] > 1
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))


def feed_forward():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Layers(nn.Module):
    """Lists in a list, in a module of their own."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), feed_forward()]) for _ in range(depth))

    def forward(self, x):
        for attention, feed in self.layers:
            x = attention(x) + x
            x = feed(x) + x
        return x


class Words(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(32, WIDTH), nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 32)
        self.make(depth)

    def make(self, depth):
        self.body = Layers(depth)

    def forward(self, input_ids):
        x = self.table(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        return self.head(self.run(x))

    def run(self, x):
        return self.body(x)


class InRoot(Words):
    """The root runs its lists itself, makes positions, and keeps what it normed."""

    def make(self, depth):
        self.attention = nn.ModuleList(Attention() for _ in range(depth))
        self.feed = nn.ModuleList(feed_forward() for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))

    def run(self, x):
        for attention, feed, norm in zip(self.attention, self.feed, self.norms, strict=True):
            h = norm(x)
            x = x + self.between(attention(h))
            x = x + feed(x) * h.tanh()
        return x

    def between(self, x):
        return x


class Joined(Words):
    """What follows mixes positions."""

    def run(self, x):
        x = self.body(x)
        return x + x.mean(1, keepdim=True)


class Placed(Layers):
    """Makes positions at its entry."""

    def forward(self, x):
        return super().forward(x + torch.arange(x.shape[1], device=x.device)[:, None].to(x).cos())


class Pair(nn.Module):
    """Runs two that run blocks, and adds to what they return."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.second = Placed(depth), Layers(depth)

    def forward(self, x):
        return x + self.second(self.first(x))


class Stages(Words):
    """Modules in a row, each of which runs its own blocks."""

    def make(self, depth):
        self.lower, self.middle, self.upper = Placed(depth), Pair(1), Placed(depth)

    def run(self, x):
        return self.upper(self.middle(self.lower(x)).tanh())


class Pooled(Stages):
    """What is between them mixes positions: the stream is joined there."""

    def run(self, x):
        x = self.lower(x)
        return self.upper(self.middle(x + x.mean(1, keepdim=True)))


class Shifted(InRoot):
    def between(self, x):
        return torch.cat([x[:, :1], x[:, :-1]], 1)


class Scaled(InRoot):
    """By the number of positions so far."""

    def between(self, x):
        return x / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def windows(num_steps=2, micro=3):
    generator = torch.Generator().manual_seed(4)
    steps = []
    for _ in range(num_steps):
        window = []
        for i in range(micro):
            ids = torch.randint(32, (2, 17 - i), generator=generator)
            labels = ids.roll(-1, 1)
            labels[:, -1 - i :] = -100
            window.append({"input_ids": ids, "labels": labels})
        steps.append(window)
    return steps


def loss_of(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


SP = {"tensor_parallel": sw.TensorParallel(sequence_parallel=True)}


@pytest.mark.quick("lists-remat", "root", "stages")
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        pytest.param(Words, "cp=2", {}, id="lists"),
        pytest.param(Words, "dp_shard=2,cp=2", {"remat": "full"}, id="lists-remat"),
        pytest.param(InRoot, "cp=2", {}, id="root"),
        pytest.param(InRoot, "cp=2", {"remat": "full"}, id="root-remat"),
        pytest.param(Joined, "cp=2", {}, id="joined"),
        pytest.param(Stages, "cp=2", {}, id="stages"),
        pytest.param(Stages, "dp_shard=2,cp=2", {"remat": "full"}, id="stages-remat"),
        pytest.param(Pooled, "cp=2", {}, id="stages-pooled"),
        pytest.param(Words, "cp=2,tp=2", SP, id="lists-sequence"),
        pytest.param(Words, "cp=2", {"compile": "blocks"}, id="lists-compile", marks=pytest.mark.soak),
        pytest.param(functools.partial(Words, 6), "cp=2", {}, id="many", marks=pytest.mark.soak),
    ],
)
def test_what_blocks_return_is_added_to_around_them(ranks, model, layout, options):
    steps = windows(1, 1) if "compile" in options else windows()
    report = sw.verify(model, layout, batches=steps, loss=loss_of, run=ranks.run, max_grad_norm=0.3, **options)
    assert report.engine == "fsdp2"


@pytest.mark.parametrize("model", [Shifted, Scaled])
def test_code_around_blocks_that_is_not_of_each_position_is_refused(ranks, model):
    with pytest.raises(
        sw.ShardwiseError,
        match=r"(?s)its code around the blocks .* what it gives to \w+\.\d is not what these positions have",
    ):
        sw.verify(model, "cp=2", batches=windows(), loss=loss_of, run=ranks.run)


class FixedMask(Attention):
    """A block with a mask of one length: it is not on rows, and runs none itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(17, 17))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class OfOneLength(Words):
    def make(self, depth):
        self.body = nn.Sequential(*(FixedMask() for _ in range(depth)))


def test_a_block_is_not_taken_for_what_runs_blocks(ranks):
    with pytest.raises(sw.ShardwiseError) as caught:
        sw.verify(OfOneLength, "cp=2", batches=windows(micro=1), loss=loss_of, run=ranks.run)
    assert "its code around the blocks works" not in str(caught.value)
    assert "what it computes for a position depends on other positions" in str(caught.value)


def described():
    with sw.init("cp=2", device="cpu", timeout_s=30) as world:
        model = sw.parallelize(Words(6), world, example=windows()[0][0])
        return sw.describe(model)


def test_blocks_are_counted_and_not_what_runs_them(ranks):
    text = ranks.run(described, 2)[0]
    assert "context parallelism: 12 blocks work on 1/2 of the positions" in text
    assert "attention sends" in text


def by_length(length):
    with sw.init("cp=2", device="cpu", timeout_s=30) as world:
        model = Words()
        for layer in model.body.layers:
            layer[0].asks_for_length = True
        model = sw.parallelize(model, world, example=windows()[0][0])
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of)
        ids = torch.arange(length)[None]
        return step([{"input_ids": ids, "labels": ids.roll(-1, 1)}]).num_tokens


def test_attention_that_is_causal_by_the_length_is_refused_where_a_rank_has_one_position(ranks):
    """0.5 % of a loss, and 0.1 of a gradient."""
    assert ranks.run(by_length, 2, 5) == [5, 5] and ranks.run(by_length, 2, 1) == [1, 1]
    with pytest.raises(sw.RankError, match="attention that is not causal on 1 of 3 positions"):
        ranks.run(by_length, 2, 3)


def called_in_place():
    """Gradients of a loop of the user's own that calls the model, which runs its blocks itself, with its tokens in place."""
    with sw.init("cp=2", device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        model = InRoot().double()
        plain = InRoot().double()
        plain.load_state_dict(model.state_dict())
        batch = windows()[0][0]
        model = sw.parallelize(model, world, example={"input_ids": batch["input_ids"]})
        with sw.window(model, [batch]) as w:
            for b in w:
                labels = sw.cut_sequence(model, b["labels"])
                (loss_of(model(b["input_ids"]), {"labels": labels}) / w.num_tokens).backward()
        (loss_of(plain(batch["input_ids"]), batch) / w.num_tokens).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return max(float((sw.full_tensor(p.grad) - q.grad).abs().max()) for p, q in pairs)


def test_a_model_that_runs_its_blocks_is_called_with_its_tokens_in_place(ranks):
    assert max(ranks.run(called_in_place, 2)) < 1e-14
