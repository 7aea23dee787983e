"""``shardwise generate``: the tokens of transformers' own ``generate``, as text that comes piece by piece; and what is refused."""

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import chat
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from shardwise.cli import main as cli
from shardwise.errors import ConfigError
from shardwise.run.build import build_plain
from shardwise.run.config import load_config
from shardwise.run.generation import _merge, _Tokenizer, generate_text
from shardwise.run.model_folder import find_model, has_template
from shardwise.run.sample import complete_text

ASKED = "what is five ?"
OPTIONS = {"max_tokens": 20, "temperature": 0.0, "seed": 0, "device": "cpu", "dtype": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that has learned nothing: it says what its random weights say, and never its end token."""
    torch.manual_seed(1)
    found = chat.saved(tmp_path_factory.mktemp("model"), max_position_embeddings=64, initializer_range=0.5)
    GenerationConfig(eos_token_id=3).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """The folder of a run of the reference model, as ``make demo`` leaves it."""
    found = tmp_path_factory.mktemp("runs") / "latest"
    found.mkdir()
    (found / "config.yaml").write_text("model: {args: {dim: 32, num_layers: 2, ffn: 48}}\ndata: {seq_len: 16}\n")
    torch.manual_seed(2)
    model = build_plain(load_config(found / "config.yaml").config)
    for name in ("weights", "checkpoints/step-00000002"):
        (found / name).mkdir(parents=True)
        save_file(model.state_dict(), found / name / "model.safetensors")
    return found


def expected(folder: Path, text: str, num: int = 20, **how) -> list[int]:
    """What transformers makes of a text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=how.pop("special", True), return_tensors="pt")
    return model.generate(**ids, max_new_tokens=num, do_sample=False, **how)[0, ids["input_ids"].shape[1] :].tolist()


def test_it_makes_the_tokens_of_transformers_with_a_cache(folder, monkeypatch):
    given, real = [], LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, input_ids=None, **k: given.append(input_ids.shape[1]) or real(self, input_ids, **k),
    )
    pieces: list[str] = []
    done = generate_text(find_model(str(folder)), ASKED, is_chat=False, write=pieces.append, **OPTIONS)
    monkeypatch.undo()
    assert given[0] > 1 and given[1:] == [1] * 19
    assert done.tokens == expected(folder, ASKED) and len(set(done.tokens)) > 3
    assert "".join(pieces) == AutoTokenizer.from_pretrained(folder).decode(done.tokens, skip_special_tokens=True)
    assert sum(map(bool, pieces)) > 3 and "ended by --max-tokens 20" in str(done)


@pytest.mark.parametrize("whose", ["model", "tokenizer"])
def test_it_stops_at_an_end_token(folder, tmp_path, whose):
    tokens = expected(folder, ASKED)
    end = next(t for n, t in enumerate(tokens) if n > 3 and t not in tokens[:n])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if whose == "model":
        model.generation_config.eos_token_id = [399, end]
    else:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = generate_text(find_model(str(tmp_path)), ASKED, is_chat=False, write=lambda _: None, **OPTIONS)
    assert done.tokens == tokens[: tokens.index(end) + 1] and "ended by " in str(done)


def test_a_message_goes_through_the_template_unless_raw(folder, capsys, monkeypatch):
    tokenizer, words = AutoTokenizer.from_pretrained(folder), ["--max-tokens", "8", "--device", "cpu"]
    templated = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    for more, text, special in ((["--chat"], templated, False), ([], templated, False), (["--raw"], ASKED, True)):
        monkeypatch.setattr("sys.stdin", io.StringIO(ASKED))
        assert cli.main(["generate", str(folder), "--prompt", "-" if more else ASKED, *more, *words]) == 0
        told = tokenizer.decode(expected(folder, text, 8, special=special), skip_special_tokens=True)
        assert capsys.readouterr().out == f"{told}\n"


def test_what_is_drawn_follows_the_seed(folder):
    def drawn(seed):
        given = {**OPTIONS, "temperature": 2.0, "seed": seed}
        return generate_text(find_model(str(folder)), ASKED, is_chat=True, write=lambda _: None, **given).tokens

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_full_context_ends_it_and_is_said(folder):
    given = {**OPTIONS, "max_tokens": 500}
    done = generate_text(find_model(str(folder)), ASKED, is_chat=False, write=lambda _: None, **given)
    assert "the context of 64 tokens is full" in str(done)


@pytest.mark.parametrize("inner", ["", "weights", "checkpoints/step-00000002"])
def test_the_export_of_the_demo_is_continued_byte_by_byte(run_folder, inner, capsys):
    text = "The import Ünder "
    assert (
        cli.main(["generate", str(run_folder / inner), "--prompt", text, "--max-tokens", "30", "--device", "cpu"]) == 0
    )
    from safetensors.torch import load_file

    model = build_plain(load_config(run_folder / "config.yaml").config)
    model.load_state_dict(load_file(run_folder / "weights" / "model.safetensors"))
    assert capsys.readouterr().out == f"{complete_text(model, text, 30, device=torch.device('cpu'), context=16)}\n"


def test_a_model_directory_of_bytes_is_known_by_its_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("data: {tokenizer: bytes}\n")
    chat.model(256).save_pretrained(tmp_path / "weights")
    assert cli.main(["generate", str(tmp_path), "--prompt", "ab", "--max-tokens", "3", "--device", "cpu"]) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").generate(
        torch.tensor([[97, 98]]), max_new_tokens=3, do_sample=False
    )
    assert capsys.readouterr().out == f"{bytes(made[0, 2:].tolist()).decode(errors='replace')}\n"


def test_pieces_of_a_text_are_those_of_the_whole(folder):
    text, draw = _Tokenizer(folder), random.Random(0)
    for _ in range(20):
        pieces: list[str] = []
        stream, tokens = text.stream(pieces.append), text.encode("häuser 家 и\n ok", is_chat=False)
        tokens = tokens[1:] + [draw.randrange(5, 300) for _ in range(30)]
        for token in tokens:
            stream.put_token(torch.tensor([token]))
        stream.end()
        whole = AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True)
        assert "".join(pieces) == whole


REFUSED = {
    "no directory": (["nowhere"], "there is no such directory"),
    "a file": (["text.txt"], "it is a file"),
    "an empty directory": (["empty"], "there is no model in it"),
    "no tokenizer": (["bare"], "nothing says which tokens"),
    "own code": (["own"], "the model is built by own.py:build"),
    "a run that did not end": (["began"], "its final weights are not there"),
    "chat of bytes": (["demo", "--chat"], "it was trained without a tokenizer"),
    "chat without a template": (["silent", "--chat"], "has no chat template"),
    "both": (["silent", "--chat", "--raw"], "leave one out"),
    "no tokens": (["silent", "--max-tokens=0"], "a number from 1"),
    "cold": (["silent", "--temperature=-1"], "such as 0.7"),
    "no number": (["silent", "--max-tokens=x"], "invalid int value"),
    "a dtype": (["silent", "--dtype=int4"], "there is no such dtype"),
    "no UTF-8": (["silent", "--prompt", "caf\udce9"], "iconv -f latin1 -t utf-8"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("refused")
    for name, content in (("own", "model: {build: 'own.py:build'}"), ("began", "{}"), ("demo", "{}")):
        (top / name / "weights").mkdir(parents=True)
        (top / name / "config.yaml").write_text(content)
        (top / name / "weights" / "model.safetensors").write_bytes(b"")
    (top / "began" / "weights" / "model.safetensors").unlink()
    (top / "began" / "weights").rmdir()
    (top / "empty").mkdir()
    (top / "text.txt").write_text("a")
    chat.model(400).save_pretrained(top / "bare")
    chat.saved(top / "silent", None)
    chat.saved(top / "raises", chat.RAISES.replace("'system'", "'user'"))
    return top


def test_what_cannot_work_is_refused_without_torch(folders):
    """All of them in one process, to which torch must not come."""
    code = (
        "import json, sys\nfrom shardwise.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n    print(main(words), end=' ')\n    print('', file=sys.stderr)\n"
        "print('torch' in sys.modules)"
    )
    words = [
        ["generate", *(given if "--prompt" in given else [*given, "--prompt", "a"])] for given, _ in REFUSED.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(words)], capture_output=True, text=True, timeout=60, cwd=folders
    )
    assert done.stdout.split() == ["2"] * len(REFUSED) + ["False"], done.stdout + done.stderr
    for (_, said), told in zip(REFUSED.values(), done.stderr.split("\n\n"), strict=False):
        assert said in told and "fix: " in told


def test_what_the_model_refuses_is_said(folders, folder, tmp_path, capsys):
    chat.tokenizer().save_pretrained(tmp_path / "small")
    chat.model(100).save_pretrained(tmp_path / "small")
    for place, words, said in (
        (folders / "raises", [ASKED], "no system role here"),
        (folder, [" ".join([ASKED] * 40), "--raw"], "the model has 64 positions"),
        (tmp_path / "small", [ASKED, "--raw"], "the model's vocabulary has 100 tokens"),
    ):
        assert cli.main(["generate", str(place), "--device", "cpu", "--prompt", *words]) == 2
        told = capsys.readouterr()
        assert said in told.err and not told.out


def test_weights_that_lack_tensors_are_refused(folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, state_dict={n: t for n, t in model.state_dict().items() if "norm" not in n})
    chat.tokenizer().save_pretrained(tmp_path)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a", "--device", "cpu"]) == 2
    assert "they would be drawn at random" in capsys.readouterr().err


def test_weights_beside_adapters_are_not_generated_from_or_converted_as_if_they_were_merged(folder, tmp_path, capsys):
    """transformers leaves out what it does not know, and answers as the base did: logits were off by 0.84."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    state, low = model.state_dict(), "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    model.save_pretrained(tmp_path / "run", state_dict=state | {low: state["model.norm.weight"].clone()[None]})
    chat.tokenizer().save_pretrained(tmp_path / "run")
    for status, *words in ((2, "generate", "run", "--prompt", "a", "--device", "cpu"), (1, "convert", "run", "out")):
        words[1:] = [str(tmp_path / each) if each in ("run", "out") else each for each in words[1:]]
        assert cli.main(words) == status
        assert low in (told := capsys.readouterr().err) and "RUN/adapter" in told
    assert not (tmp_path / "out").exists()
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "out.pt"), "--to", "torch"]) == 0


def test_the_weights_of_a_checkpoint_are_compared_with_their_checksums(folder, tmp_path, capsys):
    checkpoint = tmp_path / "step-00000001"
    assert cli.main(["convert", str(folder), str(checkpoint), "--to", "shardwise"]) == 0
    words = ["generate", str(checkpoint), "--prompt", "a", "--raw", "--device", "cpu", "--max-tokens", "2"]
    assert cli.main(words) == 0
    (file,) = checkpoint.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert cli.main(words) != 0 and file.name in capsys.readouterr().err


def test_a_base_that_is_packed_is_to_be_merged_first(folder, tmp_path):
    model = LlamaForCausalLM.from_pretrained(folder)
    weight = next(name for name, _ in model.named_parameters() if name.endswith("q_proj.weight"))
    model.get_submodule(weight.removesuffix(".weight")).weight = torch.nn.Parameter(
        torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(ConfigError, match=r"shardwise convert .* --adapter") as caught:
        _merge(model, folder, tmp_path)
    assert caught.value.name == weight


@pytest.mark.soak  # in a process of its own; all others call the command in this one
def test_as_a_user_starts_it(folder):
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "generate", folder, "--prompt", ASKED, "--raw", "--max-tokens", "20"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert done.stdout == f"{tokenizer.decode(expected(folder, ASKED), skip_special_tokens=True)}\n", done.stderr
    assert done.stderr.startswith("(20 tokens in ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "has"),
    [
        ({"tokenizer_config.json": {"chat_template": "{{ messages }}"}}, True),
        ({"tokenizer_config.json": {"chat_template": None}}, False),
        ({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "{{ messages }}"}}, True),
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({}, False),
    ],
)
def test_a_chat_template_is_found_where_transformers_finds_it(tmp_path, files, has):
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert has_template(tmp_path) is has
