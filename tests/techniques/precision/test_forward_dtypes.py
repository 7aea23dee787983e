"""Float32 buffers, and what is computed in float32, meet bfloat16 weights: bit for bit the same as casts written by hand."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise import Compile, Precision, Sharding, UnsupportedError
from shardwise._torch.autograd import function_modes
from shardwise.parallel import describe, parallelize, runtime_of
from shardwise.step.evaluate import evaluate
from shardwise.step.step import TrainStep
from shardwise.world import init

BLOCKS = Sharding(min_unit_bytes=0)
NO_CAST: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
DIM = 16


class Case(nn.Module):
    """A model that computes some things in float32. ``cast`` is what its author would write where dtypes differ."""

    cast: Callable[[Tensor], Tensor] = staticmethod(NO_CAST)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, DIM), nn.Linear(DIM, 20)
        self.make()

    def make(self) -> None:
        pass

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cast(self.compute(self.embed(ids))))


class Block(nn.Module):
    cast: Callable[[Tensor], Tensor] = staticmethod(NO_CAST)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(self.cast(x)))))


class Sines(Case):
    """A residual stream in float32 from the first sum on."""

    def make(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        t = torch.arange(32.0)[:, None] * torch.exp(torch.arange(0, DIM, 2) * -0.6)
        self.register_buffer("sines", torch.cat([t.sin(), t.cos()], 1))

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.sines[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class Images(Case):
    """Pixel means before a convolution; a transposed one, and a group norm, after sums with a buffer."""

    def make(self) -> None:
        self.first, self.back = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.register_buffer("mean", torch.full((1, 1, 1), 0.5))

    def compute(self, x: Tensor) -> Tensor:
        y = self.first(self.cast(x[:, None] - self.mean))
        y = self.norm(self.cast(y + self.mean))
        return self.back(self.cast(y * self.mean.exp()))[:, 0] + x


class Recurrent(Case):
    """Float32 positions before recurrent layers and cells; bilinear layers and bags of float32 weights."""

    def make(self) -> None:
        self.lstm, self.gru = nn.LSTM(DIM, DIM, batch_first=True), nn.GRU(DIM, DIM)
        self.cell, self.pair = nn.GRUCell(DIM, DIM), nn.Bilinear(DIM, DIM, DIM)
        self.bag, self.rms = nn.EmbeddingBag(8, DIM, mode="sum"), nn.RMSNorm(DIM)
        self.register_buffer("place", torch.linspace(0, 1, 32)[:, None])

    def compute(self, x: Tensor) -> Tensor:
        place = self.place[: x.shape[1]]
        y, _ = self.lstm(self.cast(x + place))
        z, _ = self.gru(self.cast(y * place))
        z = self.cell(self.cast((z + place)[:, 0]), z[:, 1])
        bags = self.bag(torch.arange(4).view(2, 2), per_sample_weights=self.cast(place[:4].view(2, 2)))
        z = self.pair(z, self.cast(bags + place[3]))
        return self.rms(self.cast(y + z[:, None] + place))


class Functions(Case):
    """Layers as functions of parameters that the model holds itself."""

    def make(self) -> None:
        draw = torch.Generator().manual_seed(3)
        for name, shape in {
            "weight": (DIM, DIM),
            "kernel": (DIM, DIM, 1),
            "right": (DIM, DIM),
            "scale": (DIM,),
        }.items():
            self.register_parameter(name, nn.Parameter(0.2 * torch.randn(shape, generator=draw)))
        self.register_buffer("shift", torch.linspace(-1, 1, DIM))

    def compute(self, x: Tensor) -> Tensor:
        shift, cast = self.shift, self.cast
        x = functional.linear(cast(x + shift), self.weight, bias=cast(shift))
        x = functional.layer_norm(cast(x * shift), (DIM,), weight=self.scale)
        x = functional.conv1d(cast(x + shift).mT, self.kernel).mT
        x = cast(x + shift) @ self.right
        x = torch.addmm(self.scale, cast(x[0] + shift), self.right)[None] + x
        return functional.prelu(cast(x + shift), self.scale[:1])


class Attention(Case):
    """nn.MultiheadAttention of float32 queries, with a float32 mask."""

    def make(self) -> None:
        self.attention, self.other = nn.MultiheadAttention(DIM, 2, batch_first=True), nn.MultiheadAttention(DIM, 4)
        self.register_buffer("place", torch.linspace(0, 1, 32)[:, None])

    def compute(self, x: Tensor) -> Tensor:
        place, cast = self.place[: x.shape[1]], self.cast
        mask = torch.full((x.shape[1], x.shape[1]), -1e4, device=x.device).triu(1)
        y, _ = self.attention(cast(x + place), x, x, attn_mask=cast(mask))
        z, _ = self.other(*[cast(y + place)] * 3, need_weights=False)
        return x + z


class Products(Case):
    """A softmax in float32 meets bfloat16 values, in every way to write a product."""

    def make(self) -> None:
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.register_buffer("slopes", torch.linspace(0, 1, 32))

    def compute(self, x: Tensor) -> Tensor:
        cast = self.cast
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).float().softmax(-1)
        bias = self.slopes[: x.shape[1]].expand(x.shape[0], x.shape[1], -1)
        y = cast(weights) @ v + torch.bmm(cast(weights), v) + cast(weights).matmul(v)
        y = y + torch.einsum("bts,bsd->btd", cast(weights), v) + torch.einsum("bts,bsd->btd", [cast(weights), v])
        y = y + torch.baddbmm(cast(bias), q, k.mT) @ v + cast(bias).baddbmm(batch1=q, batch2=k.mT) @ v
        y = y + torch.tensordot(cast(weights), v[0], dims=([2], [0]))
        return y + torch.linalg.multi_dot([cast(weights[0]), v[0], k[0].mT, q[0]])


class Rotated(Case):
    """Queries and keys normalised in float32, values in bfloat16, a float32 mask, which torch takes."""

    def make(self) -> None:
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = (y.float() * y.float().square().mean(-1, keepdim=True).rsqrt() for y in (q, k))
        mask = torch.full((x.shape[1], x.shape[1]), -1e4, device=x.device).triu(1)
        y = functional.scaled_dot_product_attention(self.cast(q), self.cast(k), v, attn_mask=mask)
        y = y + functional.scaled_dot_product_attention(self.cast(q), self.cast(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Inner(nn.Module):
    """A part in float32: its products too, and the layers in it."""

    cast: Callable[[Tensor], Tensor] = staticmethod(NO_CAST)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        half = x.to(torch.bfloat16)
        y = self.linear(half.float() if self.cast is not NO_CAST else half)
        return y + torch.matmul(x, (half.float() if self.cast is not NO_CAST else half).mT) @ x


class Parts(Case):
    def make(self) -> None:
        self.inner, self.outer = Inner(), nn.Linear(DIM, DIM)
        self.register_buffer("shift", torch.linspace(-1, 1, DIM))

    def compute(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.outer(self.cast(y + self.shift)) + (self.cast(y * self.shift) @ x.mT) @ x


CASES = (Sines, Images, Recurrent, Functions, Attention, Products, Rotated, Parts)


def precision_of(cls: type[Case], word: str) -> Any:
    if cls is not Parts:
        return word
    return Precision(storage="float32", compute="bfloat16", reduce="float32", parts={"inner": "fp32"})


def built(cls: type[Case], by_hand: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = cls()
    for child in model.modules() if by_hand else ():
        if hasattr(type(child), "cast"):
            child.cast = lambda x: x.to(by_hand)
    return model


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


def batch_of(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(20, (2, DIM + 1), generator=torch.Generator().manual_seed(seed))
    return {"x": ids[:, :-1], "labels": ids[:, 1:]}


def called(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


def trained(model: nn.Module, steps: int = 2, num_micro: int = 2) -> list[Any]:
    """Losses, and the bits of parameters and gradients after some steps."""
    optim, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    optim.register_step_pre_hook(
        lambda *_: found.extend(whole(p.grad) for p in model.parameters() if p.grad is not None)
    )
    step = TrainStep(model, optim, loss=loss_of, forward=called, count=lambda batch: batch["labels"].numel())
    rank = runtime_of(model).world.axis("dp").rank
    for n in range(steps):
        found.append(torch.tensor(step([batch_of(10 * n + 2 * rank + i) for i in range(num_micro)]).loss))
    return found + [whole(p) for p in model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 4 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_ranks(cls: type[Case], word: str, layout: str, by_hand: torch.dtype | None, **options: Any) -> tuple:
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(built(cls, by_hand), world, precision=precision_of(cls, word), **options)
        return trained(model), describe(model), {b.dtype for b in model.buffers()} <= {torch.float32}


# ---- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__.lower())
def test_the_same_bits_as_casts_written_by_hand(ranks, cls):
    mine, text, keeps = ranks.run(on_ranks, 1, cls, "bf16", "dp_shard=1", None)[0]
    by_hand, other, _ = ranks.run(on_ranks, 1, cls, "bf16", "dp_shard=1", torch.bfloat16)[0]
    assert same(mine, by_hand) and keeps
    assert "dtypes: cast where they differ in forward: " in text and "dtypes:" not in other


@pytest.mark.parametrize(("word", "dtype"), [("fp16", torch.float16), ("fp64", torch.float64)])
def test_other_dtypes_alike(ranks, word, dtype):
    """Under fp64 it is the buffers and ``.float()`` that have fewer bits."""
    for cls in (Sines, Products, Rotated):
        mine, text, _ = ranks.run(on_ranks, 1, cls, word, "dp_shard=1", None)[0]
        assert same(mine, ranks.run(on_ranks, 1, cls, word, "dp_shard=1", dtype)[0][0])
        assert ("dtypes:" in text) == (cls is not Sines or word == "fp16")


OPTIONS = [{"remat": "full"}, {"sharding": BLOCKS}, {"sharding": BLOCKS, "remat": "selective"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["remat", "units", "units-selective"])
def test_beside_other_techniques(ranks, options):
    mine, text, _ = ranks.run(on_ranks, 1, Sines, "bf16", "dp_shard=1", None, **options)[0]
    assert same(mine, ranks.run(on_ranks, 1, Sines, "bf16", "dp_shard=1", torch.bfloat16)[0][0])
    assert "blocks.*.norm (3 modules): layer_norm, float32 to bfloat16; head: linear, float32 to bfloat16" in text


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_on_two_ranks(ranks, layout):
    mine = ranks.run(on_ranks, 2, Sines, "bf16", layout, None, sharding=BLOCKS)
    by_hand = ranks.run(on_ranks, 2, Sines, "bf16", layout, torch.bfloat16, sharding=BLOCKS)
    assert all(same(a, b) for (a, *_), (b, *_) in zip(mine, by_hand, strict=True))
    assert same(mine[0][0], mine[1][0])


def test_under_tp(ranks):
    """Cut layers are cast to the dtype of their parts; sums over the ranks round otherwise."""
    alone = losses(ranks.run(on_ranks, 1, Sines, "bf16", "dp_shard=1", None)[0][0])
    for found, text, _ in ranks.run(on_ranks, 2, Sines, "bf16", "tp=2", None, sharding=BLOCKS):
        assert losses(found) == pytest.approx(alone, rel=2e-3) and "blocks.*.norm (3 modules): layer_norm" in text


def losses(found: list[Tensor]) -> list[float]:
    return [x.item() for x in found if x.dim() == 0]


def compiled(remat: str | None, compile: Any, cls: type[Case] = Sines) -> tuple:
    before = counters["stats"]["unique_graphs"]
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(cls), world, precision="bf16", compile=compile, remat=remat)
        try:
            return trained(model), describe(model), counters["stats"]["unique_graphs"] - before
        except UnsupportedError as error:
            return error.name, str(error), 0


def test_casts_are_part_of_the_graph_of_compiled_blocks(ranks):
    mine, text, graphs = ranks.run(compiled, 1, None, Compile(backend="aot_eager", fullgraph=True))[0]
    assert same(mine, ranks.run(on_ranks, 1, Sines, "bf16", "dp_shard=1", torch.bfloat16)[0][0])
    assert graphs == 1 and "blocks.0: layer_norm, float32 to bfloat16" in text


def test_compiled_blocks_that_are_checkpointed_too_are_refused(ranks):
    name, text, _ = ranks.run(compiled, 1, "full", Compile(backend="aot_eager"))[0]
    assert name == "blocks.0" and "in a compiled block that is checkpointed too nothing is cast" in text
    assert "leave the block out: Compile(targets=...)" in text
    mine, *_ = ranks.run(compiled, 1, "full", None)[0]
    assert same(mine, ranks.run(on_ranks, 1, Sines, "bf16", "dp_shard=1", torch.bfloat16)[0][0])


class CompiledByHand(Rotated):
    """A function that the model compiles itself: its casts are part of the graph too."""

    def make(self) -> None:
        super().make()
        self.graph = torch.compile(self.weighted, backend="aot_eager", fullgraph=True)

    def weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        return self.cast(weights) @ values

    def compute(self, x: Tensor) -> Tensor:
        return self.graph((x @ x.mT).float().softmax(-1), super().compute(x)) + self.graph(x @ x.mT, x)


@pytest.mark.soak
def test_functions_that_the_model_compiles_itself(ranks):
    mine, text, _ = ranks.run(on_ranks, 1, CompiledByHand, "bf16", "dp_shard=1", None)[0]
    assert same(mine, ranks.run(on_ranks, 1, CompiledByHand, "bf16", "dp_shard=1", torch.bfloat16)[0][0])
    assert "(root): " in text and "matmul, float32 to bfloat16" in text


# ---- what is looked at, and when -----------------------------------------------------------------------------------------


class Uniform(Case):
    def make(self) -> None:
        self.blocks, self.modes = nn.ModuleList(Block() for _ in range(2)), []

    def compute(self, x: Tensor) -> Tensor:
        self.modes.append(len(function_modes()))
        for block in self.blocks:
            x = block(x)
        return x


def left_behind(cls: type[Case]) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(cls), world, precision="bf16")
        trained(model)
        model.eval()
        evaluate(model, [batch_of(0)], loss=loss_of, forward=called)
        replaced = [name for name, child in model.named_modules() if "forward" in vars(child)]
        return model.modes, replaced, describe(model)


def test_where_nothing_differs_nothing_is_left(ranks):
    modes, replaced, text = ranks.run(left_behind, 1, Uniform)[0]
    assert modes == [1, 0, 0, 0, 1] and replaced == [""] and "dtypes:" not in text


class Experts(Uniform):
    """The second expert runs first in a later forward, the third only in evaluation, and the last one with an argument."""

    def make(self) -> None:
        super().make()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.register_buffer("gate", torch.linspace(0, 1, DIM))
        self.num = 0

    def forward(self, ids: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.compute(self.embed(ids))
        self.num += 1
        number = 2 if not self.training else 3 if extra is not None else int(self.num > 2)
        return self.head(self.cast(x + self.experts[number](self.cast(x * self.gate)) * self.gate))


def late_experts(by_hand: torch.dtype | None) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(Experts, by_hand), world, precision="bf16")
        model.eval()
        first = evaluate(model, [batch_of(0)], loss=loss_of, forward=called)["loss"]
        found = trained(model.train())
        extra = model(batch_of(1)["x"], extra=torch.ones(1)).detach()
        return [torch.tensor(first), *found, extra, model.eval()(batch_of(2)["x"]).detach()], describe(model)


def test_modules_that_run_first_in_a_later_forward(ranks):
    (mine, text), (by_hand, _) = ranks.run(late_experts, 1, None)[0], ranks.run(late_experts, 1, torch.bfloat16)[0]
    assert same(mine, by_hand)
    assert "experts.* (4 modules): linear, float32 to bfloat16" in text


class Later(Uniform):
    """From the third forward on its own code multiplies other dtypes."""

    def compute(self, x: Tensor) -> Tensor:
        x = super().compute(x)
        return (x.float() if len(self.modes) > 2 else x) @ x.mT @ x


def later(parts: dict[str, str]) -> tuple:
    precision = Precision(storage="float32", compute="bfloat16", reduce="float32", parts=parts)
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(nn.Sequential(built(Later)), world, precision=precision)
        try:
            return trained(model), None
        except UnsupportedError as error:
            return str(error), error.name


def test_another_path_later_is_refused_by_name_and_its_fix_works(ranks):
    text, name = ranks.run(later, 1, {})[0]
    assert (
        name == "0" and "two floating dtypes under precision=" in text and "Precision(..., parts={'0': 'fp32'})" in text
    )
    assert len(ranks.run(later, 1, {"0": "fp32"})[0][0]) > 4


class AgainByHand(Products):
    """A function of the model's own, which it checkpoints itself: nothing is around its second run."""

    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(super().compute, x, use_reentrant=False)


def again_by_hand() -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(AgainByHand), world, precision="bf16")
        try:
            return trained(model), ""
        except UnsupportedError as error:
            return [], str(error)


def test_a_function_that_the_model_checkpoints_itself_is_refused(ranks):
    found, text = ranks.run(again_by_hand, 1)[0]  # its name is not known: the error comes out of a backward
    assert not found and "two floating dtypes under precision=" in text


class Mixed(Products):
    def compute(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.float() + self.slopes[0]).chunk(3, -1)
        return (q @ k.mT).float().softmax(-1) @ v + torch.bmm((k @ q.mT).double().float(), v)


def under_autocast(casts: bool) -> list[Tensor]:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(Mixed), world, precision="bf16")
        if not casts:
            del model.__dict__["forward"]
        with torch.autocast("cpu", torch.float16):
            return [model(batch_of(n)["x"]).detach() for n in range(5)]


def test_autocast_casts_as_before(ranks):
    """To its own dtype, without a stop in the model's."""
    assert same(ranks.run(under_autocast, 1, True)[0], ranks.run(under_autocast, 1, False)[0])


class Counting(Uniform):
    """It writes a buffer, and multiplies two dtypes itself."""

    def make(self) -> None:
        super().make()
        self.register_buffer("calls", torch.zeros(()))

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().compute(x).float() @ x.mT @ x


def put_back() -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(nn.Sequential(built(Counting)), world, precision="bf16")
        before = runtime_of(model).module_state()  # of modules in which nothing is cast yet
        for n in range(2):
            model(batch_of(n)["x"])
            before.restore()
        return float(model[0].calls), model(batch_of(0)["x"]).dtype


def test_a_forward_that_does_not_count_leaves_the_casts(ranks):
    assert ranks.run(put_back, 1)[0] == (0.0, torch.bfloat16)


# ---- dtypes that code reads in a forward ----------------------------------------------------------------------------------


class Reads(Case):
    """Reads the dtype of a block outside of it, in the ways that models do."""

    def make(self) -> None:
        self.blocks, self.saw = nn.ModuleList(Block() for _ in range(3)), []

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.blocks.parameters() if p.is_floating_point())

    def compute(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].up.weight
        self.saw = [self.dtype, weight.dtype, weight.new_ones(2).dtype, torch.ones(2).to(weight).dtype]
        self.saw += [torch.ones(2).type_as(weight).dtype, tuple(weight.shape), isinstance(weight, nn.Parameter)]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(self.dtype).min, dtype=self.dtype).triu(1)
        for block in self.blocks:
            x = (functional.softmax(mask, -1) @ block(x.float().to(self.dtype))).to(self.blocks[-1].down.weight.dtype)
            self.saw.append(self.blocks[0].norm.weight.dtype)
        return x


def reading(word: str, units: int | None, fails: bool = False) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(Reads), world, precision=word, sharding=Sharding(min_unit_bytes=units))
        before = list(model.parameters())
        found = trained(model)
        with torch.no_grad():
            model(batch_of(0)["x"])
        with contextlib.suppress(TypeError):
            model("not a tensor")
        after = list(model.parameters())
        is_kept = all(a is b for a, b in zip(before, after, strict=True))
        return found, model.saw, is_kept and {p.dtype for p in after} == {torch.float32}


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_parameters_have_the_compute_dtype_while_a_forward_runs(ranks, word, dtype):
    """With blocks as units, of which one is gathered at a time, and as one unit: the same numbers."""
    small, saw, is_kept = ranks.run(reading, 1, word, None)[0]
    large, seen, keeps = ranks.run(reading, 1, word, 0)[0]
    assert same(small, large) and is_kept and keeps
    assert saw == seen == [*[dtype] * 5, (32, DIM), True, *[dtype] * 3]


class Borrows(Reads):
    """Computes with a parameter of another unit."""

    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x) * self.blocks[0].norm.weight


def borrowing() -> str:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(built(Borrows), world, precision="bf16", sharding=BLOCKS)
        try:
            trained(model)
        except Exception as error:
            return str(error)
        return ""


def test_a_parameter_of_another_unit_is_still_refused(ranks):
    assert "a parameter of one unit used by code outside that unit" in ranks.run(borrowing, 1)[0]
