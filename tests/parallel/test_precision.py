"""bf16 and fp16: gradients as good as one plain process's, sums over the ranks in fp32, positions and buffers never rounded."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from zoo import CASES

from shardwise.config.options import Precision, Sharding
from shardwise.parallel import parallelize, runtime_of
from shardwise.train.loss import next_token_loss
from shardwise.train.step import TrainStep
from shardwise.train.window import window
from shardwise.verify.sharded import share_of
from shardwise.world import init

LAYOUTS = {
    "one": ("dp_shard=1", 1),
    "replicas-2": ("dp_replicate=2", 2),
    "fsdp-2": ("dp_shard=2", 2),
    "fsdp-4": ("dp_shard=4", 4),
    "hsdp-2x2": ("dp_replicate=2,dp_shard=2", 4),
}
ON_LAYOUTS = [pytest.param(*given, id=name) for name, given in LAYOUTS.items()]
FEW = [pytest.param(*LAYOUTS[name], id=name) for name in ("one", "fsdp-2")]  # what does not depend on the sums
BLOCKS = Sharding(min_unit_bytes=0)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- gradients ---------------------------------------------------------------------------------------------------


def reference() -> nn.Module:
    torch.manual_seed(0)
    return CASES["reference"].build()


def micro_batches(num: int) -> list[dict[str, Tensor]]:
    return CASES["reference"].windows(1, num)[0]


def on_ranks(layout: str, accumulate: int, precision: str | Precision, scale: float = 1.0) -> dict[str, Tensor]:
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(reference(), world, precision=precision, sharding=BLOCKS)
        with window(model, share_of(micro_batches(accumulate * world.size), world)) as w:
            for batch in w:
                (next_token_loss(model(batch["input_ids"]), batch) * scale / w.num_tokens).backward()
        return {name: whole(param.grad).float() / scale for name, param in runtime_of(model).parameters.items()}


def one_process(dtype: torch.dtype, num: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Plain torch: parameters cast to ``dtype`` for each micro-batch, gradients added up in that of the masters."""
    model = reference()
    if dtype == torch.float64:
        model.double()
    masters = dict(model.named_parameters())
    batches = micro_batches(num)
    num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        cast = {name: param.to(dtype) for name, param in masters.items()}
        (next_token_loss(functional_call(model, cast, (batch["input_ids"],)), batch) * scale / num_tokens).backward()
    return {name: param.grad / scale for name, param in masters.items()}


def error_norm(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert set(grads) == set(exact)
    return sum(float((grads[name].double() - exact[name]).pow(2).sum()) for name in exact) ** 0.5


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("layout", "size"), ON_LAYOUTS)
def test_bf16_gradients_are_as_good_as_one_process_has_them(ranks, layout, size, accumulate):
    num = size * accumulate
    exact, plain = one_process(torch.float64, num), one_process(torch.bfloat16, num)
    noise = error_norm(plain, exact)
    assert noise > 0
    for found in ranks.run(on_ranks, size, layout, accumulate, "bf16"):
        assert error_norm(found, exact) <= 1.02 * noise


@pytest.mark.parametrize(("layout", "size"), ON_LAYOUTS)
def test_fp16_gradients_are_as_good_as_one_process_has_them(ranks, layout, size):
    """Scaled, and nearer to the exact ones than bf16's."""
    exact, plain = one_process(torch.float64, size), one_process(torch.float16, size, 1024.0)
    noise = error_norm(plain, exact)
    assert 0 < noise < 0.5 * error_norm(one_process(torch.bfloat16, size), exact)
    for found in ranks.run(on_ranks, size, layout, 1, "fp16", 1024.0):
        assert error_norm(found, exact) <= 1.02 * noise


class Scale(nn.Module):
    """Its gradient is the sum of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Times(), Times()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def gradient_of_scale(layout: str, accumulate: int) -> list[Tensor]:
    """Rank 0's first micro-batch has the gradient 256, all others 1."""
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(Scale(), world, precision="bf16", sharding=BLOCKS)
        batches = [{"x": torch.ones(4)} for _ in range(accumulate)]
        if world.is_main:
            batches[0]["x"] = torch.full((4,), 256.0)
        with window(model, batches, count=lambda batch: 1) as w:
            for batch in w:
                model(batch["x"]).sum().backward()
        return [whole(param.grad) for param in model.parameters()]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("layout", "size"), ON_LAYOUTS)
def test_gradients_are_summed_in_fp32(ranks, layout, size, accumulate):
    """In bf16, 256 + 1 is 256."""
    for grads in ranks.run(gradient_of_scale, size, layout, accumulate):
        for grad in grads:
            assert grad.dtype == torch.float32
            assert torch.equal(grad, torch.full((4,), 255.0 + size * accumulate))


# ---- inputs and outputs --------------------------------------------------------------------------------------------


class At(nn.Module):
    """Adds a sine of the position, which bf16 would round to a multiple of 16 at 4095."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("freq", torch.tensor([1.0, 0.1234567, 1e-3, 1e-4]), persistent=False)

    def forward(self, x: Tensor, position: Tensor, *, mask: Tensor) -> Tensor:
        self.saw = position.clone(), mask.clone(), self.linear.weight.dtype
        wave = torch.sin(position[:, None] * self.freq) * mask
        return x + self.linear(x) * wave.to(x.dtype)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([At() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        position, mask = torch.arange(len(x), dtype=torch.float32), torch.full((4,), 1.0 / 3)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, position, mask=mask)
        return x


def positions(layout: str):
    """What the blocks saw, and their tables."""
    with init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        model = parallelize(Positions(), world, precision="bf16", sharding=BLOCKS)
        model(torch.ones(4096, 4)).sum().backward()
        tables = [block.freq for block in model.blocks]
        return [block.saw for block in model.blocks], tables, len(runtime_of(model).recipe.units)


class Mixed(nn.Module):
    """Notes the dtype its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Times(), Times()])
        self.saw: torch.dtype | None = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.saw = x.dtype
        for block in self.blocks:
            x = block(x)
        return {"out": x, "index": x.argmax()}


@pytest.mark.parametrize(("layout", "size"), FEW)
def test_positions_reach_the_units_exact(ranks, layout, size):
    for saw, tables, num_units in ranks.run(positions, size, layout):
        assert num_units == 4
        for position, mask, weight in saw:
            assert torch.equal(position, torch.arange(4096.0)) and torch.equal(mask, torch.full((4,), 1.0 / 3))
            assert weight == torch.bfloat16
        for table in tables:
            assert torch.equal(table, torch.tensor([1.0, 0.1234567, 1e-3, 1e-4]))


def dtypes(layout: str, precision: Precision) -> tuple:
    """Of the root's input and of its outputs (a float and an integer) on this rank."""
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(Mixed(), world, precision=precision, sharding=BLOCKS)
        out = model(torch.ones(3, 4))
        return model.saw, out["out"].dtype, out["index"].dtype


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ({}, (torch.bfloat16, torch.bfloat16)),
        ({"output": "float32"}, (torch.bfloat16, torch.float32)),
        ({"cast_inputs": "none"}, (torch.float32, torch.float32)),  # fp32 times bf16 is fp32
        ({"cast_inputs": "none", "output": "bfloat16"}, (torch.float32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize(("layout", "size"), FEW)
def test_inputs_and_outputs_are_cast_as_asked(ranks, layout, size, how, seen):
    precision = Precision(storage="float32", compute="bfloat16", reduce="float32", **how)
    for found in ranks.run(dtypes, size, layout, precision):
        assert found == (*seen, torch.int64)


@pytest.mark.parametrize(("layout", "size"), FEW)
def test_an_output_is_cast_where_nothing_else_is(ranks, layout, size):
    for found in ranks.run(dtypes, size, layout, Precision(output="float64")):
        assert found == (torch.float32, torch.float64, torch.int64)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_inputs_are_cast_where_parameters_are_not(ranks, layout, dtype):
    """Stored as computed, so neither engine casts parameters: inputs are another matter."""
    wanted = getattr(torch, dtype)
    for found in ranks.run(dtypes, 2, layout, Precision(storage=dtype, compute=dtype)):
        assert found == (wanted, wanted, torch.int64)


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: list[Tensor] | None = None


class InPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, pair: Pair) -> Pair:
        self.saw = pair.first.dtype
        x = pair.first
        for layer in self.layers:
            x = layer(x)
        return Pair(x, [x])


def pairs(layout: str) -> tuple:
    with init(layout, device="cpu", timeout_s=30) as world:
        precision = Precision(storage="float32", compute="bfloat16", reduce="float32", output="float32")
        model = parallelize(InPairs(), world, precision=precision, sharding=BLOCKS)
        given = Pair(torch.ones(3, 4))
        out = model(given)
        return given.first.dtype, model.saw, out.first.dtype, out.second[0].dtype


def test_dataclasses_are_cast_within(ranks):
    f = torch.float32
    assert ranks.run(pairs, 1, "dp_shard=1") == [(f, torch.bfloat16, f, f)]


# ---- what is stored ------------------------------------------------------------------------------------------------


def stored(layout: str, storage: str) -> dict[str, set[torch.dtype]]:
    """Dtypes of what is kept after two steps."""
    with init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        model = reference()
        precision = Precision(storage=storage, compute="bfloat16", reduce="float32")
        model = parallelize(model, world, precision=precision, sharding=BLOCKS)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = TrainStep(model, optim)
        for _ in range(2):
            step(share_of(micro_batches(world.size), world))
        moments = {value.dtype for state in optim.state.values() for key, value in state.items() if key != "step"}
        buffers = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
        return {"params": {param.dtype for param in model.parameters()}, "moments": moments, "buffers": buffers}


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "size"), FEW)
def test_what_is_stored_has_the_storage_dtype_and_buffers_stay_fp32(ranks, layout, size, storage):
    dtype = getattr(torch, storage)
    for found in ranks.run(stored, size, layout, storage):
        assert found == {"params": {dtype}, "moments": {dtype}, "buffers": {torch.float32}}
