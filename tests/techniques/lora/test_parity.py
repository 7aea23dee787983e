"""A model with adapters trains as in one process: loss, norm, every gradient, every update, with B and the magnitudes drawn."""

import functools

import models
import pytest
from techniques.lora import adapters

import shardwise as sw

RANKS = {
    "dp_replicate=2": 2,
    "dp_shard=2": 2,
    "dp_shard=3": 3,
    "dp_replicate=2,dp_shard=2": 4,
    "tp=2": 2,
    "tp=4": 4,
    "dp_shard=2,tp=2": 4,
}
OF_ALL = "dp_replicate=2,dp_shard=2,tp=2"
KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}
MODELS = ("llama", "gpt2", "mixtral", "nanogpt", "vocabularies: tied", "linears: kv-2")
OTHERS = ("falcon", "gemma2", "opt", "deepseek-v3", "whisper", "vit")
IN_SOAK = ("bloom", "gpt-neox", "roberta", "mistral")
FEW = ("dp_replicate=2", "dp_shard=2", "dp_shard=3", "tp=2", "dp_shard=2,tp=2")
UNITS = sw.Sharding(min_unit_bytes=0)


def compared(ranks, name, layout, lora, steps=2, build=None, **options):
    model = models.get(name)
    num_data = (8 if layout == OF_ALL else RANKS[layout]) // (4 if "tp=4" in layout else 2 if "tp=2" in layout else 1)
    options = {"sharding": UNITS if "dp_shard" in layout else None} | options
    return sw.verify(
        build or model.build,
        layout,
        batches=model.windows(steps, num_data * 2 - (num_data > 1)),  # one of the last micro-batches is padding
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        run=ranks.run,
        lora=lora,
        **options,
    )


@pytest.mark.quick("gpt2-dp_shard=2-rslora", "mixtral-dp_shard=3-dora", "nanogpt-tp=2-lora")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [*FEW, *(pytest.param(n, marks=pytest.mark.soak) for n in RANKS if n not in FEW)])
@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.soak) for name in ("t5", "qwen3", "bert"))]
)
def test_models(ranks, name, layout, kind):
    compared(ranks, name, layout, sw.LoRA(rank=2, alpha=3, **KINDS[kind]), max_grad_norm=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_replicas_of_shards_of_cut_layers(ranks, kind, quantize):
    lora = sw.LoRA(rank=2, ranks={"q_proj": 3}, **KINDS[kind])
    compared(ranks, "llama", OF_ALL, lora, quantize=quantize, max_grad_norm=0.05)


@pytest.mark.quick("gemma2-tp=2-dora")
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("name", [*OTHERS, *(pytest.param(name, marks=pytest.mark.soak) for name in IN_SOAK)])
def test_other_families(ranks, name, layout, kind):
    if kind == "dora" and name == "falcon":  # whose layers have a forward of their own
        kind = "rslora"
    compared(ranks, name, layout, sw.LoRA(rank=2, **KINDS[kind]))


@pytest.mark.quick("bert-None")
@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("bert", None),
        ("opt", "nf4"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("bert", "nf4"), ("opt", None))),
    ],
)
def test_the_bias_of_a_layer_that_is_cut_by_its_inputs_is_added_once(ranks, name, quantize):
    build = functools.partial(adapters.with_biases, name)
    compared(ranks, name, "tp=2", sw.LoRA(rank=2), quantize=quantize, build=build)


OPTIONS = {
    "remat": {"remat": "full"},
    "selective": {"remat": "selective"},
    "adamw": {"optimizer": "adamw", "max_grad_norm": 0.1},
    "fused": {"fused": True},
    "every micro-batch": {"sharding": sw.Sharding(min_unit_bytes=0, sync_every_microbatch=True)},
}


@pytest.mark.quick("selective-gpt2-tp=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("option", [*OPTIONS, pytest.param("compile", marks=pytest.mark.soak)])
def test_beside_other_options(ranks, option, name, layout):
    if option == "every micro-batch" and layout == "tp=2":
        layout = "dp_shard=2,tp=2"
    options = OPTIONS.get(option, {"compile": sw.Compile(backend="aot_eager", fullgraph=True)})
    compared(ranks, name, layout, sw.LoRA(rank=2, dora=option != "compile"), **options)


@pytest.mark.quick("llama-lora0-dp_shard=2", "gpt2-lora1-tp=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"targets": ("embed_tokens", "lm_head", "down_proj"), "train": ("*norm*",)}),
        ("gpt2", {"targets": ("wte", "c_attn"), "train": ("ln_f", "*.bias")}),  # tied; cut along its rank under tp
        ("vocabularies: tied", {"targets": "all-linear", "train": ("embed",)}),
    ],
)
def test_embeddings_heads_and_what_is_trained_beside(ranks, name, lora, layout):
    compared(ranks, name, layout, sw.LoRA(rank=2, **lora))


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "tp=2"),
        pytest.param("qwen3", "dp_shard=2,tp=2", marks=pytest.mark.soak),
        pytest.param("vocabularies: tied", "tp=4", marks=pytest.mark.soak),
    ],
)
def test_a_head_with_an_adapter_is_cut_by_tokens(ranks, name, layout, kind):
    lora = sw.LoRA(rank=2, targets="head" if "tied" in name else "lm_head", **KINDS[kind])
    compared(ranks, name, layout, lora, max_grad_norm=0.05)
    of_head = ranks.run(adapters.cuts_of_head, RANKS[layout], layout, name, lora)[0]
    parts = {"weight": True, "lora_A": False, "lora_B": True, "lora_magnitude_vector": True}
    assert of_head == {part: parts[part] for part in of_head} and {"lora_A", "lora_B"} <= of_head.keys()


@pytest.mark.quick("dp_shard=2-full")
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_dropout_of_whole_inputs_is_that_of_one_process(ranks, layout, remat):
    compared(ranks, "llama", layout, sw.LoRA(rank=2, dropout=0.3), remat=remat)
