"""Which changes of a configuration a run that goes on refuses, and which it takes."""

import contextlib
import json
import re

import pytest

from shardwise.config.loader import dotted_keys
from shardwise.config.render import dump_config
from shardwise.errors import ConfigError
from shardwise.run import resume_check
from shardwise.run.config import RunConfig, load_config
from shardwise.run.resume_check import changes_since

FP16 = "--parallel.precision=fp16"


@pytest.fixture
def since(monkeypatch, tmp_path):
    """``since(words before, words now)``: the changes that take effect."""

    def since(before, now, *, tells_files=True, files=None):
        texts = resume_check.texts_of(load_config(None, before).config)
        path = tmp_path / "config.yaml"
        path.write_text(texts[resume_check.CONFIG])
        values = resume_check.flat(resume_check.EXTENSIONS[".yaml"](path.read_text(), str(path)).values)
        files = files or (json.loads(texts[resume_check.FILES]) if tells_files else {})
        saved = resume_check._Saved(folder=tmp_path / "step-00000002", values=values, files=files)
        monkeypatch.setattr(resume_check, "_newest", lambda root: saved)
        return changes_since(tmp_path, load_config(None, now).config)

    return since


def test_the_same_command_changes_nothing(since):
    words = [
        FP16, "--optim.lr=1e-2", "--optim.betas=[0.9, 0.99]", "--model.args={dim: 32}", "--train.scaler.init_scale=8",
        "--parallel.transforms=[]", "--checkpoint.export=null", "--parallel.sharding={offload: true}",
    ]  # fmt: skip
    assert since(words, words) == []
    assert since([], []) == []


@pytest.mark.parametrize(
    ("before", "now", "key", "told"),
    [
        ([], ["--optim.lr=1e-4"], "optim.lr", "optim.lr is 0.0001, and was 0.003: the optimizer keeps"),
        (["--optim.weight_decay=0.5"], [], "optim.weight_decay", "is 0.1, and was 0.5"),
        ([], ["--optim.betas=[0.8, 0.9]"], "optim.betas", "is [0.8, 0.9], and was [0.9, 0.95]"),
        ([], ["--optim.name=sgd"], "optim.name", "is sgd, and was adamw"),
        ([], ["--train.seed=5"], "train.seed", "is 5, and was 0: the order of samples"),
        ([FP16], [FP16, "--train.scaler.growth_interval=5"], "train.scaler.growth_interval", "is 5, and was 2000"),
        (["--model.args={dim: 32}"], ["--model.args={dim: 64}"], "model.args.dim", "is 64, and was 32: the checkpoint"),
        ([], ["--model.args={dim: 64}"], "model.args.dim", "is 64, and was not given: the"),
        (["--model.build=a.py:fn"], ["--model.build=b.py:fn"], "model.build", 'is "b.py:fn", and was "a.py:fn"'),
        ([], ["--model.weights=other"], "model.weights", "is other, and was null: the weights are those of"),
        ([], ["--parallel.init=rank0"], "parallel.init", "is rank0, and was null"),
        (["--parallel.lora.rank=4"], ["--parallel.lora.rank=8"], "parallel.lora.rank", "is 8, and was 4"),
        ([], ["--data.seq_len=64"], "data.seq_len", "is 64, and was 128: the position in the data"),
        ([], ["--data.val_fraction=0.2"], "data.val_fraction", "is 0.2, and was 0.1"),
    ],
)  # fmt: skip
def test_what_could_take_no_effect_is_refused_with_both_values(since, before, now, key, told):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        since(before, now)
    assert caught.value.given.startswith(f"{key}: not as in the run that ")
    assert (f"--{key}=" in caught.value.fix or f": no {key};" in caught.value.fix) and "--fresh" in caught.value.fix


def test_a_base_that_checkpoints_leave_out_may_be_named_anew_and_is_compared_when_it_is_loaded(since):
    words, leaves = ["--parallel.lora.rank=4", "--checkpoint.every=5"], "--checkpoint.frozen=leave"
    assert since(words, [*words, leaves]) == ["checkpoint.frozen save -> leave"]
    changed = since([*words, leaves], [*words, "--model.weights=other", "--model.cast=true"])
    assert changed == ["checkpoint.frozen leave -> save"]
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        since([*words, leaves], [*words, leaves, "--model.weights=base", "--model.adapter=other"])


def test_every_key_that_is_refused_is_named(since):
    with pytest.raises(ConfigError) as caught:
        since([], ["--optim.lr=1e-4", "--train.seed=5", "--train.steps=7"])
    assert caught.value.given.startswith("optim.lr, train.seed: ")
    assert "--optim.lr=0.003, --train.seed=0;" in caught.value.fix and "train.steps" not in str(caught.value)


def test_what_takes_effect_is_taken_and_named(since, tmp_path, monkeypatch):
    now = [
        "--train.steps=800", "--schedule.min_lr_ratio=0.2", "--train.max_grad_norm=null", "--data.global_batch=32",
        "--parallel.layout=dp_shard=1", "--log.every=5", "--checkpoint.every=3", "--launch.nproc=1",
    ]  # fmt: skip
    kept = ["--data.path=x.txt", "--data.tokenizer=."]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert since(kept, [*kept, "--data.cache=a/folder/of/this/node"]) == []
    assert since([], now) == [
        "data.global_batch 16 -> 32",
        "parallel.layout dp_shard=-1 -> dp_shard=1",
        "schedule.min_lr_ratio 0.1 -> 0.2",
        "train.steps 500 -> 800",
        "train.max_grad_norm 1.0 -> null",
    ]


def test_how_the_first_weights_came_may_be_left_out(since):
    began = [
        "--model.weights=old",
        "--model.cast=true",
        "--model.strict=false",
        "--model.rename={a: b}",
        "--parallel.init=load",
    ]
    assert since(began, []) == []
    with pytest.raises(ConfigError, match=r"model\.weights is new, and was old"):
        since(began, ["--model.weights=new"])


@pytest.mark.parametrize("tells_files", [True, False])
def test_data_is_compared_by_what_is_in_it(since, tmp_path, tells_files):
    one, copy, other = (tmp_path / name for name in ("one.txt", "copy.txt", "other.txt"))
    one.write_text("one two three. " * 40)
    copy.write_text("one two three. " * 40)
    other.write_text("one two three! " * 40)
    at = [f"--data.path={path}" for path in (one, copy, other)]
    assert since(at[:1], at[1:2], tells_files=tells_files) == []
    for before, now in ((at[:1], at[2:]), (at[:1], []), ([], at[:1])):
        with pytest.raises(ConfigError, match=r"data\.path is .* \(.* sha256 .*\), and was "):
            since(before, now, tells_files=tells_files)


CODE = (
    "model.build",
    "data.build",
    "optim.build",
    "schedule.build",
    "train.loss",
    "train.count",
    "train.forward",
    "train.callback",
)


@pytest.mark.parametrize("key", CODE)
def test_a_function_whose_file_has_moved_is_the_same_and_one_that_was_edited_is_named(
    since, tmp_path, monkeypatch, key
):
    """A comment may be corrected, so it is no error; what a file imports is not looked at."""
    (tmp_path / "own").mkdir()
    one, copy = tmp_path / "own/own.py", tmp_path / "own.py"
    for file in (one, copy):
        file.write_text("def fn(**args): return 1\n")
    monkeypatch.chdir(tmp_path)
    before = [f"--{key}=own/own.py:fn"]
    noted = given_by(before)
    assert since(before, [f"--{key}=own.py:fn"], files=noted) == since(before, before, files=noted) == []
    told = f"the file of {key}=own.py:fn has changed since the checkpoint was saved"
    copy.write_text("def fn(**args): return 2\n")
    assert since(before, [f"--{key}=own.py:fn"], files=noted) == [told]
    module = [f"--{key}=own:fn"]
    noted = given_by(module)
    copy.write_text("def fn(**args): return 3\n")
    assert since(module, module, files=noted) == [told.replace("own.py", "own")]
    assert (
        since(module, module, files={"data.path": noted["data.path"]} if "data.path" in noted else {"data.args": ""})
        == []
    )
    with (
        pytest.raises(ConfigError, match=key)
        if key not in ("schedule.build", "train.callback")
        else contextlib.nullcontext()
    ):
        since(before, [f"--{key}=own/own.py:other"], files=noted)


@pytest.mark.parametrize("topics", [None, "other topics"])
def test_the_built_in_text_is_not_looked_at_where_samples_are_the_users_own(since, monkeypatch, topics):
    """Another Python has another text, or none."""
    words = ["--data.build=own.py:fn"]
    assert "data.path" not in given_by(words)

    def pydoc_text():
        if topics is None:
            raise ConfigError("the built-in text (no data.path)", why="this Python has none", fix="name a text file")
        return topics

    monkeypatch.setattr(resume_check, "pydoc_text", pydoc_text)
    assert since(words, words) == []


def test_keys_of_another_version_are_no_fault(monkeypatch, tmp_path):
    text = dump_config(load_config(None, []).config).replace("  momentum: 0.9\n", "  former: 3\n")
    assert "former" in text
    values = resume_check.flat(resume_check.EXTENSIONS[".yaml"](text, "config.yaml").values)
    saved = resume_check._Saved(folder=tmp_path, values=values, files={})
    monkeypatch.setattr(resume_check, "_newest", lambda root: saved)
    assert changes_since(tmp_path, load_config(None, []).config) == []


def test_a_key_of_the_data_is_refused_unless_it_is_known_to_change_no_sample():
    keys = [key for key in dotted_keys(RunConfig) if key.startswith("data.")]
    assert set(resume_check.MAY_CHANGE) < {*keys}
    for key in (*keys, "data.args.anything", "data.a_key_of_tomorrow"):
        assert (resume_check._refused(key) is None) == (key in resume_check.MAY_CHANGE), key


def test_how_samples_are_read_and_taken_may_change(since):
    now = ["--data.global_batch=8", "--data.micro_batch=2", "--data.num_workers=1", "--data.prefetch=3"]
    assert [told.split()[0] for told in since([], now)] == [word.removeprefix("--").partition("=")[0] for word in now]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"])
def test_files_beside_a_tokenizer_that_decide_the_tokens_of_records_are_compared(since, tmp_path, name):
    """Edited, added and removed; a text needs none of them, and nor does a template of its own."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    words = [f"--data.path={tmp_path}/chat.jsonl", f"--data.tokenizer={tmp_path}"]
    kinds = {
        "records": words,
        "template": [*words, f"--data.chat_template={tmp_path}/own.jinja"],
        "text": [f"--data.path={tmp_path}/text.txt", words[1]],
    }
    before = {kind: given_by(given) for kind, given in kinds.items()}
    assert since(words, words) == []
    file = tmp_path / name
    for content in ("{ }", None):
        file.write_text(content) if content else file.unlink(missing_ok=True)
        for kind, given in kinds.items():
            is_used = kind == "records" or (kind == "template" and name != "chat_template.jinja")
            if not is_used:
                assert since(given, given, files=before[kind]) == []
                continue
            with pytest.raises(ConfigError, match="the position in the data") as caught:
                since(given, given, files=before[kind])
            assert f"data.tokenizer/{name}" in caught.value.given
            assert f"resume with what it had: the file of data.tokenizer/{name} as it was;" in caught.value.fix
        if name == "special_tokens_map.json":
            break  # it was not there before
    older = {key: value for key, value in before["records"].items() if "/" not in key}
    assert since(words, words, files=older) == []


def given_by(words):
    return json.loads(resume_check.texts_of(load_config(None, words).config)[resume_check.FILES])
