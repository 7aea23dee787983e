"""A first look at records before any rank starts: what their tokenizer and chat template would refuse. Torch-free.

transformers, which renders and tokenizes on the ranks, takes seconds to import and torch with it. Here the libraries below it
are used, tokenizers and jinja2, on the first records, and only what is certain is refused: the ranks check all of them.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.tokenizer import add_special, read_json, template_in
from shardwise.data.sft.key_checks import ReadKeys
from shardwise.data.sft.records import Chat, Completion, Record, Text, where
from shardwise.data.sft.refusals import (
    beyond_vocabulary,
    empty_answer,
    no_template,
    template_raised,
    too_long,
    unusable,
)

_TRIED = 200  # records that are rendered and tokenized; empty answers are looked for in all of them
_MARGIN = 8  # tokens of a prompt that may join those of its answer, or be added to them
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def look_at(
    records: Iterable[Record],
    path: str,
    tokenizer: Path,
    *,
    seq_len: int,
    vocab: int | None,
    refuses: bool,
    added: Iterable[str] = (),
    template: str | None = None,
) -> None:
    """Raises ConfigError, with the line, for a record that the ranks would refuse.

    Args:
        records: of the file ``path``.
        path: for messages.
        tokenizer: a tokenizer.json; the chat template lies next to it.
        seq_len: positions of a sample.
        vocab: rows of the model's embedding; None: not known.
        refuses: records without an answer are an error, and not left out.
        added: special tokens that are added to the tokenizer.
        template: the chat template, in place of the tokenizer's.
    """
    tried = _Tried(path, tokenizer, seq_len, vocab, added, template) if _can_try() else None
    for number, record in enumerate(records):
        why = empty_answer(record)
        if not why and tried is not None and number < _TRIED:
            why = tried.problem(record)
        if why and refuses:
            raise unusable(path, record.line, why)


def _can_try() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("tokenizers", "jinja2"))


class _Tried:
    """Renders and tokenizes records with the files of a tokenizer."""

    def __init__(
        self, path: str, tokenizer: Path, seq_len: int, vocab: int | None, added: Iterable[str], template: str | None
    ):
        from tokenizers import Tokenizer

        self.path, self.seq_len, self.vocab = path, seq_len, vocab
        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        add_special(self._tokenizer, added)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = read_json(tokenizer.with_name("tokenizer_config.json"))
        self._template = _Template.read(tokenizer.parent, self._settings, template)
        self._read_keys = ReadKeys(self._whole)

    def problem(self, record: Record) -> str:
        """Why nothing of a record would be trained on; "" if that is not certain. Raises ConfigError for what is refused."""
        if isinstance(record, Chat):
            prompt, whole = self._of_chat(record)
        elif isinstance(record, Completion):
            prompt, whole = record.prompt, record.prompt + record.completion
        else:
            prompt, whole = "", record.text
        if not isinstance(record, Text) and len(self._ids(prompt)) > self.seq_len + _MARGIN:
            return too_long(self.seq_len)
        self._refuse_unknown(whole, record)
        return ""

    def _of_chat(self, chat: Chat) -> tuple[str, str]:
        """What is before the first answer, and the whole conversation; without a template of this kind two empty texts."""
        if self._template is None:
            raise no_template(self.path, chat.line)
        self._read_keys.unread(chat.extras, chat.messages, chat.tools, where(self.path, chat.line))
        messages, first = chat.messages, chat.num_given or chat.answers[0]
        try:
            whole = self._whole(messages, chat.tools)
            prompt = (
                self._template.render(messages[:first], tools=chat.tools, add_generation_prompt=True) if first else ""
            )
        except _Refused as error:
            raise template_raised(where(self.path, chat.line), messages, error.cause) from error
        except Exception:  # something of transformers that is not here: the ranks try it
            return "", ""
        return (prompt, whole) if whole.startswith(prompt) else ("", whole)

    def _whole(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        assert self._template is not None
        return self._template.render(messages, tools=tools, add_generation_prompt=False)

    def _refuse_unknown(self, text: str, record: Record) -> None:
        """Refuses a token, within the context, that the model has no embedding for."""
        ids = self._ids(text)[: max(0, self.seq_len - _MARGIN)]
        if self.vocab is None or not ids or (worst := max(ids)) < self.vocab:
            return
        raise beyond_vocabulary(
            self.path,
            record.line,
            token=worst,
            text=self._tokenizer.id_to_token(worst),
            vocab=self.vocab,
            num_known=self._tokenizer.get_vocab_size(),
        )

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class _Refused(Exception):  # noqa: N818 -- what it carries is the error
    """What a template raises by ``raise_exception``."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True)
class _Template:
    """A chat template, and the special tokens it may use."""

    source: Any
    tokens: dict[str, str]

    @classmethod
    def read(cls, folder: Path, settings: dict[str, Any], given: str | None = None) -> "_Template | None":
        """The template that is given, or else that of a directory; None: it has none."""
        text = given or template_in(folder)
        if not text:
            return None
        found = {name: settings.get(name) for name in _SPECIAL}
        tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in found.items() if token
        }
        return cls(_compiled(text) if isinstance(text, str) else None, tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        """The text of a conversation. Raises :class:`_Refused`, or whatever a template comes across."""
        return self.source.render(messages=messages, documents=None, **given, **self.tokens)


def _compiled(text: str) -> Any:
    """A template compiled as transformers does it; None if it has something that is only there."""
    import jinja2
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise _Refused(jinja2.exceptions.TemplateError(message))

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": refuse}
    environment.globals.update(functions)
    try:
        return environment.from_string(text)
    except jinja2.exceptions.TemplateError:  # {% generation %} is a tag of transformers
        return None
