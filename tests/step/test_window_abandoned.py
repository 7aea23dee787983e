"""A window that ends in an exception leaves the model as if it had never begun."""

import pytest
import torch
from models.tied import Tied
from step.plain import assert_close, batch, build, gradients, mine, plain_backward, shard, sum_loss

import shardwise as sw
from shardwise.data.batch import MicroBatch
from shardwise.parallel import runtime_of


class StopError(Exception):
    pass


def _raise(*_args):
    raise StopError


def _broken_window(model, batches, where, at):
    """One window that raises in micro-batch ``at``: in the forward of a block, in the loss, or in the backward."""
    with sw.window(model, batches) as w:
        for i, b in enumerate(w):
            handle = None
            if i == at and where == "forward":
                handle = model.blocks[1].register_forward_pre_hook(_raise)
            try:
                out = model(b["input_ids"])
            finally:
                if handle is not None:
                    handle.remove()
            if i == at and where == "loss":
                raise StopError
            value = sum_loss(out, b)
            if i == at and where == "backward":
                handle = model.blocks[1].register_full_backward_pre_hook(_raise)
                out = model(b["input_ids"])
                value = sum_loss(out, b)
            try:
                (value / w.num_tokens).backward()
            finally:
                if handle is not None:
                    handle.remove()


def _recover(layout, engine, where, at):
    world, model = shard(layout, engine=engine)
    with world:
        batches = [batch(i) for i in range(6)]
        with pytest.raises(StopError):
            _broken_window(model, mine(batches, world), where, at)
        assert not runtime_of(model).in_window
        assert all(p.grad is None for p in model.parameters())
        found = []
        for _ in range(2):
            with sw.window(model, mine(batches, world)) as w:
                for b in w:
                    (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
            found.append(gradients(model))
            model.zero_grad()
        return found


@pytest.mark.quick(
    "dp_replicate=2-None-forward-first", "dp_replicate=2-fsdp2-backward-last", "dp_shard=2-None-loss-last"
)
@pytest.mark.parametrize("at", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@pytest.mark.parametrize(
    ("layout", "engine"), [("dp_replicate=2", None), ("dp_shard=2", None), ("dp_replicate=2", "fsdp2")], ids=str
)
def test_the_window_after_an_exception_is_exact(ranks, layout, engine, where, at):
    model = build()
    plain_backward(model, [batch(i) for i in range(6)])
    for found in ranks.run(_recover, 2, layout, engine, where, at, timeout_s=30)[0]:
        assert_close(found, {n: p.grad for n, p in model.named_parameters()})


class Counting(Tied):
    """With a buffer that every forward writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids)


def build_counting():
    torch.manual_seed(3)
    return Counting().double()


def _leave_no_trace(layout, engine, where):
    """A window on top of another's gradients that raises in a padding, or after it was finished."""
    world, model = shard(layout, engine=engine, build=build_counting)
    with world:
        batches = [MicroBatch(batch(i), index=i, padding=i >= 2) for i in range(4)]
        with sw.window(model, mine(batches, world)) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
        before = gradients(model)
        torch.manual_seed(11)
        with pytest.raises(StopError), sw.window(model, mine(batches, world)) as w:
            for b in w:
                (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
                if b.padding and where == "padding":
                    raise StopError
            w.finish()
            raise StopError
        num_tokens, drawn = w.num_tokens, torch.rand(3)
        torch.manual_seed(11)
        return before, gradients(model), float(model.calls), num_tokens, torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("where", ["padding", "finished"])
@pytest.mark.parametrize(
    ("layout", "engine"), [("dp_replicate=2", None), ("dp_shard=2", None), ("dp_replicate=2", "fsdp2")], ids=str
)
def test_an_exception_leaves_gradients_random_numbers_and_paddings_as_they_were(ranks, layout, engine, where):
    for before, after, calls, num_tokens, is_same_stream in ranks.run(_leave_no_trace, 2, layout, engine, where):
        assert all(torch.equal(before[name], grad) for name, grad in after.items())
        assert calls == 2.0 and num_tokens == sum(int((batch(i)["labels"] != -100).sum()) for i in range(2))
        assert is_same_stream
