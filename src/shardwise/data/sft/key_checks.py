"""Checks of the keys of a record and its messages (:mod:`shardwise.data.sft.keys`): honoured, refused, or returned to be counted.
Torch-free."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.data.sft.keys import KEYS_OF, Key
from shardwise.errors import ConfigError

__all__ = ["TRAINING_KEYS", "check_message", "check_record", "is_trained", "unread_by_template"]

_SAYS: Mapping[str, Mapping[Any, bool]] = {
    "weight": {0: False, 1: True},
    **{name: {False: False, True: True} for name in ("train", "training", "loss")},
    "masked": {True: False, False: True},
}
"""Keys of a message that say whether it is trained on: value -> whether."""
TRAINING_KEYS = frozenset(_SAYS)


def check_record(given: Mapping[str, Any], kind: str, place: str) -> tuple[str, ...]:
    """Refuses keys of a record that would change what is trained on, and returns those that nothing reads.

    Args:
        given: the record.
        kind: text, prompt or messages.
        place: the line, as errors name it.

    Raises:
        ConfigError: by the line and the key.
    """
    others = []
    for name, value in given.items():
        key = KEYS_OF["record"].get(name)
        if key is None or (key.why and kind not in key.beside):
            others.append(name)
        elif key.why and _says_something(value, key):
            raise _refused(key, name, place)
    return tuple(others)


def check_message(message: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """The same for a message: returns what the chat template has to read, and all unknown keys.

    Args:
        message: of a record.
        place: the message and the line, as errors name them.

    Raises:
        ConfigError: by the line, the message and the key.
    """
    others = []
    for name, value in message.items():
        key = KEYS_OF["message"].get(name)
        if key is not None and key.why:
            if _says_something(value, key):
                raise _refused(key, name, place)
        elif name not in ("role", "content", *_SAYS) and not _is_empty(value):
            others.append(name)
    return tuple(others)


def is_trained(message: Mapping[str, Any], place: str, *, is_answer: bool) -> bool:
    """Whether a message is trained on: what its keys say, else whether it is an answer.

    Raises:
        ConfigError: a value that says nothing, two keys that differ, or one that asks to train on what is no answer.
    """
    said = {}
    for name in _SAYS.keys() & message.keys():
        value = message[name]
        if value is None:
            continue
        if isinstance(value, bool) != (name != "weight") or value not in _SAYS[name]:
            raise ConfigError(
                f"{place}: {name} is {value!r}",
                why="an answer is trained on as a whole, or not at all"
                if name == "weight"
                else "it says whether the message is trained on",
                fix=f"write {' or '.join(str(one).lower() for one in _SAYS[name])}, or leave it out",
            )
        said[name] = _SAYS[name][value]
    if len({*said.values()}) > 1:
        raise ConfigError(
            f"{place}: the keys {' and '.join(sorted(said))}",
            why="one says that it is trained on, and one that it is not",
            fix="leave one of them",
        )
    if said and any(said.values()) and not is_answer:
        raise ConfigError(
            f"{place}: {' and '.join(f'{name} is {message[name]!r}' for name in sorted(said))}, and it is no answer",
            why="only answers are trained on: messages of the role assistant, and of a prompt with its completion those of the completion",
            fix="leave it out; or write what is to be learned as an answer",
        )
    return is_answer and all(said.values())


def unread_by_template(names: Iterable[str], template: Any, place: str) -> list[str]:
    """Those of ``names`` (keys of messages; tools) that a chat template does not read.

    Args:
        names: of keys.
        template: its source, or several by name.
        place: the line, as errors name it.

    Raises:
        ConfigError: one of them changes what a record means.
    """
    source = "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
    looped = {"messages", *re.findall(r"for\s+(\w+)\s+in\s+[^%]*messages", source)}
    if re.search(rf"\b(?:{'|'.join(looped)})\s*\|\s*tojson", source):  # it writes messages with all that they have
        source += " ".join(name for name in names if name != "tools")
    unread = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)]
    for name in unread:
        key = KEYS_OF["message"].get(name) or KEYS_OF["record"].get(name)
        if key is not None and key.needs_template:
            raise ConfigError(
                f"{place}: the key {name!r}",
                why="the chat template does not read it, so that the model would be trained without it",
                fix="use a chat template that writes it (data.chat_template=FILE.jinja, in a script tokenizer.chat_template = ...); or remove it",
            )
    return unread


def _refused(key: Key, name: str, place: str) -> ConfigError:
    return ConfigError(f"{place}: the key {name!r}", why=key.why, fix=key.fix)


def _says_something(value: Any, key: Key) -> bool:
    return not _is_empty(value) and not (key.allowed is not None and value == key.allowed)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
