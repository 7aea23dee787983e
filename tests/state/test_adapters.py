"""Adapters in PEFT's files, merged into weights, and beside a base that is loaded: PEFT and transformers say what is right."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from state.adapting import CASES, base, begun, ending, loaded, logits, option, plain, refusals, rounded, saved, trained

import shardwise as sw
from shardwise.state.files import OpenFiles
from shardwise.state.merged import with_adapter
from shardwise.state.source import open_source
from shardwise.techniques.lora.rule import LoRAEntry

LAYOUTS = {"dp_shard=1": 1, "dp_shard=2": 2, "dp_shard=3": 3, "dp_replicate=2": 2, "tp=2": 2, "dp_shard=2,tp=2": 4}
FEW = {
    name: LAYOUTS[name] for name in ("dp_shard=1", "dp_shard=3", "tp=2")
}  # shards of unequal size, and both kinds of cuts of tp
TWO = {name: LAYOUTS[name] for name in ("dp_shard=3", "tp=2")}
ALL = pytest.param(LAYOUTS, id="all", marks=pytest.mark.soak)
over_layouts = pytest.mark.parametrize("layouts", [pytest.param(TWO, id="few"), ALL])
and_one_process = pytest.mark.parametrize("layouts", [pytest.param(FEW, id="few"), ALL])


def of_peft(case, folder):
    """PEFT's model of a directory, or a new one with the same adapters as ours."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and of types
        if folder is not None:
            return peft.PeftModel.from_pretrained(base(case), folder, autocast_adapter_dtype=False).eval()
        lora = option(case)
        targets = list(lora.targets) if lora.targets != "all-linear" else lora.targets
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, use_rslora=lora.rslora, use_dora=lora.dora,
            rank_pattern=lora.ranks, alpha_pattern=lora.alphas, modules_to_save=["norm", "input_layernorm", "post_attention_layernorm", "lm_head"] if case == "trained" else None,
            fan_in_fan_out=case.startswith("gpt2"), task_type="CAUSAL_LM",
        )  # fmt: skip
        return peft.get_peft_model(base(case), config, autocast_adapter_dtype=False).eval()


def merged_by_peft(case, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_peft(case, folder).merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Directory of a case's base, as transformers writes it."""
    made = {}

    def folder(case):
        kind = CASES[case][0]
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            base(case).save_pretrained(made[kind])
        return str(made[kind])

    return folder


@pytest.mark.quick("dora", "tied", "own", "ranks")
@pytest.mark.parametrize("case", CASES)
def test_peft_and_transformers_read_what_is_saved(ranks, tmp_path, bases, case):
    refused = ranks.run(saved, 2, case, "dp_shard=2", str(tmp_path), bases(case))[0]
    truth = plain(case)
    theirs = of_peft(case, tmp_path / "adapter")
    assert (logits(theirs) - logits(truth)).abs().max() <= 1e-14
    # A layer too many has a B of 0, and a trained module that is not wrapped gets its values all the same: names say what logits do not.
    assert {name for name, _ in theirs.named_parameters() if "lora_" in name} == {
        f"base_model.model.{name}" for name, _ in truth.named_parameters() if "lora_" in name
    }
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    own = {
        "trained": ["input_layernorm", "lm_head", "norm", "post_attention_layernorm"],
        "tied": ["embed_tokens", "lm_head"],
    }
    assert config["modules_to_save"] == own.get(case) and config["ensure_weight_tying"] == (case == "tied")
    assert config["fan_in_fan_out"] == case.startswith("gpt2")
    assert config["base_model_name_or_path"] == bases(case) and config["task_type"] == "CAUSAL_LM"
    assert not refused
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (logits(merged) - logits(truth)).abs().max() <= 1e-12
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert (logits(alone) - logits(truth)).abs().max() > 1e-3
    stored, expected = load_file(tmp_path / "merged/model.safetensors"), merged_by_peft(case, tmp_path / "adapter")
    for name, value in stored.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.quick("gpt2-dora-few")
@over_layouts
@pytest.mark.parametrize(
    "case", [pytest.param("rslora", marks=pytest.mark.soak), "gpt2-dora", "trained", "table", "ranks"]
)
def test_what_peft_has_saved_is_loaded_under_every_layout(ranks, tmp_path, bases, case, layouts):
    theirs = of_peft(case, None)
    for name, param in theirs.named_parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, 1.0 if "magnitude" in name or "norm" in name else 0.0, 0.2)
        elif case == "table" and name.endswith(
            "embed_tokens.base_layer.weight"
        ):  # PEFT writes it too: where it has grown, or was changed
            param.data += 0.1
    theirs.save_pretrained(tmp_path / "peft", save_embedding_layers=case == "table")
    there = load_file(tmp_path / "peft/adapter_model.safetensors")
    for layout, num_ranks in layouts.items():
        states, found = zip(
            *ranks.run(loaded, num_ranks, case, layout, bases(case), str(tmp_path / "peft")), strict=True
        )
        assert (found[0] - logits(theirs)).abs().max() <= 1e-12, layout
        for key, value in there.items():
            name = (
                key.removeprefix("base_model.model.")
                .replace(".lora_A.", ".lora_A.default.")
                .replace(".lora_B.", ".lora_B.default.")
            )
            name = name.replace(".lora_embedding_A", ".lora_embedding_A.default").replace(
                ".lora_embedding_B", ".lora_embedding_B.default"
            )
            name = name.replace(".base_layer.", ".")
            name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
            assert torch.equal(states[0][name], value), (layout, name)


@and_one_process
@pytest.mark.parametrize("case", ["gpt2-dora", pytest.param("trained", marks=pytest.mark.soak)])
def test_files_do_not_depend_on_the_layout_to_the_last_bit(ranks, tmp_path, case, layouts):
    folders = {}
    for i, (layout, num_ranks) in enumerate(layouts.items()):
        folders[layout] = tmp_path / str(i)
        folders[layout].mkdir()
        assert not ranks.run(saved, num_ranks, case, layout, str(folders[layout]))[0]
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors", "base/model.safetensors"):
        first = load_file(folders["dp_shard=1"] / file)
        for layout, folder in folders.items():
            found = load_file(folder / file)
            assert found.keys() == first.keys() and all(torch.equal(found[n], v) for n, v in first.items()), (
                layout,
                file,
            )


@over_layouts
@pytest.mark.parametrize("case", [pytest.param("dora", marks=pytest.mark.soak), "gpt2-dora"])
def test_a_base_is_loaded_strictly_and_magnitudes_follow_it(ranks, tmp_path, bases, case, layouts):
    stored = base(case).state_dict()
    of_theirs = {name: p for name, p in of_peft(case, None).named_parameters() if "magnitude" in name}
    first = None
    for layout, num_ranks in layouts.items():
        found = ranks.run(begun, num_ranks, case, layout, bases(case))[0]
        for init in ("load", "seeded"):
            state = found[init]
            own = {name: value for name, value in state.items() if "lora_" in name}
            assert all(torch.equal(state[name], value) for name, value in stored.items())
            assert f"adapters not there ({len(own)} tensors)" in found[f"{init} report"]
            assert all(not value.any() for name, value in own.items() if "lora_B" in name)
            for name, value in of_theirs.items():
                assert torch.equal(state[name.removeprefix("base_model.model.")], value), (layout, init, name)
            first = own if first is None else first
            assert all(torch.equal(first[name], value) for name, value in own.items()), layout
        assert set(found["kept"]) == set(own)


def test_a_run_with_adapters_does_not_resume_from_one_without(ranks, tmp_path):
    ranks.run(trained, 1, "lora", "dp_shard=1", str(tmp_path), 1, False, False)
    with pytest.raises(sw.RankError, match=r"lora_A\.default\.weight: weights from"):
        ranks.run(trained, 1, "lora", "dp_shard=1", str(tmp_path), 2, True)


@pytest.mark.parametrize("case", ["dora", pytest.param("trained", marks=pytest.mark.soak)])
def test_a_checkpoint_of_adapters_resumes_under_another_layout(ranks, tmp_path, case):
    expected = ranks.run(trained, 2, case, "dp_shard=2", str(tmp_path), 3, False)[0]
    shutil.rmtree(tmp_path)
    assert ranks.run(trained, 2, case, "dp_shard=2", str(tmp_path), 1, False)[0] == pytest.approx(
        expected[:1], rel=1e-14
    )
    assert ranks.run(trained, 2, case, "tp=2", str(tmp_path), 3, True)[0] == pytest.approx(expected[1:], rel=1e-12)


def test_a_base_of_float32_is_rounded_where_it_is_stored_in_two_bytes_and_that_is_said(ranks, tmp_path):
    base("dora").float().save_pretrained(tmp_path / "base")
    text, dtypes, written = ranks.run(rounded, 2, "dp_shard=2", str(tmp_path))[0]
    assert "cast: 21 from float32 to bfloat16" in text
    assert "a base of float32 is stored in bfloat16; Precision(parts={...: 'fp32'}) keeps it" in text
    assert dtypes == {"base": {torch.bfloat16}, "own": {torch.float32}} and written == {torch.bfloat16}
    expected = {name: value.bfloat16() for name, value in base("dora").float().state_dict().items()}
    merged = load_file(tmp_path / "merged/model.safetensors")
    # B is 0 and m the norms of the rounded weights: a merge, rounded once, changes no bit.
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


def changed(folder, to, *, without=(), **config):
    """A copy of a directory of adapters with other words in its configuration, and without some tensors."""
    shutil.copytree(folder, to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    tensors = load_file(to / "adapter_model.safetensors")
    save_file(
        {n: v for n, v in tensors.items() if not n.endswith(tuple(without))} if without else tensors,
        to / "adapter_model.safetensors",
    )
    return str(to)


def test_adapters_that_are_not_the_models_are_refused_with_both_named(ranks, tmp_path, bases):
    ranks.run(saved, 1, "lora", "dp_shard=1", str(tmp_path))
    good, own = tmp_path / "adapter", plain("lora").state_dict()
    pickled, damaged = tmp_path / "pickled", tmp_path / "damaged"
    for folder in (pickled, damaged):
        shutil.copytree(good, folder)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    (damaged / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes()[:900])
    wide = changed(good, tmp_path / "wide")
    tensors = load_file(good / "adapter_model.safetensors")
    first = next(iter(tensors))
    save_file({**tensors, first: torch.zeros(3, 5, dtype=torch.float64)}, tmp_path / "wide/adapter_model.safetensors")
    half = {
        name: value for name, value in own.items() if not name.endswith("layers.1.mlp.up_proj.lora_B.default.weight")
    }
    calls = {
        ("load_adapter", changed(good, tmp_path / "alpha", lora_alpha=16)): ("alpha=16", "alpha=8", "sw.LoRA.of"),
        ("load_adapter", changed(good, tmp_path / "rslora", use_rslora=True)): ("rslora=True", "rslora=False"),
        ("load_adapter", changed(good, tmp_path / "fewer", without=("1.mlp.up_proj.lora_A.weight", "1.mlp.up_proj.lora_B.weight"))): (
            "2 of the model's 28 tensors are not there", "layers.1.mlp.up_proj.lora_A.default.weight: adapters from",
        ),
        ("load_adapter", changed(good, tmp_path / "half", without=("1.mlp.up_proj.lora_B.weight",))): ("has lora_A alone",),
        ("load_adapter", wide): ("shape [3, 5]", "float64 of shape [3, "),
        ("load_adapter", str(pickled)): ("UnsupportedError", "adapter_model.bin", "pickle", "save_pretrained"),
        ("load_adapter", str(damaged)): ("it is not a complete safetensors file",),
        ("load_adapter", str(tmp_path / "nowhere")): ("adapter_config.json cannot be read",),
        ("load_weights", str(good)): ("it holds adapters, and not the base", "sw.load_adapter"),
        ("save_adapter", str(good / "adapter_config.json")): ("CheckpointError", "is a file"),
    }  # fmt: skip
    texts = ranks.run(refusals, 2, "lora", "dp_shard=2", [(name, given, {}) for name, given in calls])[0]
    for text, (call, parts) in zip(texts, calls.items(), strict=True):
        assert all(part in text for part in parts), (call, text)
    text = ranks.run(refusals, 1, "lora", "dp_shard=1", [("load_full_state_dict", half, {})])[0][0]
    assert (
        "with 27 of 28 tensors of the adapters" in text
        and "layers.1.mlp.up_proj.lora_B.default.weight: weights" in text
    )
    assert ranks.run(refusals, 1, "lora", "dp_shard=1", [("load_full_state_dict", half, {"strict": False})])[0] == [""]


def test_what_a_merge_or_pefts_files_cannot_hold_is_refused_by_name(ranks, tmp_path):
    head = sw.LoRA(rank=2, targets=("lm_head", "q_proj"))
    merged, alone = ranks.run(refusals, 1, "tied", "dp_shard=1", [("save_weights", str(tmp_path / "w"), {}), ("save_weights", str(tmp_path / "w"), {"merge": False})], head)[0]  # fmt: skip
    assert (
        "model.embed_tokens.weight: adapters merged into a weight that is also lm_head.weight" in merged and not alone
    )
    ranks.run(saved, 1, "tied", "dp_shard=1", str(tmp_path))
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.lm_head.weight": tensors["base_model.model.lm_head.weight"] + 1}, file)
    text = ranks.run(refusals, 1, "tied", "dp_shard=1", [("load_adapter", str(file.parent), {})])[0][0]
    assert "differs from" in text and "the model ties these names" in text and "model.embed_tokens.weight" in text
    save_file({name: value for name, value in tensors.items() if name != "base_model.model.lm_head.weight"}, file)
    text = ranks.run(refusals, 1, "tied", "dp_shard=1", [("load_adapter", str(file.parent), {})])[0][0]
    assert "without base_model.model.lm_head.weight" in text and "ensure_weight_tying=True" in text
    text = ranks.run(refusals, 1, "doubled", "dp_shard=1", [("save_weights", str(tmp_path / "w"), {})])[0][0]
    assert "model.layers.0.self_attn.q_proj: adapters merged into a Doubled" in text
    biases = sw.LoRA(rank=2, train=("*.bias",))
    text = ranks.run(refusals, 1, "gpt2", "dp_shard=1", [("save_adapter", str(tmp_path / "a"), {})], biases)[0][0]
    assert "transformer.h.0.attn.c_attn.bias: a parameter that is trained in full" in text and "has an adapter" in text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"of_tomorrow": {"x": 1}}, "of_tomorrow"),
    ],
)  # fmt: skip
def test_an_adapter_of_peft_with_what_is_not_supported_is_refused_by_its_key(tmp_path, config, says):
    write(tmp_path, config, {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2)})
    with pytest.raises(sw.UnsupportedError, match=says.replace("[", r"\[")):
        sw.LoRA.of(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2), "k.lora_E": (2, 9)}, "k.lora_E"),
        ({"q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2), "q.lora_magnitude_vector": (4,)}, "use_dora=False"),
        ({"norm.weight": (4,)}, "no lora_A and lora_B"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_adapters_of_one_kind_are_refused(tmp_path, shapes, says):
    write(tmp_path, {}, shapes)
    with pytest.raises(sw.ShardwiseError, match=says):
        sw.LoRA.of(tmp_path)


def write(folder, config, shapes):
    known = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_dora": False, "use_rslora": False, "lora_dropout": 0.1}
    (folder / "adapter_config.json").write_text(json.dumps({**known, **config}))
    tensors = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_option_is_made_from_a_directory_of_peft(tmp_path):
    write(
        tmp_path, {"use_rslora": True}, {"a.q.lora_A.weight": (3, 4), "a.q.lora_B.weight": (4, 3), "norm.weight": (4,)}
    )
    assert sw.LoRA.of(tmp_path) == sw.LoRA(
        rank=3, alpha=8.0, targets=("a.q",), dropout=0.1, rslora=True, train=("norm",)
    )


def test_ranks_and_alphas_of_patterns_are_read_as_peft_does(tmp_path):
    shapes = {
        f"{name}.lora_{part}.weight": (rank, 4)[:: 1 if part == "A" else -1]
        for name, rank in (("a.q", 2), ("b.q", 3), ("a.v", 2))
        for part in "AB"
    }
    write(tmp_path, {"rank_pattern": {"b.q": 3}, "alpha_pattern": {"^a.*q": 4, "v|q": 5}}, shapes)
    lora = sw.LoRA.of(tmp_path)
    assert lora.ranks == {"a.q": 2, "b.q": 3, "a.v": 2} and lora.alphas == {"a.q": 4, "b.q": 5, "a.v": 5}
    write(tmp_path, {"alpha_pattern": {"v": 5}}, shapes)
    assert sw.LoRA.of(tmp_path).alphas == {"v": 5}
    for wrong in ({"(": 4}, {"q": "four"}, {"q": 0}, ["q"]):
        write(tmp_path, {"alpha_pattern": wrong}, shapes)
        with pytest.raises(sw.CheckpointError, match="alpha"):
            sw.LoRA.of(tmp_path)


def test_of_patterns_that_mean_a_layer_the_closest_counts_in_any_order():
    names = {"q": 2, "a.q": 3, "*.a.q": 5, "?.k*": 6, "k": 7, "*v*": 9, "a.*v": 4}
    for ranks in (names, dict(reversed(names.items()))):
        lora = sw.LoRA(ranks=ranks)
        assert [lora.rank_of(name) for name in ("q", "b.q", "a.q", "c.a.q", "o")] == [2, 2, 3, 3, 8]
        assert [lora.rank_of(name) for name in ("b.k", "b.k2", "c.a.v", "c.v")] == [7, 6, 4, 9]
        assert [lora.alpha_of(name) for name in ("q", "a.q", "o")] == [4, 6, 16]
    for alphas in ({"0.*": 4, "*.q": 8}, {"*.q": 8, "0.*": 4}):
        with pytest.raises(sw.PlanError, match=r"(?s)0\.q: LoRA\(alphas={'\*\.q': 8, '0\.\*': 4}\).*neither is closer"):
            sw.LoRA(alphas=alphas).alpha_of("0.q")
        assert sw.LoRA(alphas=alphas | {"0.q": 3}).alpha_of("0.q") == 3


class Nested(torch.nn.Module):
    """A layer by the name of which those of a part within it end."""

    def __init__(self, name):
        super().__init__()
        self.name, inner = name, torch.nn.Module()
        self.add_module(name, torch.nn.Linear(8, 8))
        inner.add_module(name, torch.nn.Linear(8, 8))
        inner.other = torch.nn.Linear(8, 8)
        self.add_module("1", inner)

    def forward(self, x):
        inner = self.get_submodule("1")
        x = getattr(self, self.name)(x)
        return x + inner.other(torch.tanh(getattr(inner, self.name)(x)))


@pytest.mark.combinations("values")
@pytest.mark.parametrize("name", ["0", "Linear", "a[0]"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"alphas": {"%": 6.0}},
        {"ranks": {"%": 3, "1.%": 2}},
        {"ranks": {"1.%": 3}},
        {"alphas": {"%": 6.0, "1.%": 6.0}},
    ],
)
def test_a_layer_whose_name_ends_others_has_its_own_numbers_in_pefts_files(tmp_path, name, numbers):
    import peft

    def build():
        torch.manual_seed(0)
        return Nested(name).double()

    given = {key: {text.replace("%", name): value for text, value in of.items()} for key, of in numbers.items()}
    x = torch.randn(3, 8, dtype=torch.float64)
    with sw.init("dp_shard=1", device="cpu") as world:
        module = sw.parallelize(build(), world, lora=sw.LoRA(rank=2, alpha=4, **given), example={"x": x})
        with torch.no_grad():
            for key, param in module.named_parameters():
                param.normal_(std=0.3) if "lora_" in key else None
            want = module(x)
            sw.save_adapter(module, tmp_path / "adapter")
            sw.save_weights(module, tmp_path / "merged")
            sw.save_weights(module, tmp_path / "base", merge=False)
            again = sw.parallelize(build(), world, lora=sw.LoRA.of(tmp_path / "adapter"), example={"x": x})
            sw.load_adapter(again, tmp_path / "adapter")
            assert torch.equal(again(x), want)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(peft.PeftModel.from_pretrained(build(), tmp_path / "adapter").eval()(x), want, atol=1e-12)
    merged = with_adapter(open_source(tmp_path / "base"), tmp_path / "adapter")
    with OpenFiles() as files:
        for key, value in load_file(next((tmp_path / "merged").glob("*.safetensors"))).items():
            assert torch.equal(merged.tensors[key].load(files), value)


def test_numbers_are_by_names_as_targets_are():
    x = torch.ones(1, 8)
    with sw.init("dp_shard=1", device="cpu") as world:
        for text, layers in {"0": ["0"], "1.0": ["1.0"], "Linear": ["0", "1.0", "1.other"], "o*": ["1.other"]}.items():
            for given in ({"targets": text}, {"ranks": {text: 3}}):
                module = sw.parallelize(Nested("0"), world, lora=sw.LoRA(rank=2, **given), example={"x": x})
                ranks = {name[:-22]: len(p) for name, p in module.named_parameters() if "lora_A" in name}
                assert [name for name in ranks if "targets" in given or ranks[name] == 3] == layers
                lora = sw.recipe_of(module).entry("lora", LoRAEntry).lora
                assert {name: lora.rank_of(name) for name in ranks} == ranks


def test_numbers_of_parameters_are_of_those_that_their_modules_have(tmp_path):
    shapes = {f"{host}.lora_{part}.weight": (2, 4)[:: 1 if part == "A" else -1] for host in ("a.gate", "a.q", "b.q", "a.experts", "a.experts.base_layer") for part in "AB"}  # fmt: skip
    texts = ["gate.weight", "up", "down"]
    config = {"target_modules": ["q"], "target_parameters": texts, "alpha_pattern": {"a.q": 3}, "lora_dropout": 0.0}
    write(tmp_path, config, shapes)
    assert sw.LoRA.of(tmp_path).alphas.keys() == {"a.q", "b.q", "a.gate.weight", "a.experts.up", "a.experts.down"}


def test_the_copy_of_a_heads_base_in_pefts_files_is_loaded(tmp_path):
    import peft

    def build():
        torch.manual_seed(0)
        return Nested("head").double()

    x = torch.randn(3, 8, dtype=torch.float64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False))
        model.save_pretrained(tmp_path)
        base = model.get_submodule("base_model.model.head.base_layer").weight.mul_(2)
        want = model.eval()(x)
    path = tmp_path / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.head.base_layer.weight": base.detach().clone()}, path)
    with sw.init("dp_shard=1", device="cpu") as world, torch.no_grad():
        module = sw.parallelize(build(), world, lora=sw.LoRA.of(tmp_path), example={"x": x})
        sw.save_weights(module, tmp_path / "base", merge=False)
        sw.load_adapter(module, tmp_path)
        assert torch.allclose(module(x), want, atol=1e-12)
        merged = with_adapter(open_source(tmp_path / "base"), tmp_path)
        sw.save_weights(module, tmp_path / "merged")
    with OpenFiles() as files:
        found = merged.tensors["head.weight"].load(files)
    assert torch.equal(found, load_file(next((tmp_path / "merged").glob("*.safetensors")))["head.weight"])


class Ends(torch.nn.Module):
    """Has modules whose name ends as PEFT's ``lora_dropout`` does: ``out`` in each block, and its own with ``outer``."""

    def __init__(self, outer, inner=True):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        if outer:
            self.out = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList([Ends(True, False), Ends(True, False)] if inner else [])

    def forward(self, x):
        x = self.down(self.up(x))
        x = self.out(x) if hasattr(self, "out") else x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("outer", "targets"), [(False, "up"), (False, "down,blocks.0.up"), (True, "up")])
def test_a_module_whose_name_ends_as_another_of_pefts_is_named_in_full_or_refused(ranks, tmp_path, outer, targets):
    import peft

    text = ranks.run(ending, 1, outer, targets, str(tmp_path))[0]
    if outer:
        assert (
            text.startswith("out: out, which is trained in full") and "lora_dropout" in text and "ends so too" in text
        )
        return
    assert text == ""
    answer, x = torch.load(tmp_path / "answer.pt")
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(peft.PeftModel.from_pretrained(Ends(outer), tmp_path / "adapter").eval()(x), answer)
