"""Tokens of a record, and which of them are trained on: those of its answers, by the chat template of the tokenizer.

A template may mark the answers itself (``{% generation %}``), as those of TRL do. One without such marks is rendered up to each
answer, with the words that ask for it (``add_generation_prompt``), and up to the answer's end: what is between the two is the
answer. That is right only if each of these texts begins the next one, which is checked for every record; templates that drop
earlier reasoning, for example, are refused.

Special tokens come from the template alone, so that the beginning of a sequence (BOS) is there once. Completions and texts end with
the tokenizer's EOS, so that a model learns to stop; so do the special tokens behind a marked answer (:mod:`shardwise.data.sft.ends`).
"""

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.data.sft.ends import Ends, ending_note, header_note, runs_of
from shardwise.data.sft.key_checks import ReadKeys
from shardwise.data.sft.records import Chat, Completion, Record, Text, where
from shardwise.data.sft.refusals import no_template, template_raised
from shardwise.errors import ConfigError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Encoded = tuple[list[int], list[bool]]
"""Token ids [n], and whether each is trained on [n]."""


def load_tokenizer(path: Path, given: str | None = None) -> Any:
    """The tokenizer of transformers in a directory, or that of a ``tokenizer.json``, with the chat template next to it.

    Args:
        path: the directory, or the file.
        given: what named it, for messages; None: ``data.tokenizer``.

    Raises:
        ConfigError: transformers is missing, or cannot read it.
    """
    given = given or f"data.tokenizer={str(path)!r}"
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            given, why=f"chat templates need transformers: {error}", fix="pip install 'shardwise[hf]'"
        ) from error
    try:
        if path.is_dir() or path.name == "tokenizer.json":
            folder = path if path.is_dir() else path.parent
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # transformers and tokenizers raise whatever they come across
        raise ConfigError(
            given,
            why=f"transformers cannot read it: {type(error).__name__}: {error}",
            fix="give a directory that save_pretrained of a tokenizer has written",
        ) from error


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], place: str, *, more: str = "", **options: Any
) -> Any:
    """What the chat template of a tokenizer writes for a conversation; ``options`` of ``apply_chat_template``.

    Raises:
        ConfigError: the template refuses it; ``place`` and ``more`` are for the message.
    """
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is code of its own
        raise template_raised(place, messages, error, more) from error


class Encoder:
    """Turns records into tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        path: the file of the records, for messages.

    Attributes:
        num_inside: answers that began inside a token, which then is not trained on.
        unread: keys of the last record's messages that the chat template does not read.
        notes: what is to be told of the ends of answers, by its kind.
    """

    def __init__(self, tokenizer: Any, path: str | Path):
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"a {type(tokenizer).__name__}",
                why="which tokens belong to an answer is found from their places in the text, which only a fast tokenizer gives",
                fix="give a directory with a tokenizer.json, or AutoTokenizer.from_pretrained(..., use_fast=True)",
            )
        self.tokenizer, self.path = tokenizer, path
        self._template: str | None = getattr(tokenizer, "chat_template", None)
        self.begin()

    @functools.cached_property
    def ends(self) -> Ends:
        """What ends an answer of a conversation."""
        return Ends.of(self.tokenizer)

    def begin(self) -> None:
        """Forgets what was noted of other records."""
        self.num_inside, self.unread = 0, list[str]()
        self._read_keys = ReadKeys(
            lambda messages, tools: self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        )
        self.notes: dict[str, str] = {}
        self._after: set[str] = set()  # roles of messages after which it is known how an answer is asked for

    def encode(self, record: Record) -> Encoded:
        """The tokens of a record.

        Raises:
            ConfigError: it needs a chat template and there is none, the template raises an error, or it does not show which
                tokens are answers. The line is named.
        """
        if isinstance(record, Text):
            ids = self.tokenizer(record.text, add_special_tokens=True)["input_ids"]
            return self._ended([*ids], [True] * len(ids), record.line, is_needed=False)
        if isinstance(record, Completion):
            text = record.prompt + record.completion
            return self._ended(*self._of_spans(text, [(len(record.prompt), len(text))], special=True), record.line)
        return self._of_chat(record)

    # ---- texts -----------------------------------------------------------------------------------------------

    def _of_spans(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Encoded:
        """Tokens of a text, of which those that begin within one of ``spans`` (characters) are trained on."""
        encoding = self.tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        ids, trained = [*encoding["input_ids"]], []
        is_added = encoding["special_tokens_mask"] if special else [0] * len(ids)
        for (start, end), added in zip(encoding["offset_mapping"], is_added, strict=True):
            if start == end:  # blanks that the tokenizer trims end here; special tokens that it adds have no place
                inside = not added and any(first < start <= last for first, last in spans)
            else:
                inside = any(first <= start < last for first, last in spans)
            trained.append(inside)
            self.num_inside += any(start < first < end for first, _ in spans)
        return ids, trained

    def _ended(self, ids: list[int], trained: list[bool], line: int, *, is_needed: bool = True) -> Encoded:
        """With the end of the sequence, which is trained on, and one beginning of it."""
        first, last = getattr(self.tokenizer, "bos_token_id", None), getattr(self.tokenizer, "eos_token_id", None)
        if first is not None and ids[:2] == [first, first]:  # the text has it too
            ids, trained = ids[1:], trained[1:]
        if last is None:
            if not is_needed:
                return ids, trained
            raise ConfigError(
                f"{where(self.path, line)}: a completion, for a tokenizer without an EOS token",
                why="the model would never learn where an answer ends",
                fix='set it and save the tokenizer: tokenizer.eos_token = "..."; or give texts, with the end written out',
            )
        if ids and ids[-1] == last:
            return ids, [*trained[:-1], True]
        return [*ids, last], [*trained, True]

    # ---- conversations ---------------------------------------------------------------------------------------

    def _of_chat(self, chat: Chat) -> Encoded:
        if not self._template:
            raise no_template(self.path, chat.line)
        if chat.extras:
            self.unread = self._read_keys.unread(chat.extras, chat.messages, chat.tools, where(self.path, chat.line))
        if not chat.num_given and isinstance(self._template, str) and _MARKED.search(self._template):
            return self._of_marks(chat)
        whole = self._render(chat, chat.messages, tokenize=False)
        if chat.num_given:
            spans = [self._span(chat, whole, chat.num_given, len(chat.messages))]
            for cut in (self._span(chat, whole, i, i + 1, asked=False) for i in sorted(chat.untrained)):
                spans[-1:] = [(spans[-1][0], cut[0]), (cut[1], spans[-1][1])]
        else:
            spans = [self._span(chat, whole, i, i + 1) for i in chat.answers]
        for first, end in (span for span in spans if whole[slice(*span)].strip()):
            if not whole[first:end].rstrip().endswith(self.ends.texts):
                self._note(chat, "none", whole[first:end], whole[end:])
        return self._of_spans(whole, spans, special=False)

    def _of_marks(self, chat: Chat) -> Encoded:
        """Tokens of a conversation by a template that marks its answers, of which those marked are trained on, and what ends them."""
        ids, marks = self._marked(chat, chat.messages)
        if not chat.untrained and all(self.ends.has_all(ids, end) for _, end in runs_of(marks)):
            return ids, marks
        runs, trained, done = runs_of(marks), [*marks], 0
        for i in (i for i, message in enumerate(chat.messages) if message["role"] == "assistant"):
            upto, marked = (ids, marks) if i + 1 == len(chat.messages) else self._marked(chat, chat.messages[: i + 1])
            found = runs_of(marked)
            own, done = runs[done : len(found)], max(done, len(found))
            if chat.untrained and not own:
                raise self._unclear(chat, f"its marks do not show which of the tokens are those of message {i + 1}")
            if i in chat.untrained:
                for first, end in own:
                    trained[first:end] = [False] * (end - first)
            elif own:
                self._end(chat, ids, trained, own[-1], upto[found[-1][1] :])
        return ids, trained

    def _end(self, chat: Chat, ids: list[int], trained: list[bool], answer: tuple[int, int], rest: list[int]) -> None:
        """Trains on the special tokens behind an answer, up to the next message.

        Args:
            answer: its tokens, of ``ids``.
            rest: the tokens behind it where the conversation ends with it.
        """
        first, end = answer
        same = next((n for n, (a, b) in enumerate(zip(ids[end:], rest, strict=False)) if a != b), None)
        stop = end + (min(len(ids) - end, len(rest)) if same is None else same)
        behind = [at for at in range(end, stop) if ids[at] in self.ends.ids]
        if stop < len(ids):
            self.ends.begins.add(ids[stop])
        for at in behind:
            trained[at] = True
        if behind or not self.ends.is_last(ids[first:end]):
            words = [self.tokenizer.decode(part) for part in (ids[first:end], ids[end:])]
            self._note(chat, "left out" if behind else "none", *words)

    def _marked(self, chat: Chat, messages: list[dict[str, Any]]) -> Encoded:
        encoding = self._render(chat, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return [*encoding["input_ids"]], [bool(flag) for flag in encoding["assistant_masks"]]

    def _note(self, chat: Chat, kind: str, answer: str, rest: str) -> None:
        """Keeps the first answer whose end is missing, or left out of the marks, with the text around it."""
        if kind not in self.notes:
            self.notes[kind] = ending_note(kind, where(self.path, chat.line), answer, rest)

    def _span(self, chat: Chat, whole: str, first: int, end: int, *, asked: bool = True) -> tuple[int, int]:
        """The characters of the messages ``first`` to ``end`` (not included) in the text of the whole conversation; without the words
        that ask for an answer, where it is ``asked`` for."""
        if first == 0:
            raise self._unclear(chat, "the conversation begins with an answer, and nothing asks for it")
        before = self._render(chat, chat.messages[:first], tokenize=False, add_generation_prompt=asked)
        if asked and chat.messages[first - 1]["role"] not in self._after:
            self._after.add(chat.messages[first - 1]["role"])
            self._note_header(chat, before, first)
        upto = whole if end == len(chat.messages) else self._render(chat, chat.messages[:end], tokenize=False)
        if not upto.startswith(before):
            raise self._unclear(
                chat, f"what it writes to ask for message {first + 1} is not how the conversation goes on", before, upto
            )
        if not whole.startswith(upto):
            raise self._unclear(chat, f"it writes message {end} otherwise once others follow", upto, whole)
        return len(before), len(upto)

    def _note_header(self, chat: Chat, before: str, first: int) -> None:
        """Keeps what a template that does not ask for answers writes in front of each of them, which is trained on."""
        if self._render(chat, chat.messages[:first], tokenize=False) != before:
            return
        role = chat.messages[first]["role"]
        with contextlib.suppress(ConfigError):  # of a template that does not take other words
            texts = [
                self._render(chat, [*chat.messages[:first], {"role": role, "content": words}], tokenize=False)
                for words in ("0", "1")
            ]
            same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
            header = texts[0][len(before) : same] if texts[0].startswith(before) else ""
            if header.strip():
                self.notes.setdefault("header", header_note(where(self.path, chat.line), header))

    def _unclear(self, chat: Chat, why: str, one: str = "", other: str = "") -> ConfigError:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        seen = f" ({one[at : at + 30]!r} becomes {other[at : at + 30]!r})" if one else ""
        return ConfigError(
            f"{where(self.path, chat.line)}: a conversation whose answers cannot be found in the chat template's text",
            why=f"{why}{seen}",
            fix="mark the answers in the template, {% generation %}...{% endgeneration %} around them; or give records of prompt and "
            "completion, one for each answer",
        )

    def _render(self, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
        return rendered(self.tokenizer, messages, where(self.path, chat.line), tools=chat.tools, **options)
