"""How a second run of a block goes silently wrong, each as a script one would write: here it is right, or refused by name."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from techniques.remat.recompute import assert_same, batches, build, loss_of, one_process, train
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise import Compile, Remat
from shardwise.errors import ShardwiseError
from shardwise.parallel import parallelize, recipe_of
from shardwise.step.window import window
from shardwise.world import init

PAIR = ("ddp-2", "fsdp-2")


def on(ranks, layout: str, make=build, **options):
    text, count, engine = LAYOUTS[layout]
    return ranks.run(train, count, text, engine, make, timeout_s=100, **options)


# ---- T30: random numbers, routing -----------------------------------------------------------------------------------------


def by_hand(**options) -> Tensor:
    """Gradient of a plain layer with dropout under torch's own checkpoint, with numbers drawn between its two runs."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).double()

    def forward(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        return F.dropout(torch.tanh(layer(x * noise)), 0.5)

    x = torch.ones(2, 8, dtype=torch.float64)
    out = forward(x) if not options else checkpoint(forward, x, use_reentrant=False, **options)
    torch.rand(3)
    out.sum().backward()
    return layer.weight.grad


def test_t30_what_goes_wrong_in_plain_torch():
    """Masks of the second run are others if the state of random numbers is not kept, or if one operator's result is kept
    and so its numbers are not drawn; without an error either way."""
    right = by_hand()
    assert torch.equal(by_hand(preserve_rng_state=True), right)
    assert not torch.allclose(by_hand(preserve_rng_state=False), right)
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.rand_like.default])
    assert not torch.allclose(by_hand(context_fn=keep), right)


class Noisy(nn.Module):
    """Numbers of torch, and of Python's own generator."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.up = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.up(x * torch.rand_like(x))), 0.5)
        return x + y * (0.5 + random.random())


class Router(nn.Module):
    """Each token to its two best experts."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.scores = nn.Linear(dim, 3)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.scores(x).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = chosen == i
            if at.any():
                y = y + expert(x) * (weights * at).sum(-1, keepdim=True)
        return x + torch.tanh(y)


class Tower(nn.Module):
    def __init__(self, block, count: int = 3):
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x), x.new_zeros(())


def tower(block) -> nn.Module:
    torch.manual_seed(3)
    return Tower(block).double()


def noisy():
    random.seed(4)
    return tower(Noisy)


def routed():
    return tower(Router)


@pytest.mark.combinations("values")
@pytest.mark.parametrize("layout", PAIR)
@pytest.mark.parametrize("remat", ["full", "selective", Remat(mode="selective", save=("attention", "aten.tanh"))])
def test_t30_dropout_and_noise_are_those_of_the_first_run(ranks, layout, remat):
    """Python's generator is not reseeded per micro-batch, so the plain run is a sharded one without remat."""
    plain, again = on(ranks, layout, noisy), on(ranks, layout, noisy, remat=remat)
    for a, b in zip(plain, again, strict=True):
        assert_same(b["grads"], a["grads"], gate=0.0)
        assert b["backward"]["aten.bernoulli_.float"] == 3 * b["micro"] > a["backward"]["aten.bernoulli_.float"]


@pytest.mark.parametrize("layout", PAIR)
def test_t30_selective_keeps_top_k_routing(ranks, layout):
    want = one_process(routed)
    full, kept = on(ranks, layout, routed, remat="full"), on(ranks, layout, routed, remat="selective")
    for a, b in zip(full, kept, strict=True):
        assert_same(a["grads"], want)
        assert_same(b["grads"], want)
        assert a["backward"]["aten.topk.default"] == 3 * a["micro"] and b["backward"]["aten.topk.default"] == 0
        copies = "aten._local_scalar_dense.default"  # of any(), to the host
        assert a["backward"][copies] - b["backward"][copies] == 9 * a["micro"]


# ---- T31: targets and names -----------------------------------------------------------------------------------------------


def list_target():
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(build(), world, remat=Remat(targets=("blocks", "ModuleLi*")))
        return [edit.module for edit in recipe_of(model).edits]


def test_t31_a_list_as_target_means_its_children(ranks):
    """A list is never called itself: wrapped, it checkpoints nothing, without a word."""
    model = build()
    model.blocks = nn.ModuleList(model.blocks)
    ran = []
    wrapped = checkpoint_wrapper(nn.ModuleList(model.blocks))
    wrapped.register_forward_hook(lambda *_: ran.append(1))
    loss_of(model, batches()[0]).backward()
    assert ran == []
    assert ranks.run(list_target, 1)[0] == ["blocks.0", "blocks.1", "blocks.2", "experts.0", "experts.1"]


def test_t31_wrappers_would_change_the_names(ranks):
    wrapped = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))
    assert any("_checkpoint_wrapped_module" in name for name, _ in nn.Module.named_modules(wrapped))
    model = build()
    for answer in on(ranks, "fsdp-2", remat="selective"):
        assert answer["names"] == [list(model.state_dict()), [name for name, _ in model.named_modules()]]


# ---- what a block writes --------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm, and a weight whose norm is followed by a buffer that each forward reads and writes."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.up = spectral_norm(nn.Linear(dim, dim))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.up(x - self.mean)))
        self.mean = self.mean * 0.5 + x.detach().mean((0, 1)) * 0.5  # a buffer that is replaced
        return x + y


def normed():
    return tower(Normed)


def buffers_after(remat):
    with init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = parallelize(normed(), world, remat=remat)
        for _ in range(2):
            with window(model, batches()) as w:
                for batch in w:
                    (loss_of(model, batch) / w.num_tokens).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_buffers_count_a_batch_once_and_the_second_run_reads_what_the_first_read(ranks, remat):
    """By hand, batch norm's statistics move twice per batch, and a spectral norm divides by another norm in backward."""
    (want, before), (grads, after) = ranks.run(buffers_after, 1, None)[0], ranks.run(buffers_after, 1, remat)[0]
    assert_same(grads, want, gate=0.0)
    assert all(torch.equal(after[name], value) for name, value in before.items()), "buffers"
    assert before["blocks.0.norm.num_batches_tracked"] == 8


class Cached(nn.Module):
    """Changes what it is given, as a key/value cache."""

    def __init__(self, dim: int = 8):
        super().__init__()
        cache: list[Tensor] = []
        self.up, self.cached = nn.Linear(dim, dim), lambda: cache  # in an attribute of the block it would be put back

    def forward(self, x: Tensor) -> Tensor:
        self.cached().append(torch.tanh(self.up(x)))
        return x + torch.cat(self.cached(), 1).sum(1, keepdim=True)


class Raises(Cached):
    def forward(self, x: Tensor) -> Tensor:
        self.cached().append(self.up(x))
        return x + torch.stack(self.cached()).reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self, dim: int = 8):
        super().__init__()
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class Chunks(nn.Module):
    """Writes through views that torch does not know as such."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).unsafe_chunk(2, -1)
        return x + a.sigmoid_() * b.tanh_()


def stopped(kind: str, remat: str):
    with init("dp_shard=1", device="cpu", timeout_s=30) as world:
        try:
            model = parallelize(tower(globals()[kind]), world, remat=remat)
            with window(model, batches()[:1]) as w:
                for batch in w:
                    (loss_of(model, batch) / w.num_tokens).backward()
        except ShardwiseError as error:
            return error.name, str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "remat", "name", "words"),
    [
        ("Cached", "full", "blocks.2", "a key/value cache"),
        ("Raises", "full", "blocks.2", "a key/value cache"),
        ("Recurrent", "selective", "blocks.0", "write into the results of their matrix products"),
        ("Chunks", "selective", None, "changes kept results unseen"),
    ],
)
def test_what_cannot_run_twice_is_refused_by_name(ranks, kind, remat, name, words):
    found = ranks.run(stopped, 1, kind, remat)[0]
    assert found is not None and found[0] == name and words in found[1]


def patched(compile: str | None):
    """A forward put on the object, as hooks of other libraries do: it is what runs, both times."""
    with init("dp_shard=1", device="cpu", timeout_s=30) as world:
        model = routed()
        for block in model.blocks:
            block.forward = functools.partial(lambda inner, x: 2 * inner(x), block.forward)
        x, grads = batches()[0]["input_ids"], []
        for _ in range(2):
            model.zero_grad()
            model(x)[0].sum().backward()
            grads.append(model.blocks[0].scores.weight.grad.clone())
            if len(grads) == 1:
                model = parallelize(model, world, remat="full", compile=compile and Compile(backend=compile))
        return grads


@pytest.mark.parametrize("compile", [None, "eager"])
def test_a_forward_put_on_the_object_is_what_runs(ranks, compile):
    plain, again = ranks.run(patched, 1, compile)[0]
    assert plain.any() and torch.equal(plain, again)


class Model(Tower):
    """The model's own gradient checkpointing is on."""

    def __init__(self) -> None:
        super().__init__(Noisy)
        for block in self.blocks:
            block.gradient_checkpointing = True


def thrice():
    with init("dp_shard=1", device="cpu") as world:
        try:
            parallelize(Model(), world, remat="full")
        except ShardwiseError as error:
            return error.name, str(error)
    return None


def test_a_block_that_checkpoints_itself_does_not_run_thrice(ranks):
    name, text = ranks.run(thrice, 1)[0]
    assert name == "blocks.0" and "gradient_checkpointing_disable()" in text
