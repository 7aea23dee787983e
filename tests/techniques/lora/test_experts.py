"""Adapters of experts that are stacked in one parameter, and of matrices that are in no layer."""

import warnings

import pytest
import torch
from techniques.lora import adapters, experts
from techniques.lora.experts import FAMILIES, STACKS
from techniques.lora.test_parity import RANKS, compared
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.model.adapted_parameters import OfParameter, adapted_weight, factors_of, merge_parameter_
from shardwise.techniques.lora.prepare import prepare

KINDS = {"lora": {}, "rslora": {"rslora": True}}
FEW = [("mixtral", "dp_shard=3", "rslora"), ("qwen3-moe", "dp_shard=2,tp=2", "lora")]
OPTIONS = {
    "nf4": {"quantize": "nf4"},
    "remat": {"remat": "full"},
    "every micro-batch": {"sharding": sw.Sharding(min_unit_bytes=0, sync_every_microbatch=True)},
    "adamw": {"optimizer": "adamw", "max_grad_norm": 0.1},
    "compile": {"compile": sw.Compile(backend="aot_eager")},
}


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("qwen3-moe-dp_shard=2,tp=2-lora")
@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.soak, id="-".join(case))
        for case in ((name, layout, kind) for name in FAMILIES for layout in RANKS for kind in KINDS)
    ],
)
def test_experts_train_as_in_one_process(ranks, name, layout, kind):
    lora = sw.LoRA(rank=2, alpha=3, experts=STACKS, **KINDS[kind])
    compared(ranks, "mixtral", layout, lora, build=FAMILIES[name], max_grad_norm=0.05)


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        pytest.param(option, layout, marks=() if (option, layout) == ("nf4", "tp=2") else pytest.mark.soak)
        for option in OPTIONS
        for layout in ("dp_shard=2", "tp=2", "dp_shard=2,tp=2")
        if (option, layout) not in (("every micro-batch", "tp=2"), ("compile", "dp_shard=2,tp=2"))
    ],
)
def test_experts_beside_other_options(ranks, option, layout):
    lora = sw.LoRA(rank=2, targets=("q_proj", "o_proj"), experts=STACKS, train=("*norm*",))
    compared(ranks, "mixtral", layout, lora, build=experts.mixtral, **OPTIONS[option])


@pytest.mark.quick("grouped_mm")
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_that_are_computed_by_one_product(ranks, implementation):
    build = {"batched_mm": experts.batched, "grouped_mm": experts.grouped}[implementation]
    compared(ranks, "mixtral", "dp_shard=2", sw.LoRA(rank=2, targets=(), experts="down_proj"), build=build)


@pytest.mark.quick("Encoder-dp_shard=2", "Outer-tp=2", "Turned-tp=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("build", [experts.Outer, experts.Encoder, experts.Turned])
def test_matrices_in_no_layer_and_stacks_that_are_turned(ranks, build, layout):
    lora = sw.LoRA(rank=2, experts=build.parameters_with_adapters)
    given = {"batches": experts.rows(2, 3), "loss": experts.loss, "count": experts.count}
    sw.verify(build, layout, run=ranks.run, lora=lora, **given)


@pytest.mark.quick("tp=2")
@pytest.mark.parametrize("layout", ["dp_shard=3", "tp=2"])
def test_attention_of_torch_trains_as_in_one_process(ranks, layout):
    """PEFT's target ``self_attn``: adapters of both projections. Sharded, the answers of what is stored are those of the module."""
    given = {"batches": experts.rows(2, 5), "loss": experts.loss, "count": experts.count}
    lora = sw.LoRA(rank=2, targets=("self_attn", "linear2"), train=("*.bias",))
    sw.verify(experts.Encoder, layout, run=ranks.run, lora=lora, **given)


def test_attention_of_torch_in_pefts_files(ranks, tmp_path):
    """PEFT counts the adapter of ``out_proj`` twice, and all others as we do: seen with that one's scale halved, in its B."""
    peft = pytest.importorskip("peft")
    x = experts.rows(1, 1)[0][0]["x"].double()
    texts, (before, after, merged) = ranks.run(experts.of_attention, 2, "dp_shard=2", str(tmp_path))[0]
    assert len(texts) == 1 and "encoder.layers.0.self_attn, which is nn.MultiheadAttention" in texts[0]
    lora = sw.LoRA(rank=2, alpha=3, targets=("self_attn", "linear1"))
    truth = experts.whole(experts.Encoder, lora)(x).detach()
    assert torch.equal(before, truth) and torch.equal(after, truth)
    assert torch.allclose(merged, truth, rtol=0, atol=1e-13)
    torch.manual_seed(1)
    theirs = peft.PeftModel.from_pretrained(
        experts.Encoder().double(), tmp_path / "adapter", autocast_adapter_dtype=False
    ).train()
    assert not torch.allclose(theirs(x), truth, rtol=0, atol=1e-3)
    for name, param in theirs.named_parameters():
        if "out_proj.lora_B" in name:
            param.data /= 2
    assert torch.allclose(theirs(x), truth, rtol=0, atol=1e-13)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(sw.UnsupportedError, match=r"nn.MultiheadAttention, by PEFT\n.*out_proj twice"):
        sw.LoRA.of(tmp_path / "theirs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_those_of_peft(name, kind):
    peft = pytest.importorskip("peft")
    ours = experts.whole(FAMILIES[name], sw.LoRA(rank=3, alpha=5, targets=("q_proj",), experts=STACKS, **KINDS[kind]))
    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj"], "target_parameters": [f"experts.{each}" for each in STACKS]}
    config = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=kind == "rslora", **targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(FAMILIES[name]().double(), config).double()
    named = dict(theirs.named_parameters())
    pairs = {key: named[experts.in_peft(key)] for key, _ in ours.named_parameters() if "lora_" in key}
    assert len(pairs) == sum("lora_" in key for key in named)
    for key, param in pairs.items():
        param.data.copy_(ours.get_parameter(key))
    losses = []
    for module in (ours, theirs):
        logits = module(input_ids=experts.IDS).logits
        logits.square().mean().backward()
        losses.append(logits.detach())
    assert torch.equal(*losses)
    for key, param in pairs.items():
        found = ours.get_parameter(key).grad
        assert param.grad.any() and float((found - param.grad).abs().max()) <= 1e-12 * float(param.grad.abs().max()), (
            key
        )


@pytest.mark.parametrize("how", [OfParameter(0.7), OfParameter(0.7, 3), OfParameter(0.7, 3, is_turned=True)])
def test_a_merge_in_pieces_is_the_weight_of_a_forward(how):
    shape = (3, 6, 4) if how.num_experts else (6, 4)
    low, high = (torch.randn(each, dtype=torch.float64) for each in how.shapes(shape, 2))
    weight = torch.randn(shape, dtype=torch.float64)
    pieces = [weight[0:2].clone(), weight[2:].clone()]
    inner = [slice(0, size) for size in shape[1:]]
    places = [(slice(0, 2), *inner), (slice(2, shape[0]), *inner)]
    merge_parameter_(low, high, how, zip(places, pieces, strict=True))
    assert torch.allclose(torch.cat(pieces), adapted_weight(weight, low, high, how), rtol=0, atol=1e-14)


def test_the_first_answer_and_that_without_adapters_are_the_bases():
    torch.manual_seed(1)
    module = experts.mixtral().double()
    before, names = module(input_ids=experts.IDS).logits, set(module.state_dict())
    prepare(module, None, None, lora=sw.LoRA(rank=2, experts=STACKS))
    assert torch.equal(module(input_ids=experts.IDS).logits, before) and names <= set(module.state_dict())
    adapters.drawn(module)
    assert not torch.allclose(module(input_ids=experts.IDS).logits, before, rtol=0, atol=1e-3)
    with sw.adapter_off(module):
        assert torch.equal(module(input_ids=experts.IDS).logits, before)
    stack = module.model.layers[0].mlp.experts
    with pytest.raises(TypeError):
        stack(None)
    assert isinstance(stack.gate_up_proj, nn.Parameter)  # as before the forward that has failed


def test_a_forward_within_a_forward_of_the_module():
    module = nn.ModuleList([experts.Twice()])
    prepare(module, None, None, lora=sw.LoRA(rank=2, targets=(), experts="bare"))
    adapters.drawn(module)
    ((_, low, high),) = factors_of(module[0])
    plain, x = experts.Twice(), torch.randn(2, 8)
    plain.bare.data = (module[0].bare + 2 * high @ low).detach()
    assert torch.allclose(module[0](x, 2), plain(x, 2), rtol=1e-5, atol=1e-5)


def test_a_part_of_a_forward_that_runs_again_in_a_backward_is_refused():
    """It would be computed with the parameter alone, without an error. A whole forward that runs again makes the adapted weight again."""
    module, x = nn.Sequential(experts.Checkpoints()), torch.randn(2, 8, requires_grad=True)
    prepare(module, None, None, lora=sw.LoRA(rank=2, targets=(), experts="bare"))
    y = module(x)
    with pytest.raises(sw.UnsupportedError, match="bare of a Checkpoints, read in a backward"):
        y.sum().backward()
    with sw.adapter_off(module):
        module(x).sum().backward()
    around = nn.Sequential(experts.Twice())
    prepare(around, None, None, lora=sw.LoRA(rank=2, targets=(), experts="bare"))
    adapters.drawn(around)
    grads = []
    for run in (lambda: around[0](x, 1), lambda: checkpoint(around[0], x, 1, use_reentrant=False)):
        grads.append(torch.autograd.grad(run().square().sum(), [p for p in around.parameters() if p.requires_grad]))
    assert all(map(torch.equal, *grads))


@pytest.mark.soak
def test_what_they_begin_with_is_the_same_under_every_layout(ranks):
    lora = sw.LoRA(rank=2, experts=STACKS)
    layouts = (("dp_shard=1", 1), ("dp_shard=3", 3), ("tp=2", 2))
    found = [ranks.run(adapters.first_values, size, layout, "mixtral", lora, True)[0] for layout, size in layouts]
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in found[0].items())
    assert all(bool(value.any()) == ("lora_B" not in key) for key, value in found[0].items())
    assert any("experts.lora_A.default.down_proj.weight" in key for key in found[0])


# ---- which parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"experts": "gate_up"}, sw.PlanError, "no parameter of this model.*\n.*did you mean 'gate_up_proj'"),
        (
            {"experts": "q_proj.weight"},
            sw.UnsupportedError,
            "weight of a layer, which is a target itself",
        ),
        ({"experts": "norm.weight"}, sw.UnsupportedError, r"float32 of shape \[12\]: adapters are of matrices"),
        ({"experts": STACKS, "dora": True}, sw.ConfigError, "the norms of DoRA"),
        ({"experts": STACKS, "dropout": 0.1}, sw.ConfigError, "of which dropout would take some away"),
        ({"target_parameters": ["x"]}, sw.ConfigError, "it is called experts here"),
        ({"targets": "down_proj"}, sw.PlanError, r"experts.down_proj: .*\n.*and no layer\n.*experts=\('down_proj',\)"),
        ({"targets": "mlp.experts"}, sw.PlanError, r"experts=\('gate_up_proj', 'down_proj'\)"),
        ({"targets": ()}, sw.ConfigError, "means no layer"),
    ],
)
def test_parameters_that_can_have_no_adapter(given, error, words):
    with pytest.raises(error, match=words):
        prepare(experts.mixtral(), None, None, lora=sw.LoRA(**given))


def test_what_all_linear_leaves_frozen_is_said_and_4_bits_of_it_are_refused_by_name(ranks):
    said, text = ranks.run(experts.left_plain, 1)[0]
    assert "experts.gate_up_proj and 3 more, weights in no layer, are frozen" in said
    assert "LoRA(experts=('gate_up_proj', 'down_proj'))" in said
    assert "experts.down_proj: Quantize(targets=('down_proj',))" in text and "it stays plain" in text


def test_the_fast_path_of_a_transformer_encoder_does_not_pass_over_an_adapter_of_attention():
    module = experts.whole(experts.Encoder, sw.LoRA(rank=2, targets=(), experts="in_proj_weight"))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        answer = module.eval()(x)
        with sw.adapter_off(module):
            assert not torch.allclose(answer, module(x), rtol=0, atol=1e-3)
    assert torch.allclose(answer, module.train()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"targets": ("out_proj",)}, "which can have one itself, reads its weight and does not call it"),
        ({"targets": ("self_attn",), "dropout": 0.1}, "neither DoRA nor dropout"),
        ({"targets": ("self_attn",), "experts": "in_proj_weight"}, "which is a target itself"),
        ({"targets": (), "experts": "out_proj.weight"}, "reads its weight and does not call it"),
        (
            {"targets": ("linear1",), "experts": "linear1.weight"},
            "an adapter of the weight of a layer, which is a target",
        ),
    ],
)
def test_adapters_that_attention_of_torch_cannot_have(given, words):
    with pytest.raises(sw.UnsupportedError, match=words):
        prepare(experts.Encoder(), None, None, lora=sw.LoRA(**given))


def test_modules_in_which_an_adapter_would_have_no_effect():
    patched, tied = experts.Outer(), experts.Outer()
    patched.stack.forward, tied.up.bare = lambda x: x, tied.stack.bare
    for module, name, words in (
        (patched, "bare", "stack.bare: .*\n.*a forward was set on its module"),
        (tied, "stack.bare", "stack.bare: .*\n.*it is also up.bare"),
        (experts.Stack(), "bare", "bare: .*\n.*belongs to no module but the model itself"),
        (nn.ModuleList([nn.ParameterList([torch.randn(4, 4)])]), "0", "0.0: .*\n.*has no forward"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
            "original1",
            "another weight is computed",
        ),
    ):
        with pytest.raises(sw.UnsupportedError, match=words):
            prepare(module, None, None, lora=sw.LoRA(rank=2, targets=(), experts=name))


@pytest.mark.parametrize(
    ("how", "name"),
    [("an index outside", "stack.weights"), ("a layer outside", "stack.bare"), ("its parameter", "stack.bare")],
)
def test_a_parameter_that_other_code_reads_is_refused_by_its_name(ranks, how, name):
    text = ranks.run(experts.read_outside, 2, how)[0]
    assert text.startswith(f"{name}: an adapter of a weight that") and "outside of its module's forward" in text
    assert f"leave {name.rpartition('.')[2]} out of LoRA(experts=...)" in text
