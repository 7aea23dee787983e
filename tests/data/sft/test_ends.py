"""What ends an answer is trained on, whatever the marks of a template leave out; an answer without an end is warned of."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from data.sft.test_answers import ANSWER, BYE, MORE, TURNS, USER, trained, written
from models import chat

import shardwise as sw
from shardwise.data.token_cache import TokenCache
from shardwise.run.data_config import Data
from shardwise.run.datasets import open_data

MARK = "{% generation %}{{ m['content'] }}{% endgeneration %}"


def marked(
    end: str, *, user: str = "<|im_start|>user\n", assistant: str = "<|im_start|>assistant\n", before: str = ""
) -> str:
    """A template whose marks are around ``before`` and the words alone; ``end`` is Jinja."""
    words = MARK.replace("{{", "{{ '" + before + "' + ") if before else MARK
    return (
        f"{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{{{{ {assistant!r} }}}}{words}{end}"
        f"{{% else %}}{{{{ {user!r} + m['content'] + '<|im_end|>\\n' }}}}{{% endif %}}{{% endfor %}}"
    )


def plain(end: str) -> str:
    return (
        "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] }}" + end + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )


def read(path: Path, record: Any, template: str) -> tuple[list[str], list[str]]:
    """The texts that are trained on, and what was warned of."""
    tokenizer = chat.tokenizer(template)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        data = sw.SFTDataset(written(path / "x.jsonl", record, record), tokenizer, seq_len=300)
    assert [str(each.message) for each in seen] == data.report.notes  # once, not for each record
    assert all(each.filename == __file__ for each in seen)
    found = trained(data, tokenizer)
    assert trained(data, tokenizer, 1) == found  # also once the template is known
    return found, data.report.notes


FORGETS = marked("{{ '<|im_end|>\n' }}").replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}"
)
NEWLINE, OUT, NONE = "<|im_end|>\n", "leave out what ends an answer", "ends without a special token"
THOUGHT = {"role": "assistant", "content": "I think|I am fine"}
LEFT_OUT: dict[str, tuple[str, list[dict[str, Any]], list[str], list[str]]] = {
    "words alone": (marked(f"{{{{ {NEWLINE!r} }}}}"), TURNS, ["I am fine<|im_end|>", "bye<|im_end|>"], [OUT]),
    "a blank between": (marked("{{ ' </s>' }}"), TURNS, ["I am fine", "</s>", "bye", "</s>"], [OUT]),
    "two, one marked": (
        marked("{{ '</s>\n' }}").replace("{{ m['content'] }}", "{{ m['content'] + '<|im_end|>' }}"),
        TURNS,
        ["I am fine<|im_end|></s>", "bye<|im_end|></s>"],
        [OUT],
    ),
    "two, none marked": (
        marked("{{ '<|im_end|></s>' }}"),
        TURNS,
        ["I am fine<|im_end|></s>", "bye<|im_end|></s>"],
        [OUT],
    ),
    "the next begins with BOS": (marked("{{ '</s>' }}", user="<s>"), TURNS, ["I am fine</s>", "bye</s>"], [OUT]),
    "the last is no answer": (marked(f"{{{{ {NEWLINE!r} }}}}"), TURNS[:3], ["I am fine<|im_end|>"], [OUT]),
    "answers in a row": (
        marked(f"{{{{ {NEWLINE!r} }}}}"),
        [USER, ANSWER, BYE],
        ["I am fine<|im_end|>", "bye<|im_end|>"],
        [OUT],
    ),
    "earlier thoughts dropped": (FORGETS, [USER, THOUGHT, MORE, BYE], ["I am fine<|im_end|>", "bye<|im_end|>"], [OUT]),
    "an answer of several marks": (
        marked(f"{{{{ {NEWLINE!r} }}}}").replace(MARK, "{% generation %}{{ 'so' }}{% endgeneration %}{{ '|' }}" + MARK),
        TURNS,
        ["so", "I am fine<|im_end|>", "so", "bye<|im_end|>"],
        [OUT],
    ),
    "one only at the end of all": (
        marked("{% if loop.last %}{{ '</s>' }}{% endif %}"),
        TURNS,
        ["I am fine", "bye</s>"],
        [NONE, OUT],
    ),
    "none, then a message": (marked(""), TURNS, ["I am fine", "bye"], [NONE]),
    "none, in words": (marked("{{ ' END\n' }}"), TURNS, ["I am fine", "bye"], [NONE]),
    "what begins a sequence, in place of an end": (
        plain("{{ bos_token }}"),
        TURNS,
        ["I am fine<s>\n", "bye<s>\n"],
        [NONE],
    ),
    "padding, in place of an end": (marked("{{ '<pad>' }}"), TURNS, ["I am fine", "bye"], [NONE]),
    "none, unmarked": (plain(""), TURNS, ["I am fine\n", "bye\n"], [NONE]),
    "all of them marked": (chat.MARKED, TURNS, ["I am fine<|im_end|>", "bye<|im_end|>"], []),
    "all of them, unmarked": (plain("{{ eos_token }}"), TURNS, ["I am fine<|im_end|>\n", "bye<|im_end|>\n"], []),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_ends_an_answer_is_trained_on_and_what_is_missing_warned_of_once(tmp_path, name):
    template, messages, expected, told = LEFT_OUT[name]
    found, notes = read(tmp_path, {"messages": messages}, template)
    assert found == expected
    assert len(notes) == len(told) and all(words in note for words, note in zip(told, notes, strict=True))


def test_the_text_around_the_end_is_shown(tmp_path):
    _, (note,) = read(tmp_path, {"messages": TURNS}, marked(f"{{{{ {NEWLINE!r} }}}}"))
    assert "line 1 of" in note and r"'I am fine' is followed by '<|im_end|>\n<|im_start|>user" in note
    _, (note,) = read(tmp_path, {"messages": TURNS}, plain(""))
    assert r"'I am fine\n' is followed by 'user:\ngood bye" in note


def test_prompts_with_completions_are_told_alike(tmp_path):
    record = {"prompt": [USER, ANSWER, MORE], "completion": [BYE]}
    assert read(tmp_path, record, plain("{{ eos_token }}")) == (["bye<|im_end|>\n"], [])
    found, (note,) = read(tmp_path, record, plain(""))
    assert found == ["bye\n"] and NONE in note
    found, (note,) = read(tmp_path, {"prompt": [USER], "completion": [ANSWER, MORE, BYE]}, plain(""))
    assert found == ["I am fine\nuser:\ngood bye\nassistant:\nbye\n"] and NONE in note
    assert read(tmp_path, {"prompt": "Hello", "completion": " there"}, plain("")) == ([" there<|im_end|>"], [])


def test_what_the_warnings_say_to_write_ends_them(tmp_path):
    inside = marked("").replace("{% endgeneration %}", "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}")
    assert read(tmp_path, {"messages": TURNS}, inside) == (["I am fine<|im_end|>", "bye<|im_end|>"], [])
    assert not read(tmp_path, {"messages": TURNS}, plain("{{ eos_token }}"))[1]


def test_an_answer_that_is_context_has_no_end_to_be_learned(tmp_path):
    messages = [USER, {**ANSWER, "weight": 0}, MORE, BYE]
    found, (note,) = read(tmp_path, {"messages": messages}, marked(f"{{{{ {NEWLINE!r} }}}}"))
    assert found == ["bye<|im_end|>"] and "'bye' is followed by" in note


def test_kept_tokens_warn_as_well_and_a_run_says_it_once(tmp_path):
    template = marked(f"{{{{ {NEWLINE!r} }}}}")
    folder, path = (
        chat.saved(tmp_path / "model", template),
        written(tmp_path / "x.jsonl", {"messages": TURNS}, {"messages": TURNS}),
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match=OUT):
            sw.SFTDataset(path, chat.tokenizer(template), seq_len=99, cache=TokenCache(tmp_path / "kept"))
    config = Data(path=str(path), tokenizer=str(folder), seq_len=99, val_path=str(path), cache="none")
    report = open_data(config, vocab=None).report  # without a warning, which would be one for each rank and each part
    assert report.count(OUT) == 1 and report.count("\n") == 1


HEADER, MISTRAL = "before an answer, and nothing where one is asked for", "{{ '[INST]' + m['content'] + '[/INST]' }}"
UNASKED = {
    "with its role": (plain("{{ eos_token }}").partition("{% if add")[0], "assistant:\n", True),
    "with a mark of the turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}",
        "<|im_start|>",
        True,
    ),
    "nothing": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        + MISTRAL
        + "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
        " ",
        False,
    ),
    "asked for": (plain("{{ eos_token }}"), "", False),
}


@pytest.mark.parametrize("name", UNASKED)
def test_words_before_an_answer_that_the_template_does_not_ask_with_are_warned_of_once(tmp_path, name):
    template, header, is_told = UNASKED[name]
    found, notes = read(tmp_path, {"messages": TURNS}, template)
    assert found[0].startswith(f"{header}I am fine<|im_end|>")
    assert [HEADER in note and repr(header) in note and "line 1 of" in note for note in notes] == [True] * is_told
    _, same = read(tmp_path, {"prompt": TURNS[:3], "completion": TURNS[3:]}, template)
    assert len(same) == len(notes)
