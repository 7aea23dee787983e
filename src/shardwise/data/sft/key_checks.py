"""Checks of the keys of a record and its messages (:mod:`shardwise.data.sft.keys`): honoured, refused, or returned to be counted.
Torch-free."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwise.data.sft.keys import KEYS_OF, Key
from shardwise.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]

_SAYS = {name: key.says for name, key in KEYS_OF["message"].items() if key.says}
TRAINING_KEYS = frozenset(_SAYS)


def check_record(given: Mapping[str, Any], kind: str, place: str) -> tuple[str, ...]:
    """Refuses keys of a record that would change what is trained on, and returns those that nothing reads."""
    others = []
    for name, value in given.items():
        key = KEYS_OF["record"].get(name)
        if key is None or (key.why and kind not in key.beside):
            others.append(name)
        elif key.why and _says_something(value, key):
            raise _refused(key, name, place)
    return tuple(others)


def check_message(message: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """The same for a message: returns what the chat template has to read, and all unknown keys."""
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
        if isinstance(value, bool) != (name != "weight") or value not in (*_SAYS[name],):  # a list has no hash
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


class ReadKeys:
    """Which keys of messages a chat template reads: those without which it writes another text. Found once for each set of keys.

    Args:
        render: ``(messages, tools)`` -> the text of a conversation; may raise anything.
    """

    def __init__(self, render: Callable[[Messages, Any], str]):
        self._render = render
        self._unread: dict[tuple[str, ...], list[str]] = {}

    def unread(self, names: tuple[str, ...], messages: Messages, tools: Any, place: str) -> list[str]:
        """Those of ``names`` (keys of messages; tools) that the template does not read.

        Args:
            names: of keys that the conversation has.
            messages: the conversation.
            tools: for the template.
            place: the line, as errors name it.
        """
        if names not in self._unread:
            self._unread[names] = self._found(names, messages, tools)
        for name in self._unread[names]:
            key = KEYS_OF["message"].get(name) or KEYS_OF["record"].get(name)
            if key is not None and key.needs_template:
                raise ConfigError(
                    f"{place}: the key {name!r}",
                    why="the chat template writes the same text without it, so that the model would be trained without it",
                    fix="use a chat template that writes it (data.chat_template=FILE.jinja, in a script tokenizer.chat_template = ...); or "
                    "remove it",
                )
        return self._unread[names]

    def _found(self, names: tuple[str, ...], messages: Messages, tools: Any) -> list[str]:
        def text(left_out: Iterable[str]) -> str | None:
            less = [{key: value for key, value in message.items() if key not in left_out} for message in messages]
            try:
                return self._render(less, None if "tools" in left_out else tools)
            except Exception:  # a template is code of its own, and may need the key
                return None

        def is_read(name: str) -> bool:
            if text({name}) != whole:
                return True
            # One that says what another says, as reasoning and reasoning_content, may be read in its absence.
            return _is_double(name, messages) and text({*names} - {name}) != text(names)

        whole = text(())
        return [] if whole is None else [name for name in names if not is_read(name)]


def _is_double(name: str, messages: Messages) -> bool:
    """Whether each message that has the key has its value under another one too."""
    having = [message for message in messages if not _is_empty(message.get(name))]
    return bool(having) and all(any(key != name and value == m[name] for key, value in m.items()) for m in having)


def _refused(key: Key, name: str, place: str) -> ConfigError:
    return ConfigError(f"{place}: the key {name!r}", why=key.why, fix=key.fix)


def _says_something(value: Any, key: Key) -> bool:
    return not _is_empty(value) and not (key.allowed is not None and value == key.allowed)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
