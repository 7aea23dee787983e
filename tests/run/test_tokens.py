"""What the tokens of a run are: a text for a model that has a tokenizer, files that are no text, tokens the model does not know."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import shardwise as sw
from shardwise.cli import main as cli
from shardwise.data.corpus import encode
from shardwise.run import job
from shardwise.run.config import load_config
from shardwise.run.metrics import read_metrics

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "mat", "and"]
TEXT = "\n".join(" ".join(WORDS[(i * j) % 8] for j in range(1, 9)) for i in range(1, 60)) + "\n"
TINY = ["--train.steps=1", "--launch.nproc=1", "--log.plot=false", "--data.seq_len=8", "--launch.device=cpu"]


def tokenizer_in(folder: Path) -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, **{word: i for i, word in enumerate(WORDS, 1)}}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def models_of(tmp_path_factory) -> Path:
    """Directories as people have them: ``words`` with a tokenizer, ``bare`` without, ``bytes`` with a vocabulary of 256."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, size in (("words", 9), ("bare", 300), ("bytes", 256)):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        GPT2LMHeadModel(GPT2Config(vocab_size=size, **sizes)).save_pretrained(root / name)
    tokenizer_in(root / "words")
    (root / "text.txt").write_text(TEXT)
    np.save(root / "ids.npy", np.arange(200) % 12)
    return root


@pytest.fixture
def started(monkeypatch):
    """What was started: nothing, where a run is refused."""
    calls: list[object] = []

    def start(*args, **_):
        calls.append(args)
        raise sw.ConfigError("started", why="nothing was refused", fix="-")

    monkeypatch.setattr("shardwise.launch.launch_local", start)
    return calls


def told(capsys, *words) -> str:
    assert cli.main(["train", *TINY, *words]) == 2
    return capsys.readouterr().err


def test_a_text_for_a_model_with_a_tokenizer_is_refused_until_it_is_said_what_its_tokens_are(
    models_of, started, capsys, tmp_path
):
    text, words = f"--data.path={models_of / 'text.txt'}", f"--model.hf={models_of / 'words'}"
    log = f"--log.dir={tmp_path / 'run'}"
    for given in ([words, text], [words]):
        error = told(capsys, log, *given)
        assert "which has a tokenizer (tokenizer.json)" in error and "--data.tokenizer=hf" in error
    weights = told(capsys, log, "--model.build=json:loads", f"--model.weights={models_of / 'words'}", text)
    assert "which has a tokenizer" in weights and f"--data.tokenizer={models_of / 'words'}" in weights
    assert "a vocabulary of 300 tokens" in told(capsys, log, f"--model.hf={models_of / 'bare'}", text)
    assert not started and not (tmp_path / "run").exists()
    taken = (
        [words, text, "--data.tokenizer=bytes"],
        [words, text, "--data.tokenizer=hf"],
        [words, text, f"--data.tokenizer={models_of / 'words' / 'tokenizer.json'}"],
        [words, f"--data.path={models_of / 'ids.npy'}"],
        [f"--model.hf={models_of / 'bytes'}", text],
        [f"--model.hf={models_of / 'bare'}", "--model.args.vocab_size=256", text],
        [text],
    )
    for number, given in enumerate(taken, 1):
        assert "nothing was refused" in told(capsys, log, *given) and len(started) == number


def test_a_tokenizer_that_is_not_there_or_has_no_effect_is_refused(models_of, started, capsys, tmp_path):
    text, npy = f"--data.path={models_of / 'text.txt'}", f"--data.path={models_of / 'ids.npy'}"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").write_bytes(b"\n")
    for given, error in (
        ([text, "--data.tokenizer=nope"], "there is no tokenizer.json"),
        ([text, f"--data.tokenizer={tmp_path / 'old'}"], "it has tokenizer.model"),
        ([text, "--data.tokenizer=hf"], "data.tokenizer='hf' without model.hf"),
        ([npy, "--data.tokenizer=bytes"], "the file holds tokens already"),
    ):
        assert error in told(capsys, f"--log.dir={tmp_path / 'run'}", *given)
    assert not started


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", b'{"text": "x"}\n' * 9, "without data.tokenizer"),
        ("a.json", b'[{"text": "x"},\n {"text": "y"}]' * 9, "without data.tokenizer"),
        ("a.csv", b"prompt,completion\na,b\n" * 9, "it is a table"),
        ("a.txt", b'{"text": "a { cat"}\n\n{"text": "b"}\n' * 9, "it is JSON"),
        ("a.txt", b"PAR1\0\0\0" * 9, "bytes of value 0"),
        ("a.txt", b"{x: 1}\n{'y': 2}\n3\n" * 9, None),
        ("a.txt", b'{"text": "x"}\nwords\n' * 9, None),
        ("a.txt", b"\n\n12\n34\n" * 9, None),
    ],
)
def test_a_file_that_is_no_text_is_refused(started, capsys, tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    words = [f"--log.dir={tmp_path / 'run'}", f"--data.path={tmp_path / name}"]
    said = told(capsys, *words)
    assert (error or "nothing was refused") in said
    assert "nothing was refused" in told(capsys, *words, "--data.tokenizer=bytes") and len(started) == 2 - bool(error)


def train(*words):
    kept = [word for word in TINY if not any(other.startswith(word.partition("=")[0]) for other in words)]
    config = load_config(None, [*kept, "--parallel.layout=dp_shard=-1", "--data.val_fraction=0.1", *words]).config
    with sw.init("dp_shard=-1", device="cpu", timeout_s=30) as world:
        try:
            return job.train(config, world, lambda kind, **fields: None)
        except sw.ConfigError as error:
            return str(error)


def test_a_run_by_the_tokenizer_of_its_model_writes_weights_that_transformers_uses(ranks, models_of, tmp_path):
    source = models_of / "words"
    words = [f"--model.hf={source}", f"--data.path={models_of / 'text.txt'}", "--data.tokenizer=hf"]
    ranks.run(train, 2, *words, "--train.steps=60", "--optim.lr=0.05", f"--log.dir={tmp_path}")
    expected = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    assert encode(models_of / "text.txt", source / "tokenizer.json").tolist() == expected
    rows = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "step"]
    assert rows[-1] < 0.7 * rows[0], "it learns words"
    model, tokenizer = (kind.from_pretrained(tmp_path / "weights") for kind in (AutoModelForCausalLM, AutoTokenizer))
    batch = tokenizer(TEXT.splitlines()[:5], return_tensors="pt")["input_ids"]
    assert model(input_ids=batch, labels=batch).loss.item() < 0.7 * rows[0]
    assert f"tokenizer: {source}" in (tmp_path / "config.yaml").read_text()


def exported(ranks, tmp_path, *words):
    assert isinstance(ranks.run(train, 1, *words, f"--log.dir={tmp_path}")[0], dict)
    return sorted(path.name for path in (tmp_path / "weights").glob("tokenizer*"))


def test_weights_have_the_tokenizer_that_they_were_trained_with(ranks, models_of, tmp_path):
    text, npy = f"--data.path={models_of / 'text.txt'}", f"--data.path={models_of / 'ids.npy'}"
    (tmp_path / "other").mkdir()
    shutil.copytree(models_of / "bytes", tmp_path / "both")
    tokenizer_in(tmp_path / "both")
    source = f"--model.hf={tmp_path / 'both'}"
    tokenizer = sorted(path.name for path in (models_of / "words").glob("tokenizer*"))
    assert exported(ranks, tmp_path / "0", source, text, "--data.tokenizer=bytes") == []
    assert exported(ranks, tmp_path / "1", source, npy) == tokenizer
    by_another = [f"--model.hf={models_of / 'bytes'}", text, f"--data.tokenizer={models_of / 'words'}"]
    assert exported(ranks, tmp_path / "2", *by_another) == tokenizer


OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
    def get_input_embeddings(self):
        return self.embed
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))
"""


def test_tokens_that_the_model_does_not_know_are_refused_before_the_first_step(ranks, models_of, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    npy = f"--data.path={models_of / 'ids.npy'}"
    for given, size in (([f"--model.hf={models_of / 'words'}"], 9), ([f"--model.build={tmp_path / 'own.py'}:Own"], 7)):
        for error in ranks.run(train, 2, *given, npy, f"--log.dir={tmp_path / 'run'}"):
            assert re.search(r"token \d+ at position \d+ of .*ids\.npy", error) and f"has {size} tokens" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_text_is_given_to_a_tokenizer_in_pieces(models_of, tmp_path, monkeypatch):
    tokenizer = models_of / "words" / "tokenizer.json"
    (tmp_path / "t.txt").write_text(TEXT)
    whole = encode(tmp_path / "t.txt", tokenizer)
    monkeypatch.setattr("shardwise.data.corpus._PIECE", 50)
    (tmp_path / "u.txt").write_text(TEXT)
    assert np.array_equal(encode(tmp_path / "u.txt", tokenizer), whole) and whole.dtype == np.uint32
    (tmp_path / "v.txt").write_bytes(b"caf\xe9 " * 9)
    with pytest.raises(sw.ConfigError, match="it is not UTF-8"):
        encode(tmp_path / "v.txt", tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(sw.ConfigError, match="cannot be read as a tokenizer"):
        encode(tmp_path / "t.txt", tmp_path / "tokenizer.json")
