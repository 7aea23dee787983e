"""Frozen weights in 4 bits: their values, the same bytes under every layout, training as in one process."""

import copy
import itertools
import re

import models
import pytest
import torch
from techniques.lora.test_parity import RANKS
from techniques.lora.test_parity import compared as compared_with
from techniques.quantize import packed
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.model import nf4, read_anatomy
from shardwise.model.adapted import Adapter, adapted_linear
from shardwise.model.layers import BUFFER, LAYER_FUNCTIONS, Further, Layer
from shardwise.model.packed import packed_layers
from shardwise.techniques.lora.prepare import prepare as with_adapters
from shardwise.techniques.lora.prepare import values_of_proof
from shardwise.techniques.quantize.prepare import prepare
from shardwise.techniques.tp.search.layer_functions import parts_differ

LOW = sw.LoRA(rank=1)
SHAPES = [(7, width) for width in (*range(1, 36), 63, 64, 65, 100, 128, 200)] + [(129, 172), (64, 896), (300, 128)]


def with_nf4(module, **options):
    return prepare(module, None, None, quantize=sw.Quantize(**options))


def defined(weight):
    """The values by their definition, number by number where it matters: blocks of the flat tensor, the nearest of 16 values, scales in two
    stages."""
    flat = weight.float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = blocks.abs().amax(1)
    table = torch.tensor(nf4.TABLE, dtype=torch.float64)
    inverse = 1 / largest.clamp(min=1e-38)
    codes = (blocks * inverse[:, None]).double()[..., None].sub(table).abs().argmin(-1)
    mean = largest.double().mean().float()
    groups = functional.pad(largest - mean, (0, -len(largest) % 256)).view(-1, 256)
    outer = groups.abs().amax(1)
    values = torch.tensor(nf4.dynamic_map())
    relative = torch.where(outer[:, None] > 0, groups / outer[:, None], 0.0).double()
    nearest = (relative[..., None] - values.double()).abs().argmin(-1).flatten()[: len(largest)]
    scales = values[nearest] * outer.repeat_interleave(256)[: len(largest)] + mean
    return (torch.tensor(nf4.TABLE)[codes] * scales[:, None]).flatten()[: len(flat)].view(weight.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_the_whole_and_of_parts_are_those_of_the_definition(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.05
    weight[0] *= 3
    weight[-1, 0] = 0
    codes, scales, outer, mean = nf4.pack(weight)
    want, whole = defined(weight), nf4.Packing.of(shape)
    assert codes.shape == whole.codes_shape and scales.shape == whole.scales_shape
    assert torch.equal(nf4.unpack(codes, scales, outer, mean, whole, torch.float32), want)
    assert torch.equal(nf4.unpack(codes, scales, outer, mean, whole, torch.bfloat16), want.bfloat16())
    few = ((1, 2), (shape[0] - 3, 3))  # the last ones are in another group of scales, of large shapes
    for first, rows in itertools.product({0, 2 * (shape[1] // 4)}, (few, ((1, shape[0] - 1),))):
        part = nf4.Packing(shape, rows, first, shape[1] - first)
        at = [row for start, number in rows for row in range(start, start + number)]
        mine = nf4.unpack(codes[at][:, first // 2 :], scales, outer, mean, part, torch.float32)
        assert torch.equal(mine, want[at][:, first:])


def nibbles(codes, shape):
    """The codes of a weight, one in each byte: rows are filled here, and the flat weight is by bitsandbytes."""
    return torch.stack([codes >> 4, codes & 15], -1).reshape(-1, codes.shape[-1] * 2)[..., : shape[1]].reshape(-1)


def test_codes_are_those_of_bitsandbytes_and_each_reads_the_bytes_of_the_other():
    theirs = pytest.importorskip("bitsandbytes.functional")
    shapes = [shape for shape in SHAPES if shape[0] * shape[1] > 1]
    assert len(shapes) >= 40
    for shape in shapes:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.05
        codes, scales, outer, mean = nf4.pack(weight)
        whole = nf4.Packing.of(shape)
        for nested in (True, False):
            packed_, state = theirs.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
            flat = nibbles(packed_.view(1, -1), (1, weight.numel()))
            assert torch.equal(nibbles(codes, shape), flat), (shape, nested)
            if not nested or shape[1] % 2:
                continue
            rest = state.absmax.view(scales.shape), state.state2.absmax, state.offset
            values = nf4.unpack(packed_.view(codes.shape), *rest, whole, torch.float32)
            largest = theirs.dequantize_blockwise(state.absmax, state.state2) + state.offset
            of_numbers = largest.repeat_interleave(64)[: weight.numel()]
            assert torch.equal(values.view(-1), state.code[flat.long()] * of_numbers), shape
            if shape[1] % 64 and shape[1] % 16 == 0:
                continue  # on a CPU with AVX-512 bitsandbytes 0.50 takes blocks of a row by itself there, and not those it has made
            assert torch.equal(values, theirs.dequantize_4bit(packed_, state)), shape
            state.absmax, state.state2.absmax, state.offset = scales.view(-1), outer, mean
            of_ours = theirs.dequantize_4bit(codes.view(packed_.shape), state)
            assert torch.equal(of_ours, nf4.unpack(codes, scales, outer, mean, whole, torch.float32)), shape


def test_zeros_stay_zeros_and_one_block_is_exact_at_its_ends():
    weight = torch.zeros(3, 64)
    assert not nf4.unpack(*nf4.pack(weight), nf4.Packing.of((3, 64)), torch.float32).any()
    weight[1] = torch.linspace(-2, 2, 64)
    values = nf4.unpack(*nf4.pack(weight), nf4.Packing.of((3, 64)), torch.float32)
    assert not values[[0, 2]].any()


@pytest.mark.parametrize(
    ("layouts", "kinds"),
    [
        pytest.param(("dp_shard=3", "tp=2"), (True,), id="few"),
        pytest.param(tuple(RANKS), (True, False), id="all", marks=pytest.mark.soak),
    ],
)
def test_a_meta_weight_is_packed_in_operations_that_give_the_same_bytes(ranks, layouts, kinds):
    """A builder's values are made of the record of its constructor, a module's by packing it."""
    found = {}
    for builds in kinds:
        for layout in ("dp_shard=1", *layouts):
            size = {"dp_shard=1": 1, **RANKS}[layout]
            digests, cut, held = ranks.run(packed.digests, size, layout, "llama", builds)[0]
            first = found.setdefault(builds, (digests, held))
            assert digests == first[0]
            assert cut > 10 if layout == "tp=2" else cut == 0 or "tp" in layout
            assert held < 0.75 * first[1] if "dp_shard" in layout and size > 1 else held <= first[1]


KINDS = {"lora": {}, "dora": {"dora": True}}
FEW = ("dp_shard=2", "dp_shard=3", "tp=2", "dp_shard=2,tp=2")


def compared(ranks, name, layout, lora=None, **options):
    return compared_with(ranks, name, layout, lora or sw.LoRA(rank=2), quantize="nf4", **options)


@pytest.mark.quick("llama-dp_shard=2-lora", "linears: kv-2-dp_shard=2,tp=2-lora")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", [each if each in FEW else pytest.param(each, marks=pytest.mark.soak) for each in RANKS]
)
@pytest.mark.parametrize(
    "name",
    ["llama", "t5", "nanogpt", "linears: kv-2", *(pytest.param(n, marks=pytest.mark.soak) for n in ("qwen3", "bert"))],
)
def test_models(ranks, name, layout, kind):
    compared(ranks, name, layout, sw.LoRA(rank=2, **KINDS[kind]), max_grad_norm=0.05)


@pytest.mark.quick("fused-tp=2", "remat0-dp_shard=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize(
    "options",
    [
        {"remat": "full"},
        pytest.param({"remat": "selective"}, marks=pytest.mark.soak),
        {"fused": True},
        pytest.param({"compile": sw.Compile(backend="aot_eager", fullgraph=True)}, marks=pytest.mark.soak),
        {"lora": sw.LoRA(rank=2, targets="q_proj,down_proj", train=("*norm*",))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_beside_other_options(ranks, options, layout):
    compared(ranks, "llama", layout, **options)


@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.soak)])
def test_mixed_precision_trains_and_bytes_stay_bytes(ranks, layout):
    losses, same, dtypes, text = ranks.run(packed.memory_of_step, RANKS[layout], layout, "llama")[0]
    assert same and losses[-1] < losses[0] - 0.05
    assert {dtype for key, dtype in dtypes.items() if "weight_nf4" in key} == {"torch.uint8"}
    assert {dtype for key, dtype in dtypes.items() if "lora_" in key} == {"torch.float32"}
    assert "nf4: " in text and "stays plain" in text
    plain = sum(p.numel() for p in models.get("llama").build().parameters())
    words = re.search(r"([\d,]+) of ([\d,]+) numbers", text).groups()
    trained, of_all = (int(word.replace(",", "")) for word in words)
    assert of_all == plain + trained  # those of packed weights, and not their bytes


def test_units_gather_bytes(ranks):
    """Of a block in bf16 a bit more than a quarter is gathered: half a byte of each number, for two."""
    plain, adapted, packed_ = ranks.run(
        packed.gathered_bytes, 2, [{}, {"lora": LOW}, {"lora": LOW, "quantize": "nf4"}]
    )[0]
    assert plain >= 2 * 4 * 512 * 512 and plain < adapted < 1.01 * plain
    assert packed_ <= 0.27 * plain


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of torch, about its own
@pytest.mark.parametrize("bits", [False, True], ids=["plain", "nf4"])
def test_a_compiled_block_has_no_graph_break(bits):
    block = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    with_adapters(block, None, None, lora=sw.LoRA(rank=2))
    values_of_proof(block)
    block = with_nf4(block) if bits else block
    x, found = torch.randn(3, 64), []
    for each in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        y = each(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [p for p in block.parameters() if p.requires_grad])])
    torch._dynamo.reset()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True)) and len(found[0]) == 5


def test_the_backward_keeps_bytes(monkeypatch):
    layer = with_nf4(nn.ModuleDict({"layer": nn.Linear(64, 32).requires_grad_(False)})).layer
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(torch.randn(4, 64, requires_grad=True))
    assert {tensor.dtype for tensor in kept if tensor.dim() == 2} == {torch.uint8}
    y.sum().backward()


def test_a_packed_weight_can_be_read_where_it_is_gathered_and_not_set(ranks):
    module = nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 8).requires_grad_(False))
    plain = copy.deepcopy(module)
    with_nf4(module)
    assert module[0].weight.shape == (32, 64) and module[0].weight.dtype == torch.float32
    assert torch.equal(module[0].weight, defined(plain[0].weight))
    assert not isinstance(module[0].weight, nn.Parameter) and "0.weight" not in dict(module.named_parameters())
    for read, written in ranks.run(packed.weight_outside, 2, "dp_shard=2"):
        assert "read outside of a forward" in read and "setting the weight" in written


# ---- which weights ------------------------------------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 32))


def test_what_is_packed_and_what_stays_plain():
    module = with_nf4(small().requires_grad_(False))
    assert list(packed_layers(module)) == ["1", "3"]  # 4 makes a number for each row of the embedding
    assert list(packed_layers(with_nf4(small().requires_grad_(False), keep=("3",)))) == ["1"]
    assert list(packed_layers(with_nf4(small().requires_grad_(False), targets="3,4"))) == ["3", "4"]
    trained = small().requires_grad_(False)
    trained[3].weight.requires_grad_()
    assert list(packed_layers(with_nf4(trained))) == ["1"]
    tied = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)}).requires_grad_(False)
    tied.b.weight = tied.a.weight
    assert list(packed_layers(with_nf4(tied))) == ["c"]


@pytest.mark.parametrize(
    ("options", "freezes", "error", "words"),
    [
        ({}, False, sw.PlanError, "its weight is trained"),
        ({"targets": "1"}, False, sw.UnsupportedError, "1: .*\n.*its weight is trained"),
        ({"targets": "9"}, True, sw.PlanError, r"Quantize\(targets=\('9',\)\)"),
        ({"targets": "2"}, True, sw.PlanError, "it means 2, which is no linear layer"),
        ({"keep": ("1", "3")}, True, sw.PlanError, "no weight that could be stored so"),
        ({"keep": ("7",)}, True, sw.PlanError, "it means no layer"),
    ],
)
def test_what_cannot_be_packed(options, freezes, error, words):
    with pytest.raises(error, match=words):
        with_nf4(small().requires_grad_(not freezes), **options)


def test_weights_that_are_not_finite_are_refused_by_name():
    module = small().requires_grad_(False)
    module[3].weight.data[2, 1] = float("nan")
    with pytest.raises(sw.UnsupportedError, match=r"3\.weight: a weight with NaN"):
        with_nf4(module)


@pytest.mark.parametrize("value", ["fp4", "int8", "4bit", True, 4])
def test_other_kinds_are_refused(value):
    with pytest.raises(sw.ConfigError, match="quantize="):
        sw.verify(small, "dp_shard=2", batches=[[{}]], quantize=value)
    with pytest.raises(sw.ConfigError, match="it is called keep here"):
        sw.Quantize(llm_int8_skip_modules=["a"])


# ---- tensor parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("num_further", [0, 2, 3])
def test_the_function_is_right_on_parts_of_bytes(num_further, degree):
    roles = LAYER_FUNCTIONS[adapted_linear]
    further = [*roles[:num_further], roles[3]]
    how = Adapter(0.7, packing=nf4.Packing.of((8, 8)))
    layer = Layer("w", "b", 0, further=tuple(Further("t", role) for role in further), function=(adapted_linear, how))
    assert BUFFER in roles and parts_differ(layer, degree) == ""


def test_inputs_of_which_a_byte_has_two_are_not_cut_between_them(ranks):
    """Of 6 inputs two ranks would have 3 each, half a byte of the second."""
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)).requires_grad_(False)
    with_adapters(module, None, None, lora=sw.LoRA(rank=2, targets="0,2"))
    with_nf4(module, targets="0,2")
    from shardwise.model.calling import run_on
    from shardwise.techniques.tp.search.cut_search import search

    found = search(module, run_on({"input": torch.randn(4, 8)}), 2)
    assert not found.regions and "two in a byte" in found.left["2.weight_nf4"]


def test_values_do_not_depend_on_the_default_dtype_or_a_default_device():
    """Tables are made once: a search for cuts runs code in float64 by default."""
    weight = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    want = defined(weight)
    for cached in (nf4._on, nf4._cells):
        cached.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        packed_ = nf4.pack(weight)
        values = nf4.unpack(*packed_, nf4.Packing.of((6, 70)), torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(values, want)
    with torch.device("meta"):
        assert torch.equal(nf4.unpack(*nf4.pack(weight), nf4.Packing.of((6, 70)), torch.float32), want)


def test_magnitudes_of_dora_are_the_norms_of_the_values_that_are_computed_with():
    module = nn.Sequential(nn.Linear(70, 6), nn.ReLU(), nn.Linear(6, 8))
    with_adapters(module, None, None, lora=sw.LoRA(rank=2, dora=True, targets="0,2"))
    plain = module[0].weight.detach().clone()
    with_nf4(module, targets="0,2")
    magnitude = module[0].lora_magnitude_vector["default"].weight
    assert torch.equal(magnitude, defined(plain).norm(dim=1)) and not torch.equal(magnitude, plain.norm(dim=1))


def test_bytes_count_as_the_numbers_that_they_stand_for():
    module = models.get("llama").build()
    plain = sum(param.numel() for param in module.parameters())
    made = with_nf4(with_adapters(module, None, None, lora=LOW))
    adapters = sum(param.numel() for name, param in made.named_parameters() if "lora_" in name)
    assert read_anatomy(made).numbers == plain + adapters > sum(param.numel() for param in made.parameters())
