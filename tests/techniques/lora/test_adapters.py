"""Adapters: which layers have one, what they begin with, how tensor parallelism cuts them, and their numbers beside PEFT's."""

import copy
import dataclasses
import warnings

import models
import pytest
import torch
from techniques.lora import adapters
from torch import nn

import shardwise as sw
from shardwise.model.adapted import Adapter, adapted_layers, adapted_linear
from shardwise.model.layers import LAYER_FUNCTIONS, Further, Layer
from shardwise.techniques.lora.prepare import prepare
from shardwise.techniques.tp.search.layer_functions import _parts_differ, parts_differ

KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}


def with_lora(module, **options):
    return prepare(module, None, None, lora=sw.LoRA(**options))


def small():
    return nn.Sequential(
        nn.Embedding(32, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 32)
    )


# ---- which layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["1", "3"]),
        ({"exclude": ("3",)}, ["1"]),
        ({"targets": "3,5"}, ["3", "5"]),
        ({"targets": ("0", "1")}, ["0", "1"]),
    ],
)
def test_targets(options, names):
    module = with_lora(small(), rank=2, **options)
    assert list(adapted_layers(module)) == names
    assert all(("lora_" in name) == param.requires_grad for name, param in module.named_parameters())


def test_last_parts_of_names_and_patterns_mean_layers_and_all_linear_leaves_heads_and_routers_out():
    llama = models.get("llama").build
    assert len(adapted_layers(with_lora(llama(), targets="q_proj,v_proj"))) == 2 * len(llama().model.layers)
    assert len(adapted_layers(with_lora(llama(), targets=("layers.0.*.*_proj",)))) == 7
    assert not any("lm_head" in name for name in adapted_layers(with_lora(llama())))
    gates = with_lora(models.get("experts").build())
    assert adapted_layers(gates) and not any(name.endswith(("gate", "router")) for name in adapted_layers(gates))


def test_names_classes_and_answers_of_the_base_stay():
    module = models.get("gpt2").build().double()
    before, answer = (
        set(module.state_dict()),
        models.get("gpt2").forward(module, models.get("gpt2").windows(1, 1)[0][0]),
    )
    classes = {name: type(child).__name__ for name, child in module.named_modules()}
    with_lora(module, rank=2, dora=True)
    assert before <= set(module.state_dict())
    assert all(type(module.get_submodule(name)).__name__ == cls for name, cls in classes.items())
    layer = module.transformer.h[0].attn.c_attn
    assert isinstance(layer, type(models.get("gpt2").build().transformer.h[0].attn.c_attn))
    again = models.get("gpt2").forward(copy.deepcopy(module), models.get("gpt2").windows(1, 1)[0][0])
    assert torch.allclose(again.logits, answer.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"targets": "q_proj"}, sw.PlanError, "it means no layer of this model"),
        ({"targets": "4"}, sw.PlanError, "it means 4, which is no linear layer and no embedding"),
        ({"exclude": ("5",)}, sw.PlanError, "it means no layer"),
        ({"exclude": ("1", "3")}, sw.PlanError, "it excludes all targets"),
        ({"train": ("nrm",)}, sw.PlanError, "it means no layer"),
        ({"ranks": {"0": 4}}, sw.PlanError, r"LoRA\(ranks=\('0',\)\)"),
        ({"alphas": {"1": 4.0, "nrm": 4.0}}, sw.PlanError, r"LoRA\(alphas=\('nrm',\)\)"),
        ({"targets": "0", "dora": True}, sw.UnsupportedError, "DoRA is not defined for embeddings"),
    ],
)
def test_names_that_mean_no_layer(options, error, words):
    with pytest.raises(error, match=words):
        with_lora(small(), **options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "with 0 nothing is trained"),
        ({"alphas": {"q": 0.0}}, "with 0 nothing is trained"),
        ({"ranks": {"q": 0}}, "ranks"),
        ({"rank_pattern": {"q": 4}}, "it is called ranks here"),
        ({"targets": ()}, "means no layer"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"name": "a.b"}, "one part of a tensor's name"),
        ({"init": "pissa"}, "init='pissa'"),
        ({"r": 16}, "it is called rank here"),
        ({"lora_alpha": 16}, "it is called alpha here"),
        ({"target_modules": ["q"]}, "it is called targets here"),
        ({"modules_to_save": ["q"]}, "is called train here"),
        ({"task_type": "CAUSAL_LM"}, "leave it out"),
    ],
)
def test_options_that_cannot_be(given, words):
    with pytest.raises(sw.ConfigError, match=words):
        sw.LoRA(**given)


def test_a_number_is_no_lora():
    with pytest.raises(sw.ConfigError, match=r"lora=16.*\n.*\n.*sw.LoRA\(rank=16\)"):
        sw.verify(small, "dp_shard=2", batches=[[{}]], lora=16)


def test_layers_that_an_adapter_would_not_be_part_of():
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "linear": nn.Linear(8, 8)})
    assert list(adapted_layers(with_lora(copy.deepcopy(attention)))) == ["linear"]
    with pytest.raises(sw.UnsupportedError, match=r"attention.out_proj: .*\n.*reads its weight and does not call it"):
        with_lora(attention, targets="out_proj")
    patched = small()
    patched[1].forward = lambda x: x
    with pytest.raises(sw.UnsupportedError, match=r"1: .*\n.*a forward was set on it"):
        with_lora(patched, targets="1")
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(sw.UnsupportedError, match=r"0: .*\n.*computed from other tensors"):
        with_lora(computed, targets="0")
    with pytest.raises(sw.UsageError, match="a module that has adapters"):
        with_lora(with_lora(small()))


def test_the_fast_path_of_a_transformer_encoder_does_not_pass_over_adapters():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2).double()
    adapters.drawn(with_lora(encoder, targets="linear1,linear2"))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        answer = encoder.eval()(x)
    with sw.adapter_off(encoder), torch.no_grad():
        assert not torch.allclose(answer, encoder(x), rtol=0, atol=1e-3)
    with torch.enable_grad():
        assert torch.allclose(answer, encoder.train()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("quantize", [None, pytest.param("nf4", marks=pytest.mark.soak)])
def test_a_weight_that_other_code_reads_is_refused_by_the_name_of_its_layer(ranks, quantize):
    """Mamba multiplies by the weight of ``dt_proj`` itself: its adapter would have no part in that, and no error. Reading a weight's dtype is
    no such use, as T5 does (see the parity)."""
    model = models.get("mamba")
    given = {"batches": model.windows(1, 2), "loss": model.loss, "count": model.count, "forward": model.forward}
    with pytest.raises(
        sw.RankError, match=r"(?s)mixer\.dt_proj: .*matmul reads past its layer.*LoRA\(exclude=\('dt_proj',\)\)"
    ):
        sw.verify(model.build, "dp_shard=2", **given, run=ranks.run, lora=sw.LoRA(rank=2), quantize=quantize)


@pytest.mark.soak
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_the_other_layers_of_such_a_model_train(ranks, quantize):
    model = models.get("mamba")
    given = {"batches": model.windows(1, 2), "loss": model.loss, "count": model.count, "forward": model.forward}
    lora = sw.LoRA(rank=2, exclude=("dt_proj",))
    sw.verify(model.build, "tp=2", **given, run=ranks.run, lora=lora, quantize=quantize)


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbers_are_those_of_peft(name, kind):
    peft = pytest.importorskip("peft")
    options = {"targets": ("c_attn", "c_proj", "c_fc") if name == "gpt2" else ("q_proj", "v_proj", "down_proj")}
    ours = adapters.whole(name, sw.LoRA(rank=3, alpha=5, **options, **KINDS[kind]))
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=list(options["targets"]), use_rslora=kind == "rslora", use_dora=kind == "dora"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' next version, and of Conv1D
        theirs = peft.get_peft_model(models.get(name).build().double(), config).double()
    named = dict(theirs.named_parameters())
    for key, value in ours.state_dict().items():
        layer = next((layer for layer in adapted_layers(ours) if key.startswith(f"{layer}.")), None)
        inside = "lora_" in key or layer is None
        target = f"base_model.model.{key if inside else key.replace(f'{layer}.', f'{layer}.base_layer.')}"
        if target in named:
            named[target].data.copy_(value)
    batch = models.get(name).windows(1, 1)[0][0]
    losses = []
    for module in (ours, theirs):
        logits = module(input_ids=batch["input_ids"]).logits
        logits.square().mean().backward()
        losses.append(logits.detach())
    assert float((losses[0] - losses[1]).abs().max()) <= (1e-12 if kind == "dora" else 0.0)
    for key, param in ours.named_parameters():
        if "lora_" in key:
            want = named[f"base_model.model.{key}"].grad
            assert float((param.grad - want).abs().max()) <= 1e-12 * float(want.abs().max()), key


@pytest.mark.parametrize("builds", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_what_adapters_begin_with_is_the_same_under_every_layout(ranks, builds):
    lora = sw.LoRA(rank=2, dora=True)
    found = [
        ranks.run(adapters.first_values, size, layout, "llama", lora, builds)[0]
        for layout, size in (("dp_shard=1", 1), ("dp_shard=2", 2), ("tp=2", 2))
    ]
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in found[0].items())
    assert all(bool(value.any()) == ("lora_B" not in key) for key, value in found[0].items())
    spread = torch.stack([v.std() * v.shape[1] ** 0.5 for key, v in found[0].items() if "lora_A" in key])
    assert float(spread.mean()) == pytest.approx(3**-0.5, rel=0.2)  # uniform, as of nn.Linear: 1 / sqrt(3 x inputs)


@pytest.mark.quick("dp_shard=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_the_base_answers_alone(ranks, layout):
    lora, model = sw.LoRA(rank=2, dora=True), models.get("llama")
    base, answer = ranks.run(adapters.base_answer, 2, layout, "llama", lora)[0]
    torch.manual_seed(1)
    want = model.forward(model.build().double(), model.windows(1, 1)[0][0]).logits.detach()
    assert float((base - want).abs().max()) < 1e-12 < float((answer - want).abs().max())


def test_a_block_that_runs_again_in_backward_is_without_adapters_where_it_was(ranks):
    expected, *found = (
        ranks.run(adapters.trained_beside, 1, "dp_shard=1", remat)[0] for remat in (None, "full", "selective")
    )
    assert len(expected) == 7
    for each in found:
        assert each.keys() == expected.keys() and all(torch.equal(each[name], expected[name]) for name in each)


def test_adapter_off_of_a_model_without_adapters():
    with pytest.raises(sw.UsageError, match="none of its layers has an adapter"), sw.adapter_off(small()):
        pass


def test_adapter_off_where_more_than_adapters_is_trained():
    """Ours keeps no copy of the base; PEFT's does, of whole modules."""
    import peft

    x = torch.ones(2, 8)
    with sw.init("dp_shard=1", device="cpu") as world:
        for train, name in (("1", "1.weight"), ("0.bias", "0.bias")):
            lora = sw.LoRA(rank=2, targets="0", train=train)
            module = sw.parallelize(torch.nn.Sequential(*pair()), world, lora=lora, example={"input": x})
            with pytest.raises(sw.UnsupportedError, match=f"^{name}: adapter_off"), sw.adapter_off(module):
                pass
        for bias in ("none", "lora_only"):
            base = torch.nn.Sequential(*pair())
            want = base(x)
            config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"], bias=bias)
            module = sw.parallelize(peft.get_peft_model(base, config), world, example={"input": x})
            with torch.no_grad():
                for param in module.parameters():
                    param.add_(1) if param.requires_grad else None
            if bias == "none":
                with sw.adapter_off(module):
                    assert torch.equal(module(x), want)
                assert not torch.allclose(module(x), want)
            else:
                with pytest.raises(sw.UnsupportedError, match=r"base_layer\.bias: adapter_off"), sw.adapter_off(module):
                    pass


def pair():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)


def test_a_frozen_base_is_stored_as_it_is_computed(ranks):
    for layout in ("dp_shard=2", "tp=2"):
        found, loss = ranks.run(adapters.stored, 2, layout, {"lm_head": "fp32"})[0]
        for name, (dtype, has_no_grad) in found.items():
            assert dtype == (torch.float32 if "lora_" in name or name.startswith("lm_head") else torch.bfloat16), name
            assert has_no_grad or "lora_" in name
        assert loss > 0


# ---- tensor parallelism ------------------------------------------------------------------------------------------------


def test_no_sum_is_added(ranks):
    """Of three blocks: as many sums as the layers without adapters need where norms are trained, or one less: nothing before the first
    adapter needs a gradient."""
    plain, _, alone = ranks.run(adapters.sums_per_micro_batch, 2, "tp=2", "llama", None)[0]
    found, cut, held = ranks.run(adapters.sums_per_micro_batch, 2, "tp=2", "llama", sw.LoRA(rank=2))[0]
    assert plain - 1 <= found <= plain and cut > 20 and held <= alone + 0.03


def test_masks_of_a_part_of_the_inputs_differ_between_ranks_and_those_of_whole_inputs_do_not(ranks):
    (up, down, up_again, down_again), (up_2, down_2, *_) = ranks.run(adapters.dropped, 2, "tp=2")
    assert torch.equal(up, up_2) and up.shape == (4, 64)
    assert down.shape == down_2.shape == (4, 128) and not torch.equal(down, down_2)
    assert not torch.equal(up, up_again) and not torch.equal(down, down_again)
    assert 0.4 < float(down_again.double().mean()) < 0.6


ADAPTER_ALONE = (True, True, True, False, False, False)  # of the further tensors of the function


def layer_of(how, magnitude):
    roles = LAYER_FUNCTIONS[adapted_linear][: 3 if magnitude else 2]
    return Layer(
        "w", "b", how.out_dim, further=tuple(Further("t", role) for role in roles), function=(adapted_linear, how)
    )


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_the_function_is_right_on_parts(out_dim, magnitude, degree):
    assert parts_differ(layer_of(Adapter(0.7, out_dim=out_dim), magnitude), degree) == ""


@pytest.mark.parametrize(
    "roles",
    [
        (("in", None), ("out", None), ("out",)),
        ((None, "in"), (None, "out"), ("out",)),
        ((None, "in"), ("out", None), ("in",)),
        ((None, "in"), (None, None), ("out",)),
        ((None, None), ("out", None), ("out",)),
    ],
)
def test_a_wrong_role_is_seen(roles, monkeypatch):
    monkeypatch.setitem(LAYER_FUNCTIONS, adapted_linear, (*roles, *LAYER_FUNCTIONS[adapted_linear][3:]))
    try:
        assert _parts_differ.__wrapped__(adapted_linear, Adapter(0.7), ADAPTER_ALONE, 2)
    except RuntimeError as error:
        assert "shape" in str(error) or "size" in str(error)


def test_norms_of_a_part_of_the_inputs_are_seen(monkeypatch):
    """The function that does not sum them over the ranks."""

    def alone(*given):
        *rest, how, training = given
        return adapted_linear(*rest, dataclasses.replace(how, sum_over_inputs=None), training)

    monkeypatch.setitem(LAYER_FUNCTIONS, alone, LAYER_FUNCTIONS[adapted_linear])
    assert "does not give the outputs" in _parts_differ.__wrapped__(alone, Adapter(0.7), ADAPTER_ALONE, 2)


@pytest.mark.parametrize("how", ["up", "down"])
def test_a_weight_that_is_used_otherwise_where_no_trial_looked_is_an_error(ranks, how):
    assert ranks.run(adapters.branching, 2, "neither") == ["", ""]
    for text in ranks.run(adapters.branching, 2, how):
        assert text.startswith(f"{how}.weight: ") and "cut over tp" in text
        assert ("einsum of a weight" in text) == (
            how == "down"
        )  # by the module that calls its layer; else what is not called is missed


# ---- what a reader with other models found -----------------------------------------------------------------------------


def test_layers_are_called_by_keyword_as_those_of_torch_are():
    linear, table = nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"a": nn.Embedding(4, 4)})
    adapters.drawn(with_lora(linear, targets="a"))
    adapters.drawn(with_lora(table, targets="a"))
    x, ids = torch.randn(2, 4), torch.tensor([1, 2])
    assert torch.equal(linear.a(input=x), linear.a(x)) and torch.equal(table.a(input=ids), table.a(ids))


def test_adapter_off_within_another():
    module = adapters.drawn(with_lora(small()))
    ids = torch.tensor([[1, 2]])
    answer = module(ids)
    with sw.adapter_off(module):
        base = module(ids)
        with sw.adapter_off(module):
            assert torch.equal(module(ids), base)
        assert torch.equal(module(ids), base)
    assert torch.equal(module(ids), answer) and not torch.equal(answer, base)


def test_a_whole_name_means_one_layer_and_a_class_all_of_it():
    towers = nn.ModuleDict({"up": nn.Linear(4, 4), "vision": nn.ModuleDict({"up": nn.Linear(4, 4)})})
    assert list(adapted_layers(with_lora(copy.deepcopy(towers), targets=("up",)))) == ["up"]
    assert list(adapted_layers(with_lora(copy.deepcopy(towers), targets=("vision.up",)))) == ["vision.up"]
    assert len(adapted_layers(with_lora(copy.deepcopy(towers), targets=(nn.Linear,)))) == 2
    assert len(adapted_layers(with_lora(towers, targets=("Linear",)))) == 2


class Clipped(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-20, 20)


class ByDims(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.dim() == 3 else 1)


class ReadsLate(nn.Module):
    """Only the third block reads its weight past the layer."""

    def __init__(self, number):
        super().__init__()
        self.number, self.up = number, nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x) if self.number < 2 else nn.functional.linear(x, self.up.weight, self.up.bias)


def test_merges_and_late_readers_that_would_be_wrong_are_refused(ranks):
    for kind in ("Clipped", "ByDims"):
        assert "a forward of its own" in ranks.run(adapters.merged_or_not, 1, kind)[0]
    assert ranks.run(adapters.merged_or_not, 1, "Linear")[0] == ""
    assert "blocks.2.up: an adapter beside a weight that other code reads" in ranks.run(adapters.late_reader, 2)[0]


def test_a_checkpoint_is_not_loaded_into_adapters_of_another_scale(ranks, tmp_path):
    options = [{"alpha": 4}, {"alpha": 4, "dropout": 0.1}, {"alpha": 9}, {"alphas": {"up": 2, "down": 6}}]
    found = ranks.run(adapters.resumed, 2, str(tmp_path), options)[0]
    assert found[:4] == [""] * 4  # resumed, and its weights loaded
    assert len(found) == 8 and all("scale of adapters 2" in text and "made with 4.5" in text for text in found[4:6])
    assert all("scale of adapters 2" in text and "made with 1 (up)" in text for text in found[6:])  # of the same mean
