"""Keys of records and messages: those that say what is trained on are honoured, others that change it refused, the rest counted."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from data.sft.test_answers import ANSWER, BYE, MORE, TURNS, USER, trained, written
from models import chat

import shardwise as sw
from shardwise.data.sft import keys
from shardwise.data.sft.key_checks import ReadKeys
from shardwise.data.sft.records import read_records
from shardwise.errors import ConfigError
from shardwise.run.data_config import Data
from shardwise.run.datasets import open_data

LOOSE = (  # marks a whole turn, the words that begin it too, so that answers that follow each other are one run of marked tokens
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
CALLS = chat.CHATML.replace(
    "(m['content'] or '')", "(m['content'] or '') + (m['tool_calls'] | tojson if m['tool_calls'] else '')"
)


def read(path: Path, record: Any, template: str = chat.CHATML, **options: Any) -> list[str]:
    """The texts that are trained on, without what ends them."""
    tokenizer = chat.tokenizer(template)
    data = sw.SFTDataset(written(path / "x.jsonl", record), tokenizer, seq_len=200, **options)
    return [text.strip().removesuffix("<|im_end|>").strip() for text in trained(data, tokenizer)]


def refused(path: Path, record: Any, template: str = chat.CHATML) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        read(path, record, template)
    assert "line 1 of" in raised.value.given and "x.jsonl" in raised.value.given
    return raised.value


# ---- whether a message is trained on ---------------------------------------------------------------------------------

NOT = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"masked": True}]
YES = [
    {"weight": 1},
    {"train": True},
    {"loss": True},
    {"masked": False},
    {"weight": None},
    {"weight": 1, "train": True},
]


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
@pytest.mark.parametrize("says", [*NOT, *YES], ids=str)
def test_an_answer_is_context_where_its_key_says_so(tmp_path, template, says):
    record = {"messages": [USER, {**ANSWER, **says}, MORE, BYE]}
    assert read(tmp_path, record, getattr(chat, template)) == (["bye"] if says in NOT else ["I am fine", "bye"])


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_the_tokens_are_those_of_the_record_without_the_key(tmp_path, template):
    """Also where the template writes messages with all their keys."""
    for source in (getattr(chat, template), chat.CHATML.replace("(m['content'] or '')", "(m | tojson)")):
        tokenizer = chat.tokenizer(source)
        path = written(
            tmp_path / "x.jsonl", {"messages": TURNS}, {"messages": [USER, {**ANSWER, "weight": 0}, MORE, BYE]}
        )
        plain, weighed = sw.SFTDataset(path, tokenizer, seq_len=300)
        assert plain["input_ids"].tolist() == weighed["input_ids"].tolist()
        assert 0 < (weighed["labels"] != -100).sum() < (plain["labels"] != -100).sum()


OTHER_PLACES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the last": ({"messages": [USER, ANSWER, MORE, {**BYE, "weight": 0}]}, ["I am fine"]),
    "between others": ({"messages": [USER, BYE, MORE, {**ANSWER, "weight": 0}, MORE, BYE]}, ["bye", "bye"]),
    "after another": ({"messages": [USER, ANSWER, {**BYE, "weight": 0}]}, ["I am fine"]),
    "before another": ({"messages": [USER, {**ANSWER, "weight": 0}, BYE]}, ["bye"]),
    "an empty one": ({"messages": [USER, {**ANSWER, "content": "", "weight": 0}, MORE, BYE]}, ["bye"]),
    "of a prompt": ({"prompt": [USER, {**ANSWER, "weight": 0}, MORE], "completion": [BYE]}, ["bye"]),
    "the first of a completion": (
        {"prompt": [USER], "completion": [{**ANSWER, "weight": 0}, BYE]},
        ["<|im_start|>assistant\nbye"],
    ),
    "the last of a completion": ({"prompt": [USER], "completion": [ANSWER, {**BYE, "weight": 0}]}, ["I am fine"]),
    "not an answer": ({"messages": [{**USER, "weight": 0, "train": False, "masked": True}, ANSWER]}, ["I am fine"]),
}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_an_answer_that_is_context_may_stand_anywhere(tmp_path, name):
    record, expected = OTHER_PLACES[name]
    assert read(tmp_path, record) == expected
    if "messages" in record:
        assert read(tmp_path, record, chat.MARKED) == expected


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_a_record_of_which_no_answer_is_trained_on_is_one_without_an_answer(tmp_path, template):
    records = [{"messages": [USER, {**ANSWER, "weight": 0}]}, {"messages": TURNS}]
    path, tokenizer = written(tmp_path / "x.jsonl", *records), chat.tokenizer(getattr(chat, template))
    with pytest.raises(ConfigError, match=r"line 1 of .*x.jsonl': none of its answers is trained on"):
        sw.SFTDataset(path, tokenizer, seq_len=99)
    data = sw.SFTDataset(path, tokenizer, seq_len=99, unusable="drop")
    assert len(data) == 1 and data.report.dropped == {"none of its answers is trained on": 1}


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a half": ({**ANSWER, "weight": 0.5}, "message 2: weight is 0.5"),
    "two": ({**ANSWER, "weight": 2}, "message 2: weight is 2"),
    "a text": ({**ANSWER, "weight": "0"}, "message 2: weight is '0'"),
    "a weight that is true": ({**ANSWER, "weight": True}, "message 2: weight is True"),
    "a number for train": ({**ANSWER, "train": 0}, "message 2: train is 0"),
    "a list": ({**ANSWER, "loss": []}, "message 2: loss is []"),
    "both": ({**ANSWER, "weight": 0, "masked": False}, "message 2: the keys masked and weight"),
    "a question": ({**MORE, "weight": 1}, "message 2: weight is 1, and it is no answer"),
    "a question that is not masked": ({**MORE, "masked": False}, "message 2: masked is False, and it is no answer"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_value_that_says_nothing_is_refused_by_line_message_and_key(tmp_path, name):
    message, words = WRONG_VALUES[name]
    assert words in refused(tmp_path, {"messages": [USER, message, BYE]}).given


def test_an_answer_of_a_prompt_is_not_trained_on_whatever_it_says(tmp_path):
    record = {"prompt": [USER, {**ANSWER, "weight": 1}, MORE], "completion": [BYE]}
    assert "message 2: weight is 1, and it is no answer" in refused(tmp_path, record).given


def test_marks_that_do_not_tell_answers_apart_are_refused_beside_a_weight(tmp_path):
    messages = [USER, {**ANSWER, "weight": 0}, BYE]
    assert "its marks do not show" in refused(tmp_path, {"messages": messages}, LOOSE).why
    assert read(tmp_path, {"messages": [USER, ANSWER, BYE]}, LOOSE) == ["I am fine<|im_end|>bye"]
    assert read(tmp_path, {"messages": [USER, {**ANSWER, "weight": 0}, MORE, BYE]}, LOOSE) == ["bye"]


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_weights_of_a_saved_dataset_are_those_of_the_lines(tmp_path, kind):
    """Arrow gives all messages the key, with null where one has none, and may write it as a fraction."""
    messages = [USER, {**ANSWER, "weight": 0}, MORE, {**BYE, "weight": 1}]
    made = datasets.Dataset.from_list([{"messages": messages, "id": 1}])
    path = tmp_path / ("x.parquet" if kind == "parquet" else "x")
    made.to_parquet(path) if kind == "parquet" else made.save_to_disk(path)
    tokenizer = chat.tokenizer()
    data = sw.SFTDataset(path, tokenizer, seq_len=99)
    assert trained(data, tokenizer) == ["bye<|im_end|>\n"]
    lines = sw.SFTDataset(written(tmp_path / "x.jsonl", {"messages": messages, "id": 1}), tokenizer, seq_len=99)
    assert str(data.report) == str(lines.report) and data.report.unread == {"id": 1}


# ---- refused ---------------------------------------------------------------------------------------------------------

RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "Hello"},
    "prompt": {"prompt": "Hello", "completion": " there"},
    "messages": {"messages": TURNS},
}
REFUSED = [(key, name) for key in keys.KEYS if key.why for name in key.names]


def value_of(key: keys.Key) -> Any:
    return (not key.allowed) if isinstance(key.allowed, bool) else 0.5 if key.allowed else ["something"]


@pytest.mark.quick(
    "record-parallel_tool_calls",
    "record-chosen",
    "record-preferred_output",
    "record-label",
    "record-system",
    "record-input",
    "record-response",
    "record-segments",
    "record-videos",
    "record-audio",
    "record-completion_mask",
    "message-train_detail",
    "message-ipython",
    "message-image",
    "message-audios",
    "message-value",
)
@pytest.mark.parametrize(("key", "name"), REFUSED, ids=lambda value: value if isinstance(value, str) else value.place)
def test_a_key_that_changes_what_is_learned_is_refused_by_line_and_key(tmp_path, key, name):
    kinds = [{**RECORDS[kind]} for kind in key.beside] if key.place == "record" else [{"messages": [USER, {**ANSWER}]}]
    for record in kinds:
        place = record if key.place == "record" else record["messages"][1]
        place[name] = value_of(key)
        raised = refused(tmp_path, record)
        assert f"the key {name!r}" in raised.given and raised.why and raised.fix
        assert ("message 2" in raised.given) == (key.place == "message")
        for nothing in (None, [], "", key.allowed):  # as it says nothing, nothing changes
            place[name] = nothing
            assert read(tmp_path, record)
        del place[name]  # what each fix ends with
        assert read(tmp_path, record)


def test_a_key_that_says_something_else_beside_other_records_is_counted(tmp_path):
    for record in (
        {"text": "Hello", "label": 1},
        {"text": "Hello", "instruction": "a"},
        {"messages": TURNS, "input": "b"},
    ):
        data = sw.SFTDataset(written(tmp_path / "x.jsonl", record), chat.tokenizer(), seq_len=99)
        assert data.report.unread == {[*record][-1]: 1}


FIXES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "system": (
        {"messages": [USER, ANSWER], "system": "be good"},
        {"messages": [{"role": "system", "content": "be good"}, USER, ANSWER]},
        ["I am fine"],
    ),
    "chosen": ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "completion": " b"}, ["b"]),
    "train_detail": (
        {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I am", "weight": 0},
                {"role": "assistant", "content": "fine"},
            ]
        },
        ["fine"],
    ),
    "segments": (
        {"segments": [{"label": False, "text": "a"}, {"label": True, "text": "b"}]},
        {"prompt": "a", "completion": " b"},
        ["b"],
    ),
    "refusal": (
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "I am not"}]},
        {"messages": [USER, {"role": "assistant", "content": "I am not"}]},
        ["I am not"],
    ),
    "history": (
        {"prompt": "good bye", "completion": "bye", "history": [["Hello there", "I am fine"]]},
        {"messages": TURNS},
        ["I am fine", "bye"],
    ),
}


@pytest.mark.parametrize("name", FIXES)
def test_what_a_refusal_says_to_write_is_read(tmp_path, name):
    given, mended, expected = FIXES[name]
    raised = refused(tmp_path, given)
    assert name in raised.given and raised.fix
    assert read(tmp_path, mended) == expected


def test_a_column_of_a_saved_dataset_is_refused_by_row_and_key(tmp_path):
    rows = [{"prompt": "Hello", "completion": " there", "label": None}] * 2
    datasets.Dataset.from_list([*rows, {**rows[0], "label": False}]).save_to_disk(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"row 2 of .*: the key 'label'"):
        sw.SFTDataset(tmp_path / "x", chat.tokenizer(), seq_len=99)
    datasets.load_from_disk(tmp_path / "x").remove_columns(["label"]).save_to_disk(tmp_path / "y")
    assert len(sw.SFTDataset(tmp_path / "y", chat.tokenizer(), seq_len=99)) == 3


# ---- what the chat template has to read ------------------------------------------------------------------------------

CALL = {"role": "assistant", "content": "I am", "tool_calls": [{"name": "sum"}]}
BY_TEMPLATE = {
    "tool_calls": {"messages": [USER, CALL, BYE]},
    "function_call": {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "sum"}}]},
    "reasoning_content": {"messages": [USER, {**ANSWER, "reasoning_content": "so"}]},
    "thinking": {"messages": [USER, {**ANSWER, "thinking": "so"}]},
    "tools": {"messages": TURNS, "tools": [{"name": "sum"}]},
}


@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_what_the_template_would_leave_out_of_an_answer_is_refused(tmp_path, name):
    assert f"the key {name!r}" in refused(tmp_path, BY_TEMPLATE[name]).given
    reads = f"{{% if {name} %}}{{{{ {name} }}}}{{% endif %}}" if name == "tools" else ""
    shows = reads + chat.CHATML.replace(
        "(m['content'] or '')", f"(m['content'] or '') + (m['{name}'] | string if m['{name}'] else '')"
    )
    assert read(tmp_path, BY_TEMPLATE[name], shows if name != "tools" else reads + chat.CHATML)
    assert name == "tools" or read(
        tmp_path, BY_TEMPLATE[name], chat.CHATML.replace("(m['content'] or '')", "(m | tojson)")
    )


SO = "(m['content'] or '')"
LOST = {
    "in a comment": "{# reasoning_content is dropped #}" + chat.CHATML,
    "in the words of a prompt": "Your reasoning_content is hidden." + chat.CHATML,
    "asked for alone": chat.CHATML.replace(SO, f"({SO} if m.reasoning_content is defined else {SO})"),
    "in a value that is not used": chat.CHATML.replace(SO, f"([m.reasoning_content, {SO}] | last)"),
    "of another role": chat.CHATML.replace(SO, f"({SO} ~ (m.reasoning_content if m.role == 'nobody' else ''))"),
}
KEPT = {
    "put together": chat.CHATML.replace(SO, f"({SO} ~ m['reasoning_' ~ 'content'])"),
    "with all others": chat.CHATML.replace(SO, "(m.values() | join)"),
    "as JSON": chat.CHATML.replace(SO, "(m | tojson)"),
    "in the list of them": chat.CHATML.replace(SO, f"({SO} ~ (messages if m.role == 'assistant' else ''))"),
    "by an attribute": chat.CHATML.replace(SO, f"({SO} ~ (m.get('reasoning_content') or ''))"),
}
THOUGHT = {"messages": [USER, {**ANSWER, "reasoning_content": "so"}]}


@pytest.mark.parametrize("how", [*LOST, *KEPT])
def test_a_key_is_read_where_the_text_is_another_without_it(tmp_path, how):
    if how in LOST:
        assert "the key 'reasoning_content'" in refused(tmp_path, THOUGHT, LOST[how]).given
        with pytest.raises(ConfigError, match=r"line 1 of .*the key 'reasoning_content'"):
            looked_at(tmp_path, LOST[how])
    else:
        assert "so" in read(tmp_path, THOUGHT, KEPT[how])[0]
        looked_at(tmp_path, KEPT[how])


def looked_at(path: Path, template: str) -> None:
    from shardwise.data.sft.first_look import look_at
    from shardwise.data.sft.records import read_records

    data, tokenizer = str(path / "x.jsonl"), chat.saved(path / "model") / "tokenizer.json"
    look_at(read_records(data), data, tokenizer, seq_len=200, vocab=None, refuses=True, template=template)


def test_tools_that_a_template_only_asks_for_are_refused(tmp_path):
    record = {"messages": TURNS, "tools": [{"name": "sum"}]}
    asked = "{% if tools is not defined %}{{ tools }}{% endif %}" + chat.CHATML
    assert "the key 'tools'" in refused(tmp_path, record, asked).given


@pytest.mark.parametrize("other", ["so", "else"])
def test_one_of_two_keys_with_one_value_may_be_read(tmp_path, other):
    either = chat.CHATML.replace(SO, f"({SO} ~ (m.reasoning_content or m.reasoning or ''))")
    record = {"messages": [USER, {**ANSWER, "reasoning_content": "so", "reasoning": other}]}
    if other == "so":
        assert read(tmp_path, record, either) == ["I am fineso"]
    else:
        assert "the key 'reasoning'" in refused(tmp_path, record, either).given


def test_keys_are_tried_once_for_each_set_of_them(tmp_path):
    seen = []

    def render(messages, tools):
        seen.append(1)
        return "".join(m["content"] for m in messages)

    keys_read = ReadKeys(render)
    for _ in range(9):
        assert keys_read.unread(("name",), [{"content": "a", "name": "b"}], None, "line 1") == ["name"]
    assert len(seen) == 2


JSON = [None, True, False, 0, 1, -2.5, 10**30, "", "x", [], [1], [[]], {}, {"a": [1]}, float("nan"), "null"]


@pytest.mark.parametrize("place", ["record", "message"])
def test_a_value_of_any_type_is_read_or_refused_by_the_line(tmp_path, place):
    names = [*keys.KEYS_OF[place], "messages", "prompt", "completion", "other"]
    for name in names:
        for value in JSON:
            message = {**ANSWER, **({name: value} if place == "message" else {})}
            record = {"messages": [USER, message], **({name: value} if place == "record" else {})}
            path = written(tmp_path / "x.jsonl", record)
            try:
                list(read_records(path))
            except ConfigError as error:
                assert "line 1 of" in error.given, (name, value)
                assert place == "record" or "message 2" in error.given or name == "role", (name, value)


def test_it_is_refused_before_a_rank_starts(tmp_path):
    from shardwise.data.sft.first_look import look_at

    folder = chat.saved(tmp_path / "model")
    path = str(written(tmp_path / "x.jsonl", {"messages": TURNS}, BY_TEMPLATE["tool_calls"]))
    given = {"seq_len": 99, "vocab": None, "refuses": True}
    with pytest.raises(ConfigError, match=r"line 2 of .*the key 'tool_calls'"):
        look_at(read_records(path), path, folder / "tokenizer.json", **given)
    look_at(read_records(path), path, folder / "tokenizer.json", **given, template=CALLS)
    written(
        tmp_path / "x.jsonl",
        {"messages": [{"role": "user", "content": "Hello there " * 9}, {**ANSWER, "weight": 0}, MORE, BYE]},
    )
    with pytest.raises(ConfigError, match="its prompt is longer"):  # that of the first answer that is trained on
        look_at(read_records(path), path, folder / "tokenizer.json", **{**given, "seq_len": 12})


# ---- counted ---------------------------------------------------------------------------------------------------------


def test_keys_that_nothing_reads_are_counted_and_told_once(tmp_path):
    message = {**USER, "name": "Ann", "channel": "web"}
    rows = [{"messages": [message, ANSWER], "id": i, "source": "x"} for i in range(3)]
    rows.append({"messages": TURNS, "id": 3})
    data = sw.SFTDataset(written(tmp_path / "x.jsonl", *rows), chat.tokenizer(), seq_len=99)
    assert data.report.unread == {"id": 4, "source": 3, "name of messages": 3, "channel of messages": 3}
    assert str(data.report).endswith(
        "keys that are not read: id (4), source (3), name of messages (3), channel of messages (3)"
    )
    names = chat.CHATML.replace("m['role'] +", "m['role'] + (m.name or '') +")
    assert (
        "name of messages" not in sw.SFTDataset(tmp_path / "x.jsonl", chat.tokenizer(names), seq_len=99).report.unread
    )
    many = {f"k{i}": i for i in range(20)}
    data = sw.SFTDataset(
        written(tmp_path / "x.jsonl", {"text": "Hello", "tools": [1], **many}), chat.tokenizer(), seq_len=99
    )
    assert str(data.report).endswith("k7 (1) and 13 more") and data.report.unread["tools"] == 1


def test_they_are_known_of_kept_tokens_too_and_of_a_run(tmp_path):
    folder = chat.saved(tmp_path / "model")
    path = written(tmp_path / "x.jsonl", {"messages": TURNS, "id": 1}, {"messages": TURNS, "id": 2})
    for _ in range(2):
        data = sw.SFTDataset(path, chat.tokenizer(), seq_len=99, cache=tmp_path / "kept")
        assert data.report.unread == {"id": 2}
    config = Data(path=str(path), tokenizer=str(folder), seq_len=99, val_fraction=0.5, cache=str(tmp_path / "kept"))
    assert "keys that are not read: id (2)" in open_data(config, vocab=None).report


# ---- the docs --------------------------------------------------------------------------------------------------------


def test_the_table_of_the_docs_is_that_of_the_code():
    page = (Path(__file__).parents[3] / "docs" / "finetuning.md").read_text()
    assert keys.table() in page
    names = [(key.place, name) for key in keys.KEYS for name in key.names]
    assert len(names) == len({*names})
    assert json.dumps(keys.RECORD_KEYS)  # plain names
