"""A list of blocks is cut into units only if no rank can skip a block that another enters."""

import functools
import random
import types

import pytest
import torch
from anatomy import forwards, forwards_state
from anatomy.forwards import Blocks
from torch import nn

from shardwise.anatomy import read_anatomy

SKIPPABLE = {**forwards.SKIPPABLE, **forwards_state.SKIPPABLE}
PLAIN = {**forwards.PLAIN, **forwards_state.PLAIN}


def judged(model: nn.Module, name: str = "blocks", **options):
    """The block list ``name`` of ``model``."""
    return {found.name: found for found in read_anatomy(model, **options).lists}[name]


@pytest.mark.parametrize("name", SKIPPABLE)
def test_blocks_that_may_be_skipped_stay_in_their_parents_unit(name):
    found = judged(SKIPPABLE[name]())
    assert not found.always_entered
    assert found.why and "always" not in found.why


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_that_every_rank_enters_may_be_units(name):
    found = judged(PLAIN[name]())
    assert found.always_entered, found.why


class InAnyOrder(nn.ModuleList):
    def __iter__(self):
        return iter(random.sample(list(self._modules.values()), len(self)))


class Named(nn.ModuleList):
    """A subclass that iterates as torch does."""


@pytest.mark.parametrize(("container", "sure"), [(InAnyOrder, False), (Named, True)])
def test_a_list_that_iterates_in_a_way_of_its_own_is_not_trusted(container, sure):
    model = Looped()
    model.blocks = container([nn.Linear(4, 4) for _ in range(3)])
    assert judged(model).always_entered is sure


# ---- what lies around the forward -------------------------------------------------------------------------------------


class Looped(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_forward_put_on_the_object_is_the_one_that_counts():
    model = Looped()
    assert judged(model).always_entered

    def forward(self, x):
        for block in self.blocks:
            if x.sum() > 0:
                x = block(x)
        return x

    model.forward = types.MethodType(forward, model)
    assert "if x.sum() > 0" in judged(model).why


def skipping(function):
    @functools.wraps(function)
    def wrapper(self, x):
        return x if x.sum() > 0 else function(self, x)

    return wrapper


def passing(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(("decorator", "sure"), [(skipping, False), (passing, True), (torch.no_grad(), True)])
def test_a_decorator_that_skips_what_it_wraps_is_seen(decorator, sure):
    model = type("Decorated", (Looped,), {"forward": decorator(Looped.forward)})()
    assert judged(model).always_entered is sure


class LayerDrop(nn.Linear):
    """A block that skips itself before any hook of its own runs."""

    def __call__(self, x):
        return x if random.random() < 0.5 else super().__call__(x)


class Logged(nn.Linear):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize(("block", "sure"), [(LayerDrop, False), (Logged, True)])
def test_a_call_of_the_blocks_own_is_read(block, sure):
    model = Looped()
    model.blocks = nn.ModuleList([block(4, 4) for _ in range(3)])
    assert judged(model).always_entered is sure


def test_a_forward_hook_that_enters_a_block_counts():
    model = Looped()
    model.register_forward_hook(lambda module, args, out: model.blocks[0](out) if out.sum() > 0 else out)
    assert not judged(model).always_entered
    seen = []
    model = Looped()
    model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    assert judged(model).always_entered


class Inherited(Looped):
    def forward(self, x):
        return super().forward(x)


class InheritedSkipping(Looped):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return x


class Explicit(Looped):
    def forward(self, x):
        return Looped.forward(self, x)


class Mixed(Looped):
    def forward(self, x):
        if x.sum() > 0:
            x = Looped.forward(self, x)
        return x


@pytest.mark.parametrize(
    ("cls", "sure"), [(Inherited, True), (InheritedSkipping, False), (Explicit, True), (Mixed, False)]
)
def test_the_parents_forward_is_followed(cls, sure):
    assert judged(cls()).always_entered is sure


# ---- several modules ---------------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Blocks under a submodule, called in a way of the parent's choosing."""

    def __init__(self):
        super().__init__()
        self.encoder = Looped()
        self.again = self.encoder
        self.head = nn.Linear(4, 4)


def tower(forward):
    return type(forward.__name__, (Tower,), {"forward": forward})()


def calls_it(self, x):
    return self.head(self.encoder(x))


def may_call_it(self, x):
    return self.head(self.encoder(x)) if x.sum() > 0 else self.head(x)


def calls_it_again_by_another_name(self, x):
    x = self.encoder(x)
    if x.sum() > 0:
        x = self.again(x)
    return x


def iterates_itself(self, x):
    for block in self.encoder.blocks:
        x = block(x)
    return x


def calls_a_method_of_it(self, x):
    return self.encoder.run(x)


def calls_a_method_with_a_depth(self, x):
    return self.encoder.run(x, k=int(x.sum()))


def calls_its_forward_past_its_hooks(self, x):
    return self.encoder.forward(x)


def sets_a_depth_in_it(self, x):
    self.encoder.depth = int(x.sum())
    return self.encoder(x)


def repeats_it(self, x):
    while x.sum() > 0:
        x = self.encoder(x)
    return x


def passes_itself_on(self, x):
    return random.choice([self.encoder, self.head])(x)


@pytest.mark.parametrize(
    ("forward", "sure"),
    [
        (calls_it, True),
        (may_call_it, False),
        (calls_it_again_by_another_name, False),
        (iterates_itself, True),
        (calls_a_method_of_it, True),
        (calls_a_method_with_a_depth, False),
        (calls_its_forward_past_its_hooks, True),  # the encoder is no unit, its blocks are, and they are called
        (repeats_it, False),
        (passes_itself_on, False),
    ],
)
def test_a_doubt_about_a_module_is_a_doubt_about_the_blocks_in_it(forward, sure):
    assert judged(tower(forward), "encoder.blocks").always_entered is sure


class DeepLooped(Blocks):
    def forward(self, x):
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


def test_an_attribute_that_another_module_sets_is_not_steady():
    model = tower(sets_a_depth_in_it)
    model.encoder = DeepLooped()
    assert "depth" in judged(model, "encoder.blocks").why
    model = tower(calls_it)
    model.encoder = DeepLooped()  # set once, before training
    assert judged(model, "encoder.blocks").always_entered


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(self.attn(x))


def test_using_the_insides_of_a_block_without_calling_it_keeps_it_in_the_parents_unit():
    model = Looped()
    model.blocks = nn.ModuleList([Inner() for _ in range(3)])
    assert judged(model).always_entered

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.blocks[0].attn(x)

    model.forward = types.MethodType(forward, model)
    assert "insides are used from outside" in judged(model).why


def test_looking_at_a_blocks_dtype_is_not_using_it():
    model = Looped()

    def forward(self, x):
        x = x.to(self.blocks[0].weight.dtype)
        for block in self.blocks:
            x = block(x)
        return x

    model.forward = types.MethodType(forward, model)
    assert judged(model).always_entered


# ---- no source, and examples -------------------------------------------------------------------------------------------

UNREADABLE = """
class Unreadable(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for block in self.other:
            if float(x.sum()) > 1e9:
                x = block(x)
        return self.extra(x)
"""


def unreadable() -> nn.Module:
    space = {"Blocks": Blocks}
    exec(UNREADABLE, space)
    return space["Unreadable"]()


def test_without_source_only_an_example_shows_that_blocks_are_entered():
    model, x = unreadable(), torch.ones(2, 4)
    assert "the source of Unreadable.forward cannot be read; pass example= or units=" in judged(model).why
    assert judged(model, example={"x": x}).always_entered
    skipped = judged(model, "other", example={"x": x})
    assert not skipped.always_entered and "other.0 was skipped when the example was run" in skipped.why


def test_an_example_shows_what_is_skipped_and_leaves_no_trace():
    model = nn.Sequential(nn.BatchNorm1d(4), Looped(), nn.Dropout())
    model[1].layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, 4)
    rng = torch.get_rng_state()
    read_anatomy(model, example={"input": x})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_example_cannot_vouch_for_code_that_may_skip():
    model = SKIPPABLE["random_global"]()
    torch.manual_seed(0)
    found = judged(model, example={"x": torch.ones(2, 4)})
    assert not found.always_entered  # whether this run entered them all or not


def test_a_source_file_that_changed_is_not_believed(tmp_path, monkeypatch):
    import importlib
    import linecache

    path = tmp_path / "changing_model.py"
    path.write_text(
        "from torch import nn\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])\n"
        "    def forward(self, x):\n        return self.skip(x)\n"
        "    def skip(self, x):\n        return self.blocks[int(x.sum())](x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("changing_model").M()
    path.write_text(path.read_text().replace("return self.skip(x)", "return self.blocks[1](self.blocks[0](x))"))
    linecache.clearcache()
    assert "cannot be read" in judged(model).why


# ---- models of libraries -----------------------------------------------------------------------------------------------

_SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
_GQA = {**_SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VIT = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
_T5 = {"d_model": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 11, "d_kv": 4}
_GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2}
_WHISPER = {
    "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "vocab_size": 11, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "model", "changes", "lists"),
    [
        ("LlamaConfig", "LlamaForCausalLM", _GQA, ["model.layers"]),
        ("GPT2Config", "GPT2LMHeadModel", _GPT2, ["transformer.h"]),
        ("Qwen3Config", "Qwen3ForCausalLM", {**_GQA, "head_dim": 4}, ["model.layers"]),
        ("MixtralConfig", "MixtralForCausalLM", _GQA, ["model.layers"]),
        ("T5Config", "T5ForConditionalGeneration", _T5, ["encoder.block", "decoder.block"]),
        ("BertConfig", "BertForMaskedLM", _SMALL, ["bert.encoder.layer"]),
        ("ViTConfig", "ViTForImageClassification", {**_VIT, "image_size": 8, "patch_size": 4}, ["vit.layers"]),
    ],
)
def test_transformers_blocks_are_units(config, model, changes, lists):
    import transformers

    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**changes))
    found = read_anatomy(built).lists
    assert [item.name for item in found] == lists
    assert all(item.always_entered for item in found), [item.why for item in found]
    for item in found:
        assert len(item.blocks) == 2


@pytest.mark.parametrize(
    ("config", "model", "changes", "skippable"),
    [
        (
            "Wav2Vec2Config",
            "Wav2Vec2ForCTC",
            {**_SMALL, "num_conv_pos_embedding_groups": 2},
            ["wav2vec2.encoder.layers"],
        ),
        (
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            _WHISPER,
            ["model.encoder.layers", "model.decoder.layers"],
        ),
    ],
)
def test_transformers_layer_drop_is_seen(config, model, changes, skippable):
    import transformers

    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**changes))
    assert [item.name for item in read_anatomy(built).lists if not item.always_entered] == skippable


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_torchs_own_transformer_is_read():
    with torch.device("meta"):
        model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    assert [(item.name, item.always_entered) for item in read_anatomy(model).lists] == [
        ("encoder.layers", True),
        ("decoder.layers", True),
    ]
