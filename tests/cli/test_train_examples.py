"""The examples run as their first lines say, and give the same numbers on one rank and on two."""

import contextlib
import io
import re
import runpy
import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest
from cli.commands import on_ranks

from shardwise.run.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_script(path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch was seeded")  # by a test before it, in this process
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


# They take a directory (below), or train nothing (its page's commands run it).
WITH_WORDS = (
    "own_data.py",
    "small_chat.py",
    "in_peft.py",
    "small_model.py",
    "finetune.py",
    "finetune.yaml",
    "example_convert.py",
)


@pytest.mark.quick("example_init.py", "own_loop.py")
@pytest.mark.parametrize(
    "script", sorted(p for p in EXAMPLES.glob("*.py") if p.name not in WITH_WORDS), ids=lambda path: path.name
)
def test_one_process_and_two_ranks_print_the_same_losses(ranks, script):
    (one,), (two, other) = ranks.run(run_script, 1, str(script)), ranks.run(run_script, 2, str(script))
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", text)] for text in (one, two)]
    assert len(numbers[0]) >= 3 and other == ""
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-4)
    assert numbers[0][-2] < numbers[0][0], "it learns"


@pytest.mark.parametrize(
    "file", sorted(p for p in EXAMPLES.glob("*.yaml") if p.name not in WITH_WORDS), ids=lambda path: path.name
)
def test_configs_are_understood(file):
    """They are run where a page shows the command: tests/test_docs.py."""
    assert load_config(file, []).origins["optim.lr"].startswith(str(file))
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    assert any(f"shardwise train examples/{file.name}" in page.read_text() for page in pages)


# ---- from a model directory to a model directory ---------------------------------------------------------------------


def make_small(folder: str) -> float:
    with mock.patch("torch.set_num_threads"):  # a second one would wait busily for its core: twice the time of one
        return runpy.run_path(str(EXAMPLES / "small_model.py"))["main"](folder, 12)


@pytest.fixture(scope="module")
def small(ranks, tmp_path_factory) -> Path:
    """A model directory that stock transformers has written."""
    folder = tmp_path_factory.mktemp("small")
    assert ranks.run(make_small, 1, str(folder), timeout_s=110)[0] < 5.6
    return folder


def finetune(source: str, dest: str) -> tuple[tuple[float, float], str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = runpy.run_path(str(EXAMPLES / "finetune.py"))["main"](source, dest, 6)
    return losses, printed.getvalue()


def test_a_model_directory_is_fine_tuned_and_opened_by_the_stock_library(ranks, small, tmp_path):
    (one,) = ranks.run(finetune, 1, str(small), str(tmp_path / "one"), timeout_s=100)
    two, other = ranks.run(finetune, 2, str(small), str(tmp_path / "two"), timeout_s=100)
    assert two[0] == pytest.approx(one[0], abs=1e-4) and two[0][1] < two[0][0] and other[1] == ""
    assert "opened by transformers, outputs differ by" in two[1] and "tensors from" in two[1]


def tokens_of(source: str) -> list[int]:
    return runpy.run_path(str(EXAMPLES / "finetune.py"))["tokens"](source).tolist()


def test_a_model_with_a_tokenizer_is_fine_tuned_on_its_tokens(ranks, small, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    shutil.copytree(small, tmp_path / "words")
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "import": 2, "self": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    found = ranks.run(tokens_of, 1, str(tmp_path / "words"))[0]
    assert set(found) == {0, 1, 2, 3} and found[:20] != ranks.run(tokens_of, 1, str(small))[0][:20]
    ranks.run(finetune, 1, str(tmp_path / "words"), str(tmp_path / "tuned"), timeout_s=100)
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned")("import self")["input_ids"] == [2, 3]


@pytest.mark.soak
def test_the_command_line_fine_tunes_it_and_the_stock_library_measures_the_same_loss(ranks, small, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from shardwise.run.datasets import open_data
    from shardwise.run.metrics import read_metrics

    words = ["--train.steps=3", "--train.eval_every=0", f"--log.dir={tmp_path}", "--log.plot=false"]
    words += [f"--model.hf={small}", "--data.val_fraction=0.005"]
    words += [
        "--train.prove=false"
    ]  # runs of a model directory are proved in test_train_chat.py, in a quarter of the time
    told = on_ranks(ranks, "train", "examples/finetune.yaml", *words, folder=ROOT)
    assert re.search(r" weights \d+ tensors from", told)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    (val,) = [row["loss"] for row in rows if row["kind"] == "val"]
    first = next(row["loss"] for row in rows if row["kind"] == "step")
    assert first < 5.2, "an untrained model has ln 256 = 5.5"
    config = load_config(EXAMPLES / "finetune.yaml", words).config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
    total, count = 0.0, 0
    for sample in torch.utils.data.DataLoader(open_data(config.data, vocab=None).val, batch_size=16):
        tokens = sample["input_ids"].long()
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        )
        count += tokens[:, 1:].numel()
    assert total / count == pytest.approx(val, abs=1e-4)


# ---- adapters ------------------------------------------------------------------------------------------------------------


def shape(text: str) -> str:
    """A text without its figures."""
    return re.sub(r"\d[\d,.]*", "#", " ".join(text.removeprefix("files").split()))


def make_chat(folder: str) -> None:
    runpy.run_path(str(EXAMPLES / "small_chat.py"))["main"](folder, 40)


def in_peft(run: str) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(EXAMPLES / "in_peft.py"))["main"](run)


def test_adapters_are_trained_resumed_and_started_from_and_peft_opens_them(ranks, tmp_path):
    """What ``make finetune`` runs, shortened."""
    from safetensors.torch import load_file

    from shardwise.run.metrics import read_metrics

    pytest.importorskip("peft")
    ranks.run(make_chat, 1, str(tmp_path / "chat"), timeout_s=100)
    words = [f"--model.hf={tmp_path / 'chat'}", f"--data.path={tmp_path / 'chat/swapped.jsonl'}", "--log.plot=false"]
    words += ["--train.eval_every=4", "--train.prove=false"]

    def train(name, *more, num_ranks=2):
        given = [*words, f"--log.dir={tmp_path / name}", *more]
        return on_ranks(ranks, "train", str(EXAMPLES / "lora.yaml"), *given, folder=ROOT, num_ranks=num_ranks)

    told = train("run", "--train.steps=4", "--checkpoint.every=4")
    assert re.search(r"\d parameters, 69,632 of them trained in 1 unit", told)
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- shape of: a run of examples/lora.yaml -->\n```text\n")[2].partition("\n```")[0]
    assert len(shown.splitlines()) == 7
    for line in shown.splitlines():
        assert shape(line) in shape(told.replace(str(tmp_path / "run"), "runs/chat-lora")), line
    assert "from step 4 of" in train("run", "--train.steps=8", "--checkpoint.every=4")
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["kind"] == "val"]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    pytest.importorskip("bitsandbytes")
    assert ranks.run(in_peft, 1, str(tmp_path / "run"))[0] < 1e-4

    again = [
        "--parallel.lora=null",
        f"--model.adapter={tmp_path / 'run/adapter'}",
        "--train.steps=1",
        "--optim.lr=1e-30",
    ]
    train("again", *again, "--checkpoint.export=null", "--checkpoint.dtype=null", num_ranks=1)
    found, before = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("again", "run"))
    assert found.keys() == before.keys() and all((found[key] == before[key]).all() for key in found)
    assert not (tmp_path / "again/weights").exists()
    told = train(
        "again", *again[:-1], "--checkpoint.export=null", "--checkpoint.dtype=null", "--optim.lr=1e-3", num_ranks=1
    )
    assert f"older the adapters of the run before stay in {tmp_path / 'again/adapter.previous'}" in told
    assert f"{tmp_path / 'again/adapter.previous'} (adapters of the run before)" in told
    kept = load_file(tmp_path / "again/adapter.previous/adapter_model.safetensors")
    assert all((kept[key] == before[key]).all() for key in kept), "the run before changed nothing"
    now = load_file(tmp_path / "again/adapter/adapter_model.safetensors")
    assert not all((now[key] == before[key]).all() for key in now)
    assert "lr: 1e-30" in (tmp_path / "again/config.previous.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parallel.lora.rank=4", "--model.freeze=[lm_head.*]"], "parallel.lora.exclude"),
        (["--parallel.lora.rank=4", "--model.train_only=[lm_head.*]"], "parallel.lora.train"),
        (["--checkpoint.adapter=there"], "there are no adapters"),
        (["--checkpoint.base=there"], "there are no adapters"),
        (["--checkpoint.base=there", "--parallel.lora.rank=4"], "without parallel.quantize"),
        (
            ["--checkpoint.export=./adapter", "--parallel.lora.rank=4"],
            "checkpoint.adapter='adapter' with checkpoint.export='./adapter'",
        ),
        (
            ["--checkpoint.base=weights", "--parallel.lora.rank=4", "--parallel.quantize=nf4"],
            "checkpoint.base='weights' with checkpoint.export",
        ),
        (["--model.adapter=there"], "without model.weights or model.hf"),
        (["--model.adapter=there", "--model.hf=here"], "adapter_config.json cannot be read"),
        (["--parallel.lora.r=4"], "parallel.lora.rank"),
    ],
)
def test_keys_about_adapters_that_would_have_no_effect(words, told):
    from shardwise.errors import ShardwiseError

    with pytest.raises(ShardwiseError, match=re.escape(told)):
        load_config(None, words)
