"""bf16 and fp16: gradients as good as one plain process's, sums over the ranks in fp32, positions and buffers never rounded."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import models
import msgspec
import pytest
import torch
from layouts import KINDS, LAYOUTS, RankLayout, every_layout
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from shardwise import Parallel, Precision, Sharding
from shardwise.errors import ConfigError
from shardwise.parallel import parallelize, runtime_of
from shardwise.step.own_loop import accumulate
from shardwise.step.step import TrainStep
from shardwise.step.window import window
from shardwise.techniques.precision.options import precision_of
from shardwise.verify.sharded import share_of
from shardwise.world import init

FEW = ("one", "fsdp-2")  # what does not depend on the sums
BLOCKS = Sharding(min_unit_bytes=0)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- gradients ---------------------------------------------------------------------------------------------------


def build(case: str) -> nn.Module:
    torch.manual_seed(0)
    return models.get(case).build()


def micro_batches(num: int, case: str = "reference") -> list[dict[str, Tensor]]:
    return models.get(case).windows(1, num)[0]


def on_ranks(
    layout: str, accumulate: int, precision: str | Precision, scale: float = 1.0, case: str = "reference"
) -> dict[str, Tensor]:
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(build(case), world, precision=precision, sharding=BLOCKS)
        with window(model, share_of(micro_batches(accumulate * world.size, case), world)) as w:
            for batch in w:
                (_loss(case, model(**_inputs(batch)), batch) * scale / w.num_tokens).backward()
        grads = {name: param.grad for name, param in runtime_of(model).parameters.items() if param.grad is not None}
        return {name: whole(grad).float() / scale for name, grad in grads.items()}


def one_process(dtype: torch.dtype, num: int, scale: float = 1.0, case: str = "reference") -> dict[str, Tensor]:
    """Plain torch: parameters cast to ``dtype`` for each micro-batch, gradients added up in that of the masters."""
    model = build(case)
    if dtype == torch.float64:
        model.double()
    masters = dict(model.named_parameters())
    batches = micro_batches(num, case)
    num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        cast = {name: param.to(dtype) for name, param in masters.items()}
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in _inputs(batch).items()}
        (_loss(case, functional_call(model, cast, (), inputs), batch) * scale / num_tokens).backward()
    return {name: param.grad / scale for name, param in masters.items() if param.grad is not None}


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def _loss(case: str, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return models.get(case).loss(output, batch)


def error_norm(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert set(grads) == set(exact)
    return sum(float((grads[name].double() - exact[name]).pow(2).sum()) for name in exact) ** 0.5


@pytest.mark.quick("ddp-2-3", "fsdp-4-1", "hsdp-2x2-1")
@pytest.mark.parametrize("accumulate", [1, 3])
@every_layout(*KINDS)
def test_bf16_gradients_are_as_good_as_one_process_has_them(ranks, layout, accumulate):
    _be_as_good_as_one_process(ranks, layout, accumulate, "reference")


_OTHERS = ("experts", "branches", "inplace", "llama", "gpt2", "qwen3", "vit")
"""Without buffers that training writes, which one plain process has in another dtype."""


@pytest.mark.quick("experts-ddp-2", "inplace-fsdp-2")
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=() if (i + j) % 3 == 0 and i < 5 else pytest.mark.soak)
        for i, case in enumerate(_OTHERS)
        for j, name in enumerate(("ddp-2", "fsdp-2", "hsdp-2x2"))
    ],
)
def test_bf16_gradients_of_other_models_are_as_good_too(ranks, case, name):
    _be_as_good_as_one_process(ranks, LAYOUTS[name], 3, case)


def _be_as_good_as_one_process(ranks, layout: RankLayout, accumulate: int, case: str) -> None:
    num = layout.num_ranks * accumulate
    exact, plain = (one_process(dtype, num, case=case) for dtype in (torch.float64, torch.bfloat16))
    noise = error_norm(plain, exact)
    assert noise > 0
    for found in ranks.run(on_ranks, layout.num_ranks, layout.text, accumulate, "bf16", 1.0, case):
        assert error_norm(found, exact) <= 1.02 * noise


@pytest.mark.quick("ddp-2", "fsdp-4")
@every_layout(*KINDS)
def test_fp16_gradients_are_as_good_as_one_process_has_them(ranks, layout):
    """Scaled, and nearer to the exact ones than bf16's."""
    exact, plain = one_process(torch.float64, layout.num_ranks), one_process(torch.float16, layout.num_ranks, 1024.0)
    noise = error_norm(plain, exact)
    assert 0 < noise < 0.5 * error_norm(one_process(torch.bfloat16, layout.num_ranks), exact)
    for found in ranks.run(on_ranks, layout.num_ranks, layout.text, 1, "fp16", 1024.0):
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


@pytest.mark.combinations("values")
@pytest.mark.parametrize("accumulate", [1, 3])
@every_layout(*KINDS)
def test_gradients_are_summed_in_fp32(ranks, layout, accumulate):
    """In bf16, 256 + 1 is 256."""
    for grads in ranks.run(gradient_of_scale, layout.num_ranks, layout.text, accumulate):
        for grad in grads:
            assert grad.dtype == torch.float32
            assert torch.equal(grad, torch.full((4,), 255.0 + layout.num_ranks * accumulate))


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
        with accumulate(model, is_last=True):
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


@every_layout(*FEW)
def test_positions_reach_the_units_exact(ranks, layout):
    for saw, tables, num_units in ranks.run(positions, layout.num_ranks, layout.text):
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
@every_layout(*FEW)
def test_inputs_and_outputs_are_cast_as_asked(ranks, layout, how, seen):
    precision = Precision(storage="float32", compute="bfloat16", reduce="float32", **how)
    for found in ranks.run(dtypes, layout.num_ranks, layout.text, precision):
        assert found == (*seen, torch.int64)


@every_layout(*FEW)
def test_an_output_is_cast_where_nothing_else_is(ranks, layout):
    for found in ranks.run(dtypes, layout.num_ranks, layout.text, Precision(output="float64")):
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
        model = build("reference")
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
@every_layout(*FEW)
def test_what_is_stored_has_the_storage_dtype_and_buffers_stay_fp32(ranks, layout, storage):
    dtype = getattr(torch, storage)
    for found in ranks.run(stored, layout.num_ranks, layout.text, storage):
        assert found == {"params": {dtype}, "moments": {dtype}, "buffers": {torch.float32}}


# ---- torch's own words -------------------------------------------------------------------------------------------


class Positioned(nn.Module):
    """A block of a user's model: positions as floats, given to each block; the scale is the one thing in float32 in it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, position: Tensor, *, bias: Tensor | None = None) -> Tensor:
        self.saw = position.dtype
        angle = (position / 4096).cos().unsqueeze(1).to(x.dtype)
        return x + self.out(x * angle) + (0 if bias is None else bias.to(x.dtype))


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Positioned(), Positioned()])

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(4090.0, 4090.0 + len(x), dtype=torch.float32)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, position, bias=torch.full((4,), 0.1))
        return x


def with_positions(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return WithPositions().to(dtype)


def by_policy(policy: MixedPrecisionPolicy, layout: str, remat: str | None = None):
    """Gradients of ``parallelize`` with a policy of torch, those of torch's ``fully_shard`` with it, and what was warned of."""
    data = torch.linspace(-1, 1, 32).view(8, 4)
    with init(layout, device="cpu", timeout_s=30) as world:
        mine = data.chunk(world.size)[world.rank]
        plain = with_positions()
        for block in plain.blocks:
            fully_shard(block, mesh=world.mesh["dp_shard"], mp_policy=policy)
        fully_shard(plain, mesh=world.mesh["dp_shard"], mp_policy=policy)
        plain(mine).float().pow(2).sum().backward()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            units = Sharding(engine="fsdp2", min_unit_bytes=0)
            model = parallelize(with_positions(), world, precision=policy, sharding=units, remat=remat)
            with window(model, [{"x": mine}], count=len) as w:
                for batch in w:
                    out = model(batch["x"])
                    out.float().pow(2).sum().backward()
        ours = {name: whole(param.grad) for name, param in runtime_of(model).parameters.items()}
        torchs = {name: whole(param.grad) * world.size for name, param in plain.named_parameters()}  # it averages
        said = [str(w.message) for w in warned if "cast_inputs" in str(w.message) or "summed" in str(w.message)]
        return ours, torchs, (out.dtype, model.blocks[0].saw), said


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)),
        ((torch.bfloat16, torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)),
        ((torch.float64, torch.float64), (torch.float64, torch.float64)),
        ((), (torch.float32, torch.float32)),
    ],
)
def test_a_policy_of_torch_means_what_fully_shard_does_with_it(ranks, policy, dtypes):
    for ours, torchs, seen, said in ranks.run(by_policy, 2, MixedPrecisionPolicy(*policy), "dp_shard=2"):
        assert seen == dtypes
        for name, grad in torchs.items():
            assert torch.equal(ours[name], grad), name
        assert len(said) <= 3
    ours, _, _, said = ranks.run(by_policy, 1, MixedPrecisionPolicy(*policy), "dp_shard=1", "full")[0]
    if policy[:1] == (torch.bfloat16,):
        assert "casts the input 'position' of unit 'blocks.0' from float32 to bfloat16" in said[-2]
        assert "values change by up to 6 (the largest is 4097)" in said[-2]
        assert "the input 'bias'" in said[-1] and not any("'x'" in text for text in said)
        assert len(said) == (
            3 if policy[1] == torch.bfloat16 else 2
        )  # of each argument once, though there are two blocks
    else:
        assert not said
    if policy[:1] == (torch.float64,):
        plain = with_positions(torch.float64)
        plain(torch.linspace(-1, 1, 32, dtype=torch.float32).double().view(8, 4)).pow(2).sum().backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(ours[name].double(), param.grad, rtol=1e-6, atol=1e-6)


class ByKeyword(nn.Module):
    """A block that is called as those of transformers are: all but the first input by keyword, some in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, position: Tensor, mask: Tensor, more: dict[str, Tensor]) -> Tensor:
        self.saw = [t.dtype for t in (x, position, mask, *more.values())]
        angle = (position / 4096).cos().unsqueeze(1).to(x.dtype)
        return x + self.out(x * angle).masked_fill(mask, 0) + more["bias"].to(x.dtype)


class OfKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([ByKeyword(), ByKeyword()])

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(4090.0, 4090.0 + len(x))
        for block in self.blocks:
            x = block(x, position=position, mask=torch.zeros(4) > 1, more={"bias": torch.full((4,), 0.1)})
        return x


def by_keyword():
    """Output and dtypes in the first block: of torch's fully_shard, of units that are cast alike, of a part that is in float32
    around it."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found = []
    with init("dp_shard=1", device="cpu") as world, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cast_inputs='units' casts")
        data = torch.linspace(-1, 1, 16).view(4, 4)
        plain = OfKeywords()
        for block in plain.blocks:
            fully_shard(block, mesh=world.mesh["dp_shard"], mp_policy=half)
        fully_shard(plain, mesh=world.mesh["dp_shard"], mp_policy=half)
        units = Sharding(engine="fsdp2", units="ByKeyword")
        ours = parallelize(OfKeywords(), world, precision=half, sharding=units)
        part = Precision(parts={"blocks.0": "bf16"})
        for model in (plain, ours, parallelize(OfKeywords(), world, precision=part, sharding=units)):
            out = model(data).detach()
            found.append((out.tolist(), out.dtype, model.blocks[0].saw))
    return found


def test_inputs_by_keyword_are_cast_as_fully_shard_casts_them(ranks):
    plain, ours, part = ranks.run(by_keyword, 1)[0]
    half = torch.bfloat16
    assert ours == plain and plain[2] == [half, half, torch.bool, half]
    assert part[1:] == (torch.float32, plain[2])


class InPlace(nn.Linear):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts += 1
        return super().forward(x)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlace(4, 4), InPlace(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        self.counts = torch.zeros(3)
        for block in self.blocks:
            x = block(x, self.counts)
        return x


def in_double(layout: str):
    """Float64 from words, inputs of units cast, a part in another precision in one of them: parity with one process."""
    with init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(1)
        precision = Precision(storage=torch.float64, compute=torch.float64, reduce=torch.float64, cast_inputs="units")
        model = parallelize(Counted(), world, precision=precision, sharding=BLOCKS)
        with window(model, [{"x": torch.full((2, 4), 1.0 + world.rank)}], count=len) as w:
            for batch in w:
                model(batch["x"]).pow(2).sum().backward()
        return {name: whole(param.grad) for name, param in runtime_of(model).parameters.items()}, model.counts


def test_inputs_of_units_are_cast_and_what_they_change_in_place_counts(ranks):
    torch.manual_seed(1)
    plain = Counted().double()
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).pow(2).sum().backward()
    for grads, counts in ranks.run(in_double, 2, "dp_shard=2"):
        assert torch.equal(counts, torch.full((3,), 2.0))
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


def summed_in(reduce: str | None, compute: str | None):
    """A weight whose gradient is 256 on one rank and 0.5 on the other."""
    with init("dp_shard=2", device="cpu", timeout_s=30) as world:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = parallelize(
                nn.Linear(1, 2, bias=False), world, precision=Precision(storage="fp32", compute=compute, reduce=reduce)
            )
        with window(model, [{"x": torch.tensor([[256.0 if world.is_main else 0.5]])}], count=len) as w:
            for batch in w:
                model(batch["x"]).sum().backward()
        grad = whole(model.weight.grad)[0].item()
        return grad, [str(w.message) for w in warned if "summed" in str(w.message)]


@pytest.mark.parametrize(
    ("reduce", "compute", "total"),
    [("bf16", None, 256.0), (torch.bfloat16, "bf16", 256.0), (None, "bf16", 256.0), ("fp32", "bf16", 256.5)],
)
def test_sums_of_gradients_in_half_are_warned_of(ranks, reduce, compute, total):
    (main, said), (other, silent) = ranks.run(summed_in, 2, reduce, compute)
    assert main == other == total and not silent
    if total == 256.5:
        assert not said
    else:
        assert "gradients are summed in bfloat16" in said[0] and "below 1/512 of the sum is lost" in said[0]


def test_torchs_dtypes_and_its_policy_are_words_too():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    meant = Precision(compute="bf16", reduce="fp32", output="fp32", cast_inputs="units")
    assert Precision(policy) == precision_of(policy) == Parallel(precision=policy).precision == meant
    assert Precision(policy, storage="fp32", parts={"head": torch.float32}) == msgspec.structs.replace(
        meant, storage="float32", parts={"head": "float32"}
    )
    assert Precision(MixedPrecisionPolicy()) == Precision()
    assert Precision(MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False)).cast_inputs == "none"
    assert Precision(compute=torch.half) == Precision(compute="fp16")
    assert precision_of(torch.bfloat16) == Parallel(precision=torch.bfloat16).precision == precision_of("bf16")
    for given in (lambda: Precision(compute=torch.int32), lambda: precision_of(torch.int8)):
        with pytest.raises(ConfigError, match="int"):
            given()
    with pytest.raises(ConfigError, match="without compute"):
        Precision(cast_inputs="units")
