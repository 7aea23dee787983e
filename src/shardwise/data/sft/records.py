"""Records for fine-tuning, checked before anything is tokenized: lines of a JSONL file, or rows of a saved dataset
(:mod:`shardwise.data.sft.saved`). Torch-free: launchers use it too.

The fields are those that TRL, torchtune and the providers of fine-tuning take::

    {"text": "..."}                                                     every token is trained on
    {"prompt": "...", "completion": "..."}                              the completion is
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     every answer is
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.data.sft.key_checks import TRAINING_KEYS, check_message, check_record, is_trained
from shardwise.data.sft.keys import KEYS_OF
from shardwise.data.sft.saved import hub_advice, is_rows, open_rows
from shardwise.errors import ConfigError

_FIELDS = "the fields are text, or prompt and completion, or messages"
_OF_OTHERS = {name: key.fix for name, key in KEYS_OF["record"].items() if key.why and not key.is_common}
"""Keys of the formats of others -> what they are here."""
_HEAD, _BLANKS = 1 << 12, b"\xef\xbb\xbf \t\r\n"
_MESSAGE = '{"role": "user", "content": "..."}'


@dataclass(frozen=True)
class Text:
    """A text that is trained on as a whole. ``others``: keys of the record that nothing reads."""

    line: int
    text: str
    others: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Completion:
    """A prompt, and what is to be written after it."""

    line: int
    prompt: str
    completion: str
    others: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: mappings with ``role``, ``content`` and whatever else the chat template reads.
        num_given: how many of the first messages are a prompt, in which no answer is trained on.
        tools: for the chat template.
        untrained: messages, by number, that are context where they would be trained on.
        others: keys of the record that nothing reads.
        extras: keys of its messages, and ``tools``, that the chat template has to read.
    """

    line: int
    messages: list[dict[str, Any]]
    num_given: int = 0
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()
    others: tuple[str, ...] = field(default=(), compare=False)
    extras: tuple[str, ...] = field(default=(), compare=False)

    @property
    def answers(self) -> list[int]:
        """The answers that are trained on, by their numbers."""
        return [
            i
            for i, message in enumerate(self.messages)
            if i >= self.num_given and message["role"] == "assistant" and i not in self.untrained
        ]


Record = Text | Completion | Chat


def is_records(path: str | None) -> bool:
    """Whether a data file holds such records, by its ending; and whether it is a directory, which is a saved dataset."""
    return path is not None and (path.endswith((".jsonl", ".ndjson", ".json")) or is_rows(path))


def calls_of(message: Mapping[str, Any]) -> Any:
    """The tools that a message calls, which may stand in place of its content."""
    return message.get("tool_calls") or message.get("function_call")


def where(path: str | Path, line: int) -> str:
    """A line of a file, a record of a ``.json``, or a row of a dataset, as errors name it; rows count from 0, as those of ``datasets`` do."""
    word = "row" if is_rows(path) else "record" if str(path).endswith(".json") else "line"
    return f"{word} {line} of {str(path)!r}"


def read_records(
    path: str | Path, *, most: int | None = None, read: Callable[[float], object] = lambda share: None
) -> Iterator[Record]:
    """The records of a file or a saved dataset, in order; empty lines are passed over.

    Args:
        path: a file in UTF-8, a JSON object in each line, or a list of them in a ``.json``, which is read as a whole; or what
            :func:`~shardwise.data.sft.saved.open_rows` reads.
        most: only so many lines are read; None: all.
        read: called with the share of the file (0 to 1) that was read, before each record; not for rows of a dataset.

    Raises:
        ConfigError: the file cannot be read or has no record, or a line is none, which is named by its number.
    """
    found = 0
    for line, given in islice(enumerate(open_rows(path)), most) if is_rows(path) else _objects(path, most, read):
        found += 1
        yield _record(given, path, line)
    if not found:
        raise ConfigError(
            f"data file {str(path)!r}",
            why="it has no record",
            fix="give a dataset that has rows"
            if is_rows(path)
            else f"write one JSON object in each line, or a list of them in a .json: {_FIELDS}",
        )


def _objects(
    path: str | Path, most: int | None, read: Callable[[float], object]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file, each with the number of its line, or its place in a list."""
    try:
        with Path(path).open("rb") as file:
            done, size = 0, os.fstat(file.fileno()).st_size
            if str(path).endswith(".json") and file.read(_HEAD).lstrip(_BLANKS).startswith(b"["):
                file.seek(0)
                found = _parsed(file.read(), repr(str(path)), "write one list of objects, or an object in each line")
                for i, each in enumerate(islice(found, most), start=1):
                    read(i / len(found))
                    yield i, _checked(each, path, i)
                return
            file.seek(0)
            for line, raw in enumerate(islice(file, most), start=1):
                done += len(raw)
                read(min(1.0, done / max(size, 1)))
                if raw.strip():
                    yield line, _object(raw, path, line)
    except OSError as error:
        raise ConfigError(
            f"data file {str(path)!r}",
            why=f"it cannot be read: {error.strerror or error} (relative to {Path.cwd()})",
            fix=f"give the path of a JSONL file: a JSON object in each line{hub_advice(path)}",
        ) from error


def _object(raw: bytes, path: str | Path, line: int) -> dict[str, Any]:
    fix = "write one JSON object in each line, without line breaks in it"
    if str(path).endswith(".json"):
        fix += ", or a list of objects"
    return _checked(_parsed(raw, where(path, line), fix), path, line)


def _parsed(raw: bytes, place: str, fix: str) -> Any:
    try:
        found = json.loads(raw)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (RecursionError, ValueError) as error:
        why = f"it is no JSON: {error}"
        if isinstance(error, UnicodeDecodeError):
            why = f"it is not UTF-8: {error.reason}"
            fix = "save the file as UTF-8, in Python: Path(new).write_text(Path(old).read_text(encoding='latin-1'), encoding='utf-8'), with the "
            fix += "encoding that it has"
        elif isinstance(error, UnicodeEncodeError):
            half = f"\\u{ord(error.object[error.start]):04x}"
            why = f"it has {half}, which is half of a pair and no character"
            fix = f"remove {half}, or replace it by \\ufffd, where the records are written"
        raise ConfigError(place, why=why, fix=fix) from error
    return found


def _checked(found: Any, path: str | Path, line: int) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(
            where(path, line),
            why=f"it is a JSON {_kind(found)}, and a record is an object",
            fix="name the file .json: a list of records is read from one" if isinstance(found, list) else _FIELDS,
        )
    return found


def _record(given: dict[str, Any], path: str | Path, line: int) -> Record:
    place = where(path, line)
    kinds = [kind for kind in ("text", "messages", "prompt") if kind in given]
    if len(kinds) != 1 or ("completion" in given) != (kinds == ["prompt"]):
        raise ConfigError(
            f"{place}: an object with the keys {sorted(key for key, value in given.items() if value is not None)}",
            why="it does not say what is trained on"
            if not kinds
            else "it has a part of one kind of record, or parts of several",
            fix=next((text for key, text in _OF_OTHERS.items() if key in given and len(kinds) < 2), None)
            or f"{_FIELDS}; rename or remove the others{_without(given, path)}",
        )
    others = check_record(given, kinds[0], place)
    if given.get("tools") and isinstance(given[kinds[0]], str):
        others = (*others, "tools")
    if kinds == ["text"]:
        return Text(line, _text(given, "text", place), others)
    if kinds == ["messages"]:
        return _chat(_messages(given, "messages", place), 0, given, path, line, others)
    if isinstance(given["prompt"], list) != isinstance(given["completion"], list):
        raise ConfigError(
            f"{place}: a prompt of type {_kind(given['prompt'])} with a completion of type {_kind(given['completion'])}",
            why="both are texts, or both are lists of messages",
            fix="write both in one way",
        )
    if isinstance(given["prompt"], list):
        prompt, answers = _messages(given, "prompt", place), _messages(given, "completion", place)
        return _chat([*prompt, *answers], len(prompt), given, path, line, others)
    return Completion(line, _text(given, "prompt", place), _text(given, "completion", place), others)


def _chat(
    messages: list[dict[str, Any]],
    num_given: int,
    given: Mapping[str, Any],
    path: str | Path,
    line: int,
    others: tuple[str, ...],
) -> Chat:
    """A conversation, whose messages are given to the chat template without the keys that say what is trained on."""
    tools, untrained, extras = _tools(given, where(path, line)), set(), dict[str, None]()
    for i, message in enumerate(messages):
        place = f"{where(path, line)}: message {i + 1}"
        extras |= dict.fromkeys(check_message(message, place))
        content = message.get("content")
        if not (isinstance(content, str) or (content is None and calls_of(message))):
            raise ConfigError(
                f"{place}, whose content is a JSON {_kind(content)}",
                why="it is a text; parts of other kinds (images) are not read",
                fix=f"write it as {_MESSAGE}",
            )
        is_answer = i >= num_given if num_given else message["role"] == "assistant"
        if not is_trained(message, place, is_answer=is_answer) and is_answer:
            untrained.add(i)
    return Chat(
        line,
        [{key: value for key, value in message.items() if key not in TRAINING_KEYS} for message in messages],
        num_given,
        tools,
        frozenset(untrained),
        others,
        (*extras, *(["tools"] if tools else [])),
    )


def _without(given: Mapping[str, Any], path: str | Path) -> str:
    """How columns of a saved dataset are removed, as words: all but the messages, which say most."""
    if not is_rows(path):
        return ""
    others = sorted(key for key, value in given.items() if key not in ("messages", "tools") and value is not None)
    if "messages" not in given:
        return ", and save it again"
    return f": datasets.load_from_disk({str(path)!r}).remove_columns({others}).save_to_disk(FOLDER)"


def _text(given: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(given[key], str):
        raise ConfigError(
            f"{place}: {key} is a JSON {_kind(given[key])}", why="it is a text", fix=f'write "{key}": "..."'
        )
    return given[key]


def _tools(given: Mapping[str, Any], place: str) -> list[Any] | None:
    tools = given.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(
            f"{place}: tools is a JSON {_kind(tools)}",
            why="it is a list of schemas",
            fix="write a list, or leave it out",
        )
    return tools or None


def _messages(given: Mapping[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    messages = given[key]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{place}: {key} is {'an empty list' if messages == [] else 'a JSON ' + _kind(messages)}",
            why="it is a list of messages",
            fix=f"write them as {_MESSAGE}",
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            keys = f" with the keys {sorted(message)}" if isinstance(message, dict) else f" of type {_kind(message)}"
            raise ConfigError(
                f"{place}: message {i + 1} of {key}{keys}",
                why="a message says who speaks: role",
                fix=f"write it as {_MESSAGE}; ShareGPT's from and value are role and content, human and gpt are user and assistant",
            )
    return messages


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
