"""Which tokens of a record are trained on, written down by hand; and what is cut off, left out or refused, by its line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import chat

import shardwise as sw
from shardwise.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "I am fine"}
MORE, BYE = {"role": "user", "content": "good bye"}, {"role": "assistant", "content": "bye"}
SYSTEM = {"role": "system", "content": "be good"}
TURNS = [USER, ANSWER, MORE, BYE]


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in records))
    return path


def trained(data: sw.SFTDataset, tokenizer: Any, i: int = 0) -> list[str]:
    """The texts of the runs of labels of a sample, each label checked to be the token that follows."""
    sample, runs, before = data[i], [], False
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    for at, label in enumerate(labels):
        if label != -100:
            assert at + 1 == len(ids) or label == ids[at + 1]
            runs += [] if before else [[]]
            runs[-1].append(label)
        before = label != -100
    return [tokenizer.decode(run) for run in runs]


CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat": ("CHATML", {"messages": TURNS}, ["I am fine<|im_end|>\n", "bye<|im_end|>\n"]),
    "system": ("CHATML", {"messages": [SYSTEM, *TURNS[:2]]}, ["I am fine<|im_end|>\n"]),
    "marked": ("MARKED", {"messages": TURNS}, ["I am fine<|im_end|>", "bye<|im_end|>"]),
    "bos in the template": ("WITH_BOS", {"messages": TURNS}, [" I am fine<|im_end|>", " bye<|im_end|>"]),
    "prompt of messages": ("CHATML", {"prompt": TURNS[:3], "completion": [BYE]}, ["bye<|im_end|>\n"]),
    "prompt, marked": ("MARKED", {"prompt": TURNS[:3], "completion": [BYE]}, ["bye<|im_end|>\n"]),
    "two answers": ("CHATML", {"messages": [USER, ANSWER, BYE]}, ["I am fine<|im_end|>\n", "bye<|im_end|>\n"]),
    "completion": ("CHATML", {"prompt": "Hello", "completion": " there"}, [" there<|im_end|>"]),
    "no prompt": ("CHATML", {"prompt": "", "completion": "Hello there"}, ["Hello there<|im_end|>"]),
    "ended already": ("CHATML", {"prompt": "Hello", "completion": " there<|im_end|>"}, [" there<|im_end|>"]),
    "text": ("CHATML", {"text": "Hello there"}, ["Hello there<|im_end|>"]),
    "bos in the text": ("CHATML", {"text": "<s>Hello there"}, ["Hello there<|im_end|>"]),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_trained_on_and_nothing_else(tmp_path, name):
    template, record, expected = CASES[name]
    tokenizer = chat.tokenizer(getattr(chat, template))
    data = sw.SFTDataset(written(tmp_path / "x.jsonl", record), tokenizer, seq_len=200)
    found = trained(data, tokenizer)
    assert found == expected
    ids = data[0]["input_ids"].tolist()
    is_text = "messages" not in record and isinstance(record.get("prompt", ""), str)
    assert ids.count(tokenizer.bos_token_id) == (is_text or template == "WITH_BOS")
    assert data.report.trained == sum(label != -100 for label in data[0]["labels"].tolist())


def test_the_whole_conversation_is_what_the_template_writes(tmp_path):
    tokenizer = chat.tokenizer()
    data = sw.SFTDataset(written(tmp_path / "x.jsonl", {"messages": TURNS}), tokenizer, seq_len=200)
    sample = data[0]
    last = int(sample["labels"][-1])
    assert [*sample["input_ids"].tolist(), last] == tokenizer.apply_chat_template(TURNS)["input_ids"]


def test_the_end_of_an_answer_counts_where_it_is_the_padding_too(tmp_path):
    tokenizer = chat.tokenizer(pad="<|im_end|>")
    path = written(tmp_path / "x.jsonl", {"prompt": "Hello", "completion": " there"}, {"messages": TURNS})
    data = sw.SFTDataset(path, tokenizer, seq_len=200)
    assert data.pad_id == tokenizer.eos_token_id
    batch = data.collate([data[0], data[1]])
    num = len(data[0]["labels"])
    assert batch["labels"][0, num - 1] == tokenizer.eos_token_id
    assert (batch["labels"][0, num:] == -100).all() and (batch["labels"] != -100).sum() == data.report.trained
    assert batch["attention_mask"].sum(1).tolist() == [num, len(data[1]["labels"])]


def test_what_is_beyond_the_context_is_cut_off_and_counted(tmp_path):
    tokenizer = chat.tokenizer()
    path = written(tmp_path / "x.jsonl", {"messages": TURNS}, {"text": "Hello"})
    whole, cut = (sw.SFTDataset(path, tokenizer, seq_len=num) for num in (200, 30))
    assert (whole.report.truncated, cut.report.truncated) == (0, 1)
    assert "1 truncated" in str(cut.report)
    for key in ("input_ids", "labels"):
        assert torch.equal(cut[0][key], whole[0][key][:30])


def test_an_answer_that_begins_inside_a_token_is_counted(tmp_path):
    tokenizer = chat.tokenizer()
    path = written(tmp_path / "x.jsonl", {"prompt": "Hello ", "completion": "there you are"})
    data = sw.SFTDataset(path, tokenizer, seq_len=200)
    assert trained(data, tokenizer) == [" you are<|im_end|>"]  # " there" is one token, and begins in the prompt
    assert data.report.inside == 1 and "1 answer begins inside a token" in str(data.report)


@pytest.mark.parametrize("trims", [False, True])
def test_blanks_at_the_end_of_a_prompt_belong_to_it(tmp_path, trims):
    """Also for a tokenizer whose places leave blanks out."""
    tokenizer = chat.tokenizer(trim_offsets=trims)
    path = written(
        tmp_path / "x.jsonl", {"prompt": "Q: ", "completion": "\u65e5x"}, {"prompt": "Q:", "completion": " are x "}
    )
    data = sw.SFTDataset(path, tokenizer, seq_len=200)
    assert trained(data, tokenizer) == ["\u65e5x<|im_end|>"]
    assert trained(data, tokenizer, 1) == [" are x <|im_end|>"]


UNUSABLE = {
    "all of an answer is inside a token that begins in its prompt": [{"prompt": "Hello ", "completion": "there"}],
    "an answer is empty": [
        {"messages": [USER, {"role": "assistant", "content": " "}]},
        {"prompt": "a", "completion": ""},
    ],
    "it has no answer": [{"messages": [USER]}],
    "its text is empty": [{"text": "\n"}],
    "its prompt is longer than seq_len = 12": [{"messages": [{"role": "user", "content": "Hello there " * 9}, BYE]}],
}


@pytest.mark.parametrize("why", UNUSABLE)
def test_a_record_without_an_answer_is_refused_by_its_line_or_left_out_and_counted(tmp_path, why):
    good = {"prompt": "Hello", "completion": " there"}
    path = written(tmp_path / "x.jsonl", good, "", *UNUSABLE[why], good)
    with pytest.raises(ConfigError, match=f"line 3 of '.*x.jsonl': {why}") as raised:
        sw.SFTDataset(path, chat.tokenizer(), seq_len=12)
    assert "data.unusable=drop" in raised.value.fix
    data = sw.SFTDataset(path, chat.tokenizer(), seq_len=12, unusable="drop")
    assert len(data) == 2 and data.report.dropped == {why: len(UNUSABLE[why])}
    assert f"{len(UNUSABLE[why])} dropped: {why}" in str(data.report)
    path = written(tmp_path / "x.jsonl", *UNUSABLE[why])
    with pytest.raises(ConfigError, match="none of its records can be used"):
        sw.SFTDataset(path, chat.tokenizer(), seq_len=12, unusable="drop")


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{'text': 'a'}", "it is no JSON"),
    "an array": ("[1]", "it is a JSON array"),
    "no field": ({"content": "a"}, "it does not say what is trained on"),
    "two kinds": ({"text": "a", "messages": TURNS}, "parts of several"),
    "half": ({"prompt": "a"}, "a part of one kind"),
    "mixed": ({"prompt": "a", "completion": [BYE]}, "both are texts, or both are lists"),
    "a number": ({"text": 3}, "text is a JSON number"),
    "no messages": ({"messages": []}, "messages is an empty list"),
    "ShareGPT": ({"messages": [{"from": "human", "value": "a"}]}, "human and gpt are user and assistant"),
    "ShareGPT's own key": (
        {"conversations": [{"from": "human", "value": "a"}]},
        "ShareGPT's conversations as messages",
    ),
    "Alpaca": ({"instruction": "a", "input": "", "output": "b"}, "as prompt, and its output as completion"),
    "half a character": ('{"text": "a\\ud83d bc"}', "remove \\ud83d, or replace it"),
    "deep": ("[" * 100_000, "it is no JSON"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of other kinds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_that_is_no_record_is_named(tmp_path, name):
    line, words = WRONG[name]
    path = written(tmp_path / "x.jsonl", {"text": "Hello there"}, line)
    with pytest.raises(ConfigError, match="line 2 of") as raised:
        sw.SFTDataset(path, chat.tokenizer(), seq_len=12)
    assert words in str(raised.value)


@pytest.mark.parametrize("form", ["[{}]", "\ufeff[\n  {}\n]\n", "{}"])
def test_records_of_a_json_are_those_of_its_lines(tmp_path, form):
    lines = [json.dumps(each) for each in ({"text": "Hello"}, {"messages": [USER, BYE]}, {"text": "Hello there"})]
    wanted = sw.SFTDataset(written(tmp_path / "x.jsonl", *lines), chat.tokenizer(), seq_len=64)
    path = tmp_path / "x.json"
    path.write_text(form.replace("{}", ("\n" if form == "{}" else ",\n").join(lines)))
    found = sw.SFTDataset(str(path), chat.tokenizer(), seq_len=64)
    assert len(found) == 3
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_list_in_lines_says_the_name_that_it_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)line 1 of .*name the file \.json"):
        sw.SFTDataset(written(tmp_path / "x.jsonl", '[{"text": "Hello"}]'), chat.tokenizer(), seq_len=12)
    (tmp_path / "x.json").write_text('[{"text": "Hello"}, {"text": 3}]')
    with pytest.raises(ConfigError, match=r"record 2 of .*text is a JSON number"):
        sw.SFTDataset(str(tmp_path / "x.json"), chat.tokenizer(), seq_len=12)


def test_a_file_in_another_encoding_says_how_it_is_saved_again(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"text": "caf\u00e9 Hello"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"(?s)it is not UTF-8: .*read_text\(encoding='latin-1'\)"):
        sw.SFTDataset(path, chat.tokenizer(), seq_len=12)


UNCLEAR = {
    "FORGETS": "otherwise once others follow",
    "THINKS": "what it writes to ask for message 2",
    "RAISES": "raised TemplateError",
    None: "without a chat template",
}


@pytest.mark.parametrize("template", UNCLEAR)
def test_a_template_that_does_not_show_the_answers_is_refused_with_the_line(tmp_path, template):
    thought = {"role": "assistant", "content": "I think|yes"}
    messages = [*([SYSTEM] if template == "RAISES" else []), USER, thought, MORE, BYE]
    tokenizer = chat.tokenizer(template and getattr(chat, template))
    with pytest.raises(ConfigError, match="line 1 of") as raised:
        sw.SFTDataset(written(tmp_path / "x.jsonl", {"messages": messages}), tokenizer, seq_len=99)
    assert UNCLEAR[template] in str(raised.value)


def test_a_conversation_that_begins_with_an_answer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="begins with an answer"):
        sw.SFTDataset(written(tmp_path / "x.jsonl", {"messages": [ANSWER, USER, BYE]}), chat.tokenizer(), seq_len=99)


def test_a_completion_needs_a_token_that_ends_it(tmp_path):
    with pytest.raises(ConfigError, match="without an EOS token"):
        sw.SFTDataset(
            written(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b"}), chat.tokenizer(eos=None), seq_len=99
        )


def test_a_vocabulary_that_is_too_small_is_told_with_the_line(tmp_path):
    tokenizer = chat.tokenizer()
    data = sw.SFTDataset(written(tmp_path / "x.jsonl", {"text": "a"}, {"messages": TURNS}), tokenizer, seq_len=99)
    largest = max(int(data[1]["input_ids"].max()), int(data[1]["labels"].max()))
    data.limit(largest + 1)
    with pytest.raises(ConfigError, match=rf"token {largest} .* in line 2 of") as raised:
        data.limit(largest)
    assert "resize_token_embeddings" in raised.value.fix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"seq_len": True}, "seq_len=True"),
        ({"seq_len": 9, "unusable": "no"}, "unusable"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        sw.SFTDataset(written(tmp_path / "x.jsonl", {"text": "a"}), chat.tokenizer(), **options)


def test_a_file_without_records_and_one_that_is_not_there(tmp_path):
    for path, words in ((written(tmp_path / "x.jsonl", ""), "no record"), (tmp_path / "y.jsonl", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            sw.SFTDataset(path, chat.tokenizer(), seq_len=9)


def test_messages_of_roles_that_nothing_trains_on_are_counted(tmp_path):
    """An answer of the role model or Assistant is context; in a completion any role is an answer."""
    model, other = {"role": "model", "content": "b"}, {"role": "Assistant", "content": "c"}
    path = written(tmp_path / "x.jsonl", {"messages": [USER, model, USER, other, USER, BYE]}, {"messages": [USER, BYE]})
    report = sw.SFTDataset(path, chat.tokenizer(), seq_len=200).report
    assert report.roles == {"model": 1, "Assistant": 1}
    assert "messages that are context, since an answer has the role assistant: model (1), Assistant (1)" in str(report)
    path = written(tmp_path / "y.jsonl", {"prompt": [USER], "completion": [BYE]})
    assert not sw.SFTDataset(path, chat.tokenizer(), seq_len=200).report.roles


def test_an_answer_of_one_token_without_a_prompt_is_refused_as_that(tmp_path):
    """For a tokenizer that writes no BOS, nothing stands before it."""
    from tokenizers.processors import ByteLevel

    tokenizer = chat.tokenizer()
    path = written(tmp_path / "x.jsonl", {"prompt": "", "completion": "b"})
    assert trained(sw.SFTDataset(path, tokenizer, seq_len=12), tokenizer) == ["b<|im_end|>"]
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    with pytest.raises(ConfigError, match="it has no prompt, and its answer is one token"):
        sw.SFTDataset(path, tokenizer, seq_len=12)
