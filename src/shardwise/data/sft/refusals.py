"""Why a record cannot be trained on, as errors: the same where a run is checked before its ranks start, and on the ranks.
Torch-free."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.data.sft.records import Completion, Record, Text, calls_of, where
from shardwise.errors import ConfigError


def empty_answer(record: Record) -> str:
    """Whether a record has an answer that says nothing, as words; "" if not."""
    if isinstance(record, Text):
        return "" if record.text.strip() else "its text is empty"
    if isinstance(record, Completion):
        return "" if record.completion.strip() else "an answer is empty"
    if not record.answers:
        return "none of its answers is trained on" if record.untrained else "it has no answer"
    answers = (record.messages[i] for i in record.answers)
    said = (calls_of(message) or (message.get("content") or "").strip() for message in answers)
    return "" if all(said) else "an answer is empty"


def too_long(seq_len: int) -> str:
    """That the answer of a record is beyond the context, as words."""
    return f"its prompt is longer than seq_len = {seq_len:,}"


def unusable(path: str | Path, line: int, why: str) -> ConfigError:
    """Nothing of a record would be trained on; ``why`` as words."""
    return ConfigError(
        f"{where(path, line)}: {why}",
        why="a model would learn to say nothing" if "an answer" in why else "nothing of it would be trained on",
        fix='correct it, or leave such records out: unusable="drop" (data.unusable=drop)'
        + ("; or give a larger seq_len" if "longer" in why else ""),
    )


def no_template(path: str | Path, line: int) -> ConfigError:
    """A conversation for a tokenizer that has no chat template."""
    return ConfigError(
        f"{where(path, line)}: messages, for a tokenizer without a chat template",
        why="nothing says how messages become a text",
        fix="use the tokenizer of an instruction model, or give it a template: --data.chat_template=FILE.jinja, in a script "
        "tokenizer.chat_template = ...; or give prompt and completion as texts",
    )


def template_raised(place: str, messages: Sequence[Mapping[str, Any]], error: Exception, more: str = "") -> ConfigError:
    """The chat template refuses a conversation; ``more`` that can be done."""
    return ConfigError(
        f"{place}: the chat template raised {type(error).__name__}",
        why=f"{error}; the roles are {', '.join(message['role'] for message in messages)}",
        fix=f"write the messages as the template wants them, or use another template{more}",
    )


def beyond_vocabulary(path: str | Path, line: int, *, token: int, text: str, vocab: int, num_known: int) -> ConfigError:
    """A token that the model has no embedding for.

    Args:
        path, line: of the record.
        token, text: its number and its text.
        vocab: rows of the model's embedding.
        num_known: tokens that the tokenizer knows.
    """
    return ConfigError(
        f"token {token} ({text!r}) in {where(path, line)}",
        why=f"the model's vocabulary has {vocab:,} tokens, 0 to {vocab - 1:,}, and the tokenizer's {num_known:,}",
        fix="add rows to the model's embeddings: --model.vocab=tokenizer, in a script model.resize_token_embeddings(len(tokenizer)) "
        "before it is sharded; or use the tokenizer that the model was made with",
    )
