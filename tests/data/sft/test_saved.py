"""Datasets of Hugging Face that were saved are the samples of the JSONL with the same records; what cannot be read is refused, its
rows and columns named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from data.test_token_cache import equal
from models import chat

import shardwise as sw
from shardwise.data.sft import saved
from shardwise.data.sft.records import Chat, Text, read_records
from shardwise.errors import ConfigError
from shardwise.run.data_config import Data
from shardwise.run.resume_check import file_sample

USER, ANSWER = {"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "I am fine"}
CALL = {"role": "assistant", "tool_calls": [{"name": "sum", "arguments": {"a": 2}}]}
OTHER = {"role": "assistant", "tool_calls": [{"name": "say", "arguments": {"text": "hi"}}]}
RESULT = {"role": "tool", "content": "5", "name": "sum"}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"a": {"type": "integer"}}}}
SAY = {"type": "function", "function": {"name": "say", "parameters": {"text": {"type": "string"}}}}
SHOWS_KEYS = (  # a null that was not in the record is seen in the tokens
    "{{ tools | tojson }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m | tojson) + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"Hello there {i}" * (1 + i % 3)} for i in range(20)],
    "completion": [{"prompt": f"{i} and {i}", "completion": f" is {2 * i}"} for i in range(20)],
    "messages": [{"messages": [USER, {**ANSWER, "content": f"I am {i}"}] * (1 + i % 2)} for i in range(20)],
    "prompt of messages": [{"prompt": [USER], "completion": [{**ANSWER, "content": f"I am {i}"}]} for i in range(9)],
    "tools": [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]},
        {"messages": [USER, OTHER, ANSWER, USER, {**ANSWER, "weight": 1}], "tools": [SAY, TOOL]},
    ],
    "mixed": [{"text": "Hello"}, {"prompt": "a", "completion": "b"}, {"messages": [USER, ANSWER]}, {"text": "you"}],
}


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """All keys are columns; a row has null where it lacks one."""
    names = dict.fromkeys(key for row in rows for key in row)
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def refused(path: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        sw.SFTDataset(path, chat.tokenizer(), seq_len=99, **options)
    return str(raised.value)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_are_those_of_the_jsonl(tmp_path, kind, pack):
    rows, tokenizer = KINDS[kind], chat.tokenizer(SHOWS_KEYS)
    dataset(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    dataset(rows).to_parquet(tmp_path / "x.parquet")
    one = sw.SFTDataset(lines(tmp_path / "x.jsonl", rows), tokenizer, seq_len=300, pack=pack)
    for path in (tmp_path / "saved", tmp_path / "x.parquet"):
        other = sw.SFTDataset(path, tokenizer, seq_len=300, pack=pack)
        assert equal(one, other) and str(one.report) == str(other.report)
        assert one.content_digest == other.content_digest


def test_nulls_of_the_type_json_are_those_of_the_record(tmp_path):
    """That type has no fields that all rows share, so that a null in it was written by somebody."""
    argument = {"name": "sum", "arguments": {"a": None}}
    rows = [{"messages": [USER, {**CALL, "content": None, "tool_calls": [argument]}, ANSWER]}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    datasets.Dataset.from_dict({"messages": [rows[0]["messages"]]}, features=features).save_to_disk(tmp_path / "saved")
    assert [*read_records(tmp_path / "saved")] == [Chat(0, rows[0]["messages"])]


def test_rows_keep_the_order_in_which_the_dataset_was_saved(tmp_path):
    rows = [{"text": f"text {i}"} for i in range(30)]
    changed = {
        "shuffled": dataset(rows).shuffle(seed=3),
        "selected": dataset(rows).select([7, 3, 3, 20]),
        "filtered": dataset(rows).filter(lambda row: row["text"].endswith("7")),
        "concatenated": datasets.concatenate_datasets([dataset(rows).select([5]), dataset(rows)]),
    }
    for name, made in changed.items():
        made.save_to_disk(tmp_path / name, num_shards=2)
        expected = [Text(i, text) for i, text in enumerate(datasets.load_from_disk(tmp_path / name)["text"])]
        assert [*read_records(tmp_path / name)] == expected and expected[0].text != "text 0"
    assert [record.line for record in read_records(tmp_path / "shuffled", most=5)] == [0, 1, 2, 3, 4]


def test_only_the_columns_that_the_dataset_shows_are_read(tmp_path):
    rows = [{"text": "Hello", "messages": [USER, ANSWER], "other": 3}]
    shown = dataset(rows).with_format("numpy", columns=["messages", "other"])
    shown.save_to_disk(tmp_path / "some")
    shown.with_format(None, columns=["text", "other"], output_all_columns=True).save_to_disk(tmp_path / "all")
    assert [*read_records(tmp_path / "some")] == [Chat(0, [USER, ANSWER])]
    assert "parts of several" in refused(tmp_path / "all")


# ---- splits ----------------------------------------------------------------------------------------------------------


def splits(folder: Path, *names: str) -> Path:
    found = {name: dataset([{"text": f"{name} {i}"} for i in range(9)]) for name in names}
    datasets.DatasetDict(found).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("name", saved.VALIDATION)
def test_of_several_splits_train_is_trained_on_and_validation_validated(tmp_path, name):
    path = splits(tmp_path / "x", "test", "train", name)
    found = Data(path=str(path))
    assert (found.path, found.val_path) == (f"{path}/train", f"{path}/{name}")
    assert Data(path=found.path, val_path=found.val_path) == found  # as a rank or a resumed run reads it
    own = Data(path=str(path), val_path=f"{path}/test")
    assert (own.path, own.val_path) == (f"{path}/train", f"{path}/test")
    with pytest.raises(ConfigError, match=f"which has the split {name}.*\n.*no effect.*\n.*data.path={path}/train"):
        Data(path=str(path), val_fraction=0.3)
    data = sw.SFTDataset(path, chat.tokenizer(), seq_len=99)
    assert data.name == f"{path}/train" and "train 0" in data.decode(data[0]["input_ids"].tolist())
    with pytest.raises(ConfigError, match=f"such as {path}/{name}"):
        saved.open_rows(path)


def test_test_is_never_validated_on(tmp_path):
    path = splits(tmp_path / "x", "train", "test")
    assert Data(path=str(path), val_fraction=0.3).val_path is None
    assert Data(path=str(path)).path == f"{path}/train"


def test_splits_of_other_names_are_named(tmp_path):
    path = splits(tmp_path / "x", "train_sft", "test_sft", "train_gen", "test_gen")
    for read in (lambda: Data(path=str(path)), lambda: sw.SFTDataset(path, chat.tokenizer(), seq_len=9)):
        with pytest.raises(ConfigError) as raised:
            read()
        assert "the splits train_sft, test_sft, train_gen, test_gen" in raised.value.given
        assert f"--data.path={path}/train_sft --data.val_path={path}/test_sft" in raised.value.fix
    assert len(sw.SFTDataset(path / "test_gen", chat.tokenizer(), seq_len=99)) == 9
    path = splits(tmp_path / "y", "test")
    with pytest.raises(ConfigError) as raised:
        Data(path=str(path))
    assert raised.value.fix.endswith(f"--data.path={path}/test")
    with pytest.raises(ConfigError, match=r"which has the splits validation, dev[^$]*name one"):
        Data(path=str(splits(tmp_path / "z", "train", "dev", "validation")))


# ---- the same content, by name ---------------------------------------------------------------------------------------


def test_kept_tokens_are_named_by_the_rows_and_their_order(tmp_path):
    rows, tokenizer, kept = KINDS["text"], chat.tokenizer(), tmp_path / "kept"

    def tokens(name: str, made: datasets.Dataset | None = None, **options: Any) -> tuple[int, str]:
        if made is not None:
            made.save_to_disk(tmp_path / name, **options)
        data = sw.SFTDataset(tmp_path / name, tokenizer, seq_len=99, cache=kept)
        assert equal(data, sw.SFTDataset(tmp_path / name, tokenizer, seq_len=99))
        return len([*kept.glob("tokens-*")]), file_sample(tmp_path / name)

    first = tokens("a", dataset(rows), num_shards=2)
    assert tokens("a") == first and first[0] == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert tokens("b") == first
    assert tokens("again", dataset(rows), num_shards=2) == first  # its fingerprint is another
    number, sample = tokens("shuffled", dataset(rows).shuffle(seed=1), num_shards=2)
    assert number == 2 and sample != first[1]
    state = json.loads((tmp_path / "b" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "b" / "state.json").write_text(json.dumps(state))
    number, sample = tokens("b")
    assert number == 3 and sample != first[1]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_row_that_is_no_record_is_named_from_0(tmp_path):
    rows = [{"text": "a"}] * 17 + [{"other": "b"}]
    dataset(rows).save_to_disk(tmp_path / "x", num_shards=2)
    assert f"row 17 of '{tmp_path / 'x'}': an object with the keys []" in refused(tmp_path / "x")
    dataset([{"text": "Hello you"}, {"text": " "}]).save_to_disk(tmp_path / "y")
    assert "row 1 of" in refused(tmp_path / "y") and "its text is empty" in refused(tmp_path / "y")
    assert len(sw.SFTDataset(tmp_path / "y", chat.tokenizer(), seq_len=9, unusable="drop")) == 1


def test_a_row_with_a_prompt_beside_its_messages_says_how_it_is_removed(tmp_path):
    dataset([{"prompt": "Hello", "prompt_id": "7", "messages": [USER, ANSWER]}]).save_to_disk(tmp_path / "x")
    told = refused(tmp_path / "x")
    assert "row 0 of" in told and "the keys ['messages', 'prompt']" in told
    assert f"datasets.load_from_disk('{tmp_path / 'x'}').remove_columns(['prompt']).save_to_disk(FOLDER)" in told


COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"input_ids": [1, 2], "labels": [1, 2]}, "it holds tokens already"),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}]}, "with the columns conversations"),
    "numbers": ({"text": 3}, "its column text is of type int64"),
    "bytes": ({"text": b"abc"}, "its column text is of type binary"),
    "a prompt": ({"prompt": "a", "chosen": "b"}, "a part of one kind of record"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "parts of other kinds"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_are_no_records_are_named(tmp_path, name):
    row, words = COLUMNS[name]
    dataset([row]).save_to_disk(tmp_path / "x")
    assert words in refused(tmp_path / "x") and str(tmp_path / "x") in refused(tmp_path / "x")


def test_pictures_beside_texts_are_not_passed_over(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"text": ["a"], "image": [None]}, features=features).save_to_disk(tmp_path / "x")
    assert "its columns image are pictures" in refused(tmp_path / "x")


def test_a_directory_of_another_kind_is_refused_by_what_it_has(tmp_path):
    dataset(KINDS["text"]).save_to_disk(tmp_path / "whole")
    folders: dict[str, tuple[dict[str, str], str, str]] = {
        "empty": ({}, "it is empty", "save_to_disk"),
        "other": ({"config.json": "{}"}, "it has config.json", "save_to_disk"),
        "lines": ({"a.jsonl": "{}"}, "one file", "a.jsonl"),
        "tables": ({"train-0.parquet": "", "train-1.parquet": ""}, "train-0.parquet, train-1.parquet", "load_dataset"),
        "cache": ({"dataset_info.json": "{}", "x-train.arrow": ""}, "the cache of datasets", "load_dataset"),
    }
    for name, (files, why, fix) in folders.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        with pytest.raises(ConfigError) as raised:
            saved.open_rows(tmp_path / name)
        assert why in raised.value.why and fix in raised.value.fix, name
    state = json.loads((tmp_path / "whole" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "lines" / "state.json").write_text(json.dumps(state))
    assert "flatten_indices" in refused(tmp_path / "lines")


def test_files_that_are_not_there_or_damaged(tmp_path):
    dataset(KINDS["text"]).save_to_disk(tmp_path / "x", num_shards=2)
    last = tmp_path / "x" / "data-00001-of-00002.arrow"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refused(tmp_path / "x")
    last.unlink()
    assert f"without {last.name}" in refused(tmp_path / "x")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    assert "cannot be read" in refused(tmp_path / "x.parquet")
    assert "there is no such file" in refused(tmp_path / "y.parquet")
    dataset([{"text": "a"}]).select([]).save_to_disk(tmp_path / "none")
    assert "it has no record" in refused(tmp_path / "none")


def test_a_name_of_the_hub_is_told_how_to_be_saved():
    told = refused("HuggingFaceH4/ultrachat_200k")
    assert "nothing is downloaded" in told
    assert "datasets.load_dataset('HuggingFaceH4/ultrachat_200k').save_to_disk('FOLDER')" in told
    assert "Hub" not in refused("my/chat.jsonl")


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch):
    dataset(KINDS["text"]).save_to_disk(tmp_path / "x")
    find = saved.importlib.util.find_spec
    monkeypatch.setattr(saved.importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    assert "pip install 'shardwise[hf]'" in refused(tmp_path / "x")


LARGE = """
import resource, sys
from shardwise.data.sft.records import read_records
next(read_records(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_DATA, (int(open("/proc/self/statm").read().split()[5]) * 4096 + (24 << 20),) * 2)
num = sum(1 for record in read_records(sys.argv[1]))
assert num == 3000 and "torch" not in sys.modules and "datasets" not in sys.modules, num
"""


def test_rows_are_mapped_into_memory_not_held(tmp_path):
    """Under a limit of what a process may allocate: 24 MB for 60 MB of rows."""
    dataset([{"text": "a"}]).save_to_disk(tmp_path / "few")
    dataset([{"text": f"{i} " + "Hello there " * 1700} for i in range(3000)]).save_to_disk(tmp_path / "x", num_shards=1)
    assert saved.open_rows(tmp_path / "x").size > 60e6
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "x"), str(tmp_path / "few")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
