"""Stumbles of a first fine-tuning run: each is refused before a rank starts, in words that say what to change."""

import json
import sys
from pathlib import Path

import pytest
import torch
from models import chat

from shardwise.cli import main as cli


def said(user: str, answer: str, **more: str) -> str:
    first = [{"role": "system", "content": more["system"]}] if more else []
    messages = [*first, {"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


GOOD = said("what is five ?", "five")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Model directories: good, in bfloat16, with a small vocabulary, without a tokenizer, with other templates."""
    top = tmp_path_factory.mktemp("models")
    chat.saved(top / "good")
    chat.tokenizer().save_pretrained(top / "bf16")
    chat.model(400).to(torch.bfloat16).save_pretrained(top / "bf16")
    chat.tokenizer().save_pretrained(top / "small")
    chat.model(100).save_pretrained(top / "small")
    chat.model(400).save_pretrained(top / "bare")
    chat.saved(top / "raises", chat.RAISES)
    chat.saved(top / "silent", None)
    return top


STUMBLES: dict[str, tuple[str, list[str], tuple[str, ...], tuple[str, str, str]]] = {
    # model, lines, words; parts of what was given, why, fix
    "bf16 and no cast": ("bf16", [GOOD], ("--model.cast=false",), ("bf16' (override --model.hf): its weights are bfloat16", "stores float32", "remove model.cast")),
    "float32 into bf16": ("good", [GOOD], ("--parallel.precision={storage: bf16}",), ("its weights are float32", "would be rounded", "--model.cast=true")),
    "an attention": ("good", [GOOD], ("--model.args.attn_implementation=flash_attention2",), ("(override --model.args.attn", "of that name", "did you mean 'flash_attention_2'")),
    "no package": ("good", [GOOD], ("--model.args.attn_implementation=flash_attention_3",), ("flash_attention_3", "flash_attn_interface, which is not", "sdpa")),
    "no backward": ("good", [GOOD], ("--model.args.attn_implementation=flex_attention", "--launch.device=cpu"), ("launch.device=cpu", "no backward", "eager")),
    "wrong JSON": ("good", [GOOD, "{"], (), ("line 2 of ", "it is no JSON", "one JSON object in each line")),
    "a wrong record": ("good", [GOOD, '{"from": "a"}'], (), ("line 2 of ", "what is trained on", "messages")),
    "no tokenizer": ("bare", [GOOD], (), ("bare'", "there is no tokenizer.json", "a directory with a tokenizer.json")),
    "no template": ("silent", [GOOD], (), ("line 1 of ", "how messages become a text", "give it a template")),
    "a small vocabulary": ("small", [GOOD], (), ("line 1 of ", "has 100 tokens, 0 to 99", "the tokenizer that the model was made with")),
    "an empty answer": ("good", [GOOD, said("hello", " ")], (), ("line 2 of ", "learn to say nothing", "data.unusable=drop")),
    "no answer": ("good", [json.dumps({"messages": [{"role": "user", "content": "a"}]})], (), ("it has no answer", "nothing of it would be", "drop")),
    "a long prompt": ("good", [GOOD, said("there " * 60, "five")], ("--data.seq_len=32",), ("line 2 of ", "nothing of it would be", "a larger seq_len")),
    "a template that raises": ("raises", [GOOD, said("a", "b", system="c")], (), ("line 2 of ", "no system role here; the roles are system, user", "another template")),
}  # fmt: skip


@pytest.mark.parametrize("name", STUMBLES)
def test_it_is_refused_before_a_rank_starts(folders, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    model, lines, words, parts = STUMBLES[name]
    (tmp_path / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))
    given = (f"--model.hf={folders / model}", f"--data.path={tmp_path / 'chat.jsonl'}", f"--log.dir={tmp_path / 'run'}")
    assert cli.main(["train", *given, *words]) == 2
    told = capsys.readouterr().err
    head, _, rest = told.partition("\n  why: ")
    why, _, fix = rest.partition("\n  fix: ")
    for part, text in zip(parts, (head, why, fix), strict=True):
        assert part in text, told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "lines", "words"),
    [
        ("good", [GOOD, said("there " * 60, "five")], ("--data.seq_len=32", "--data.unusable=drop")),
        ("good", [GOOD, said("hello", "")], ("--data.unusable=drop",)),
        ("bf16", [GOOD], ()),
        ("bf16", [GOOD], ("--parallel.precision=fp64",)),
        ("good", [GOOD], ("--model.cast=true", "--parallel.precision={storage: bf16}")),
        ("bf16", [GOOD], ("--parallel.precision={storage: bf16}",)),
        ("small", [GOOD], ("--model.args={vocab_size: 400}",)),
        ("good", [json.dumps({"prompt": "what is", "completion": " five"}), '{"text": "hello there"}'], ()),
    ],
)
def test_what_the_ranks_would_take_starts(folders, tmp_path, monkeypatch, capsys, model, lines, words):
    started = []
    monkeypatch.setattr("shardwise.cli.train._launch", lambda loaded, command: started.append(loaded) or 0)
    (tmp_path / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))
    given = (f"--model.hf={folders / model}", f"--data.path={tmp_path / 'chat.jsonl'}")
    assert cli.main(["train", *given, *words]) == 0, capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize("template", ["CHATML", "MARKED", "WITH_BOS", "FORGETS", "THINKS"])
def test_a_first_look_renders_as_transformers_does(tmp_path, template):
    """A template that it cannot render is left to the ranks."""
    from shardwise.config.tokenizer import read_json
    from shardwise.data.sft.first_look import _Template

    made = chat.tokenizer(getattr(chat, template))
    made.save_pretrained(tmp_path)
    read = _Template.read(tmp_path, read_json(tmp_path / "tokenizer_config.json"))
    messages = json.loads(said("what is five ?", "a|five"))["messages"]
    if read.source is None:
        assert template == "MARKED"
        return
    ours = read.render(messages, tools=None, add_generation_prompt=False)
    assert ours == made.apply_chat_template(messages, tokenize=False)


def test_the_first_look_imports_no_torch(folders, tmp_path):
    import subprocess

    (tmp_path / "chat.jsonl").write_text(f"{GOOD}\n{said('hello', '')}\n")
    words = ["train", f"--model.hf={folders / 'good'}", f"--data.path={tmp_path / 'chat.jsonl'}"]
    code = "import sys\nfrom shardwise.cli.main import main\nstatus = main(sys.argv[1:])\nsys.exit(9 if 'torch' in sys.modules else status)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
