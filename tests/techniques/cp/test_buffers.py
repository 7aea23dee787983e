"""Buffers of the policy "sum" where positions are cut: each counts what one process counts, whoever writes it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw


def add(buffer: torch.Tensor, value) -> None:
    with torch.no_grad():
        buffer.add_(value)


class Block(nn.Module):
    """Attention. ``how``: what it writes into its buffer."""

    def __init__(self, how: str):
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(16, 48), nn.Linear(16, 16), how
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.training and self.how == "values of rows":
            add(self.total, y.detach().square().sum((0, 1))[:3])
        elif self.training and self.how == "tokens":
            add(self.total, x.shape[0] * x.shape[1])
        elif self.training and self.how in ("calls", "pooled"):
            add(self.total, 1)
        elif self.training and self.how == "samples":
            add(self.total, len(x))
        elif self.training and self.how == "no sum":
            add(self.total, y.detach().mean())
        elif self.training and self.how == "shift":
            x = x + F.pad(x, (0, 0, 1, -1))
            add(self.total, x.shape[1])
        return x + self.out(y)


class Counting(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.tokens, self.head = how, nn.Embedding(29, 16), nn.Linear(16, 29)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("behind", torch.zeros((), dtype=torch.float64))

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        if self.training:
            add(self.seen, input_ids.numel())
        for block in self.blocks:
            x = block(x)
        if self.training:
            add(self.behind, x.detach().abs().sum())
        if self.how == "pooled":
            x = x + x.mean(1, keepdim=True)
            add(self.behind, x.shape[1])
        return self.head(x)


def build(how):
    torch.manual_seed(0)
    return Counting(how).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 29, (2, num + 1), generator=generator) for num in (9, 16, 7, 12)]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def loss_of(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def train(how, layout, buffers="sum", **options):
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        names = ("seen", "behind") if buffers is None else ("*.total", "seen", "behind")
        sharding = sw.Sharding(buffers=dict.fromkeys(names, buffers or "sum"))
        model = sw.parallelize(build(how), world, sharding=sharding, **options)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of)
        data = world.axis("dp")
        for _ in range(2):
            step(batches()[data.rank :: data.size])
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def alone(how):
    model = build(how)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        given = batches()
        total = sum(batch["labels"].numel() for batch in given)
        (sum(loss_of(model(batch["input_ids"]), batch) for batch in given) / total).backward()
        optim.step()
        optim.zero_grad()
    return dict(model.named_buffers())


def _cell(how, layout, num):
    marks = () if layout == "cp=2" or (how, layout) == ("tokens", "dp_shard=2,cp=2") else pytest.mark.soak
    return pytest.param(how, layout, num, marks=marks)


@pytest.mark.quick(
    "calls-cp=2-2", "pooled-cp=2-2", "tokens-cp=2-2", "tokens-dp_shard=2,cp=2-4", "values of rows-cp=2-2"
)
@pytest.mark.parametrize(
    ("how", "layout", "num"),
    [
        _cell(how, layout, num)
        for how in ("values of rows", "tokens", "calls", "samples", "pooled", "shift")
        for layout, num in (("cp=2", 2), ("dp_shard=2,cp=2", 4), ("dp_replicate=2,cp=2", 4), ("cp=2,tp=2", 4))
    ],
)
def test_sums_are_those_of_one_process(ranks, how, layout, num):
    options = {"context_parallel": sw.ContextParallel(fallback="gather")} if how == "shift" else {}
    wanted = alone(how)
    for found in ranks.run(train, num, how, layout, **options):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("how", "buffers", "words"),
    [
        ("no sum", "sum", "no part of what one process adds"),
        ("none", "sum", "does not write it"),
        ("tokens", None, "a later forward that reads it"),
    ],
)
def test_what_ranks_write_otherwise_is_refused(ranks, how, buffers, words):
    with pytest.raises(sw.RankError, match=words) as caught:
        ranks.run(train, 2, how, "cp=2", buffers)
    assert "blocks.0.total" in str(caught.value)
