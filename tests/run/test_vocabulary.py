"""Tokens that are added for a run: their rows are the same bits under every layout, and what cannot work is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from models import chat
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration, PhiConfig, PhiForCausalLM

import shardwise as sw
from shardwise.data.corpus import encode
from shardwise.data.token_cache import TokenCache
from shardwise.run.build import build_model, load_start
from shardwise.run.config import load_config
from shardwise.run.preflight import check_early
from shardwise.run.pretrained import build_pretrained
from shardwise.run.vocabulary import _count, saved_files, vocabulary_of

TURNS = ("<|turn_start|>", "<|turn_end|>", "<|tool|>")
LINE = json.dumps({"messages": [{"role": "user", "content": "five ?"}, {"role": "assistant", "content": "five"}]})
LAYOUTS = {"dp_shard=1": 1, "dp_shard=2": 2, "dp_replicate=2": 2, "tp=2": 2}


def phi(rows: int) -> PhiForCausalLM:
    """Its head has a bias."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return PhiForCausalLM(PhiConfig(vocab_size=rows, **sizes))


MODELS = {
    "untied": lambda rows: chat.model(rows),
    "tied": lambda rows: chat.model(rows, tie_word_embeddings=True),
    "bias": phi,
}
TABLES = {
    "untied": ["lm_head.weight", "model.embed_tokens.weight"],
    "tied": ["model.embed_tokens.weight"],
    "bias": ["lm_head.bias", "lm_head.weight", "model.embed_tokens.weight"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Model directories in bfloat16 with a tokenizer, as many rows as it has tokens, and one conversation."""
    root = tmp_path_factory.mktemp("grown")
    tokenizer = chat.tokenizer()
    for name, build in MODELS.items():
        torch.manual_seed(3)
        model = build(len(tokenizer))
        with torch.no_grad():
            for param in model.parameters():  # new biases are zeros, whose mean is no test
                param.normal_()
        model.to(torch.bfloat16).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "chat.jsonl").write_text(f"{LINE}\n" * 4)
    (root / "text.txt").write_text("Hello there , <|tool|> how are you today ? " * 9)
    np.save(root / "tokens.npy", np.arange(300) % 340)
    return root


def words(folders: Path, name: str = "untied", *more: str) -> list[str]:
    given = [f"--model.hf={folders / name}", f"--data.path={folders / 'chat.jsonl'}"]
    keys = {word.partition("=")[0] for word in more}
    return [*(word for word in given if word.partition("=")[0] not in keys), *more]


def started(given: list[str], layout: str) -> tuple[dict, str]:
    """On a rank: the weights with which a run would start, and what it says of them."""
    config = load_config(None, given).config
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = build_model(config, world)
        report = load_start(config, model)
        assert model.get_input_embeddings().num_embeddings == vocabulary_of(config).rows
        return sw.full_state_dict(model), str(report)


@pytest.mark.quick("untied")
@pytest.mark.parametrize("name", MODELS)
def test_new_rows_are_the_mean_of_the_others_the_same_bits_under_every_layout(ranks, folders, name):
    given = words(folders, name, f"--model.add_tokens={','.join(TURNS)}")
    stored = load_file(folders / name / "model.safetensors")
    found = {layout: ranks.run(started, num, given, layout)[0] for layout, num in LAYOUTS.items()}
    for layout, (weights, said) in found.items():
        assert f"mean of the others ({len(TABLES[name])})" in said, layout
        for key, old in stored.items():
            new = weights[key]
            assert torch.equal(new[: len(old)], old.float()), (layout, key)
            if key in TABLES[name]:
                assert len(new) == len(old) + 3
                mean = old.double().mean(0)
                torch.testing.assert_close(new[len(old) :].double(), mean.expand(3, *mean.shape), rtol=1e-6, atol=1e-9)
            else:
                assert new.shape == old.shape
            assert torch.equal(new, found["dp_shard=1"][0][key]), (layout, key)


def test_a_model_that_is_padded_already_stays_as_it_is(ranks, folders, tmp_path):
    chat.model(400).save_pretrained(tmp_path)
    chat.tokenizer().save_pretrained(tmp_path)
    config = load_config(
        None, words(tmp_path.parent, tmp_path.name, *_paths(folders), f"--model.add_tokens={TURNS[0]}")
    )
    found = vocabulary_of(config.config)
    assert (found.rows, found.growth, found.added) == (400, None, TURNS[:1])
    assert str(found) == "added <|turn_start|>; 400 rows are enough for 343 tokens"


def _paths(folders: Path) -> list[str]:
    return [f"--data.path={folders / 'chat.jsonl'}"]


def test_tokens_that_are_there_keep_their_numbers_and_the_others_get_the_next(folders):
    given = words(folders, "untied", f"--model.add_tokens=['<|im_end|>', z, {TURNS[0]}, <unk>]")
    found = vocabulary_of(load_config(None, given).config)
    before = AutoTokenizer.from_pretrained(folders / "untied")
    assert found.added == (TURNS[0], "<unk>") and found.there == ("<|im_end|>", "z")
    ids = found.tokenizer.convert_tokens_to_ids(["<|im_end|>", "z", TURNS[0], "<unk>"])
    assert ids == [*before.convert_tokens_to_ids(["<|im_end|>", "z"]), len(before), len(before) + 1]
    text = "a<|turn_start|>z<|im_end|>"
    assert (
        found.tokenizer.decode(found.tokenizer(text, add_special_tokens=False).input_ids, skip_special_tokens=True)
        == "a"
    )


def test_a_token_that_only_transformers_adds_has_a_row(folders, tmp_path):
    """Its number comes before those of the tokens that are asked for."""
    for name, content in saved_files(AutoTokenizer.from_pretrained(folders / "untied")).items():
        (tmp_path / name).write_bytes(content)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<my pad>"}))
    given = words(folders, "untied", f"--data.tokenizer={tmp_path}", f"--model.add_tokens={TURNS[0]}")
    found = vocabulary_of(load_config(None, given).config)
    assert _count(tmp_path / "tokenizer.json", [TURNS[0]]) == 343 and (found.rows, found.num_tokens) == (344, 344)
    assert found.tokenizer.convert_tokens_to_ids(["<my pad>", TURNS[0]]) == [342, 343]


def test_a_text_is_read_with_the_added_tokens_and_kept_by_them(folders, tmp_path):
    given = words(folders, "untied", f"--data.path={folders / 'text.txt'}", "--data.tokenizer=hf")
    file, cache = folders / "untied" / "tokenizer.json", TokenCache(tmp_path)
    found = vocabulary_of(load_config(None, [*given, "--model.add_tokens=<|tool|>"]).config)
    content = found.tokenizer.backend_tokenizer.to_str()
    for store in (None, cache):
        plain, added = (encode(folders / "text.txt", file, store, text) for text in (None, content))
        assert int(plain.max()) < 342 and (added == 342).sum() == 9


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no directory": (("--model.hf=null", "--model.vocab=300"), "without model.hf"),
    "a model of code": (("--model.hf=null", "--model.build=a.py:b", "--model.add_tokens=a"), "without model.hf"),
    "two numbers": (("--model.vocab=400", "--model.args.vocab_size=400"), "each of them says how many rows"),
    "fewer rows": (("--model.vocab=341",), "give 342 or more, or remove model.vocab"),
    "too few rows": (("--model.vocab=343", "--model.add_tokens=a1,b1"), "numbers 344 tokens"),
    "an empty token": (("--model.add_tokens=a1,,b1",), "one is empty"),
    "a token twice": (("--model.add_tokens=a1,a1",), "one is named twice"),
    "no rows": (("--model.vocab=0",), "model.vocab"),
    "another word": (("--model.vocab=all",), "model.vocab"),
    "tokens are made": (("--model.add_tokens=a1", "--data.path=FOLDER/tokens.npy"), "--model.vocab=N"),
    "bytes": (
        ("--model.vocab=tokenizer", "--data.tokenizer=bytes", "--data.path=FOLDER/text.txt"),
        "--data.tokenizer=hf",
    ),
    "data of code": (("--model.add_tokens=a1", "--data.build=a.py:b", "--data.path=null"), "--model.vocab=N"),
    "no such template": (("--data.chat_template=FOLDER/none.jinja",), "No such file"),
    "an empty template": (("--data.chat_template=FOLDER/empty.jinja",), "it is empty"),
    "a template for a text": (
        ("--data.chat_template=a.jinja", "--data.path=FOLDER/text.txt", "--data.tokenizer=hf"),
        "it would have no effect",
    ),
    "an end for a text": (
        ("--data.eos_token=a", "--data.path=FOLDER/text.txt", "--data.tokenizer=hf"),
        "it would have no effect",
    ),
    "two ends": (("--data.eos_token=<s>", "--model.args.eos_token_id=1"), "which token ends a text"),
    "another tokenizer": (("--model.hf=FOLDER/small",), "--model.vocab=tokenizer"),
    "no number in config.json": (
        ("--model.hf=FOLDER/unsaid", "--model.vocab=tokenizer"),
        "does not say how many tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_a_rank_starts(folders, name):
    (folders / "empty.jinja").write_text("\n")
    for other, change in {"small": {"vocab_size": 60}, "unsaid": {"vocab_size": None}}.items():
        (folders / other).mkdir(exist_ok=True)
        content = json.loads((folders / "untied" / "config.json").read_text()) | change
        kept = {key: value for key, value in content.items() if value is not None}
        (folders / other / "config.json").write_text(json.dumps(kept))
        for file, text in saved_files(chat.tokenizer()).items():
            (folders / other / file).write_bytes(text)
    given, said = REFUSED[name]
    with pytest.raises(sw.ConfigError) as caught:
        check_early(
            load_config(None, words(folders, "untied", *(word.replace("FOLDER", str(folders)) for word in given)))
        )
    assert said in f"{caught.value}", caught.value


def test_an_end_that_is_no_token_is_refused_with_the_option_that_adds_it(folders):
    config = load_config(None, words(folders, "untied", "--data.eos_token=<|end|>")).config
    with pytest.raises(sw.ConfigError, match=r"--model\.add_tokens='<\|end\|>'"):
        vocabulary_of(config)
    config = load_config(
        None, words(folders, "untied", "--data.eos_token=<|end|>", "--model.add_tokens=<|end|>")
    ).config
    model = build_pretrained(str(folders / "untied"), {}, rows=343, eos=vocabulary_of(config).eos)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id, model.config.vocab_size) == (342, 342, 343)


@pytest.mark.parametrize(("what", "said"), [("input", "is not a plain Embedding"), ("output", "is not a plain Linear")])
def test_a_model_without_plain_tables_is_refused_by_name(folders, monkeypatch, what, said):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, f"get_{what}_embeddings", lambda self: self.model.layers[0].mlp.up_proj)
    with pytest.raises(sw.ConfigError, match=r"model\.layers\.0\.mlp\.up_proj") as caught:
        build_pretrained(str(folders / "untied"), {}, rows=350)
    assert said in caught.value.why

    def unknown(self):
        raise NotImplementedError

    monkeypatch.setattr(LlamaForCausalLM, "get_input_embeddings", unknown)
    with pytest.raises(sw.ConfigError, match="does not say what its input embedding is"):
        build_pretrained(str(folders / "untied"), {}, rows=350)


def refusal(given: list[str]) -> str:
    try:
        started(given, "dp_shard=1")
    except sw.ShardwiseError as error:
        return str(error)
    return ""


def test_another_tensor_of_the_size_of_the_vocabulary_is_refused_by_name(ranks, folders, tmp_path):
    """BART adds a row of numbers to the logits, one for each token: it is no table."""
    tokenizer, sizes = chat.tokenizer(), {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    (said,) = ranks.run(refusal, 1, [*words(tmp_path, "bart", *_paths(folders)), "--model.add_tokens=a1"])
    assert "final_logits_bias" in said and "remove model.vocab and model.add_tokens" in said


def test_what_does_not_fit_is_known_by_the_error_and_not_by_the_name_of_a_folder(ranks, folders, tmp_path):
    folder = tmp_path / "shape-3b-dtype"
    shutil.copytree(folders / "untied", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    given = words(tmp_path, folder.name, *_paths(folders), "--model.add_tokens=a1")
    (said,) = ranks.run(refusal, 1, given)
    assert "1 of 21 tensors are missing: model.norm.weight" in said, said
    assert said.endswith(
        "fix: in this run: --model.rename={pattern: replacement}, or --model.strict=false to load what fits and draw the rest"
    )
    (said,) = ranks.run(refusal, 1, [*given, "--model.args={intermediate_size: 24}"])
    assert (
        "; or remove what is changed in model.args; or, without the rows, remove model.vocab and model.add_tokens"
        in said
    )


def test_names_of_which_none_fits_are_not_told_to_be_left_out(ranks, folders, tmp_path):
    torch.save({"nothing.weight": torch.ones(3)}, tmp_path / "other.pt")
    given = words(folders, "untied", f"--model.weights={tmp_path / 'other.pt'}", "--model.strict=false")
    (said,) = ranks.run(refusal, 1, given)
    assert "none of its 1 names" in said
    assert said.endswith("fix: in this run: --model.rename={pattern: replacement}, with weights of the same model")
