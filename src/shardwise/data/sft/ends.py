"""Where an answer ends: the special tokens by which a model learns to stop.

What follows an answer up to the next message, and is a special token or the tokenizer's EOS, belongs to the answer. A template's
marks (``{% generation %}``) may leave it out; it is trained on all the same. Where there is none, a model that was trained on such
answers goes on after them: that is warned of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

_SHOWN = 30  # characters of the text around an end


@dataclass(frozen=True)
class Ends:
    """Special tokens that may end an answer: all of a tokenizer, and its EOS, but for those that begin a sequence or pad it.

    Attributes:
        ids: of these tokens.
        texts: of these tokens.
        begins: tokens that were found to begin the next message.
        blank: of tokens that were looked at, whether they are blanks.
    """

    tokenizer: Any
    ids: frozenset[int]
    texts: tuple[str, ...]
    begins: set[int] = field(default_factory=set)
    blank: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> "Ends":
        known = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        end = getattr(tokenizer, "eos_token_id", None)
        for name in ("bos", "pad", "unk"):
            known.pop(getattr(tokenizer, f"{name}_token_id", None), None)  # type: ignore[call-overload]
        if end is not None:
            known[end] = tokenizer.convert_ids_to_tokens(end)
        return cls(tokenizer, frozenset(known), tuple(known.values()))

    def is_last(self, ids: Sequence[int]) -> bool:
        """Whether the last of some tokens is one of these; blanks after it do not count."""
        return next((token in self.ids for token in reversed(ids) if not self._is_blank(token)), False)

    def has_all(self, ids: Sequence[int], end: int) -> bool:
        """Whether an answer of ``ids`` up to ``end`` is known to have all that ends it."""
        behind = next((token for token in ids[end:] if not self._is_blank(token)), None)
        return self.is_last(ids[:end]) and (behind not in self.ids or behind in self.begins)

    def _is_blank(self, token: int) -> bool:
        if token not in self.blank:
            self.blank[token] = token not in self.ids and not self.tokenizer.decode([token]).strip()
        return self.blank[token]


def runs_of(marks: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of True: (first, end) of each."""
    runs, at = [], 0
    for is_marked, group in groupby(marks):
        num = sum(1 for _ in group)
        if is_marked:
            runs.append((at, at + num))
        at += num
    return runs


def header_note(place: str, header: str) -> str:
    """What is reported of a template that begins an answer with words by which it asks for none."""
    return (
        f"{place}: the chat template writes {header!r} before an answer, and nothing where one is asked for (add_generation_prompt), so these words "
        "are trained on with each answer, and a model that is asked by this template says them first. To train on the answer alone write them at "
        "the template's end: {% if add_generation_prompt %}{{ ... }}{% endif %} (data.chat_template=FILE.jinja, in a script tokenizer.chat_template = ...)"
    )


def ending_note(kind: str, place: str, answer: str, rest: str) -> str:
    """What is reported of an answer that ends without a special token ("none"), or before one ("left out")."""
    around = f"{answer[-_SHOWN:]!r} is followed by {rest[:_SHOWN]!r}"
    if kind == "left out":
        return (
            f"{place}: the marks of the chat template leave out what ends an answer: {around}. Its special tokens are trained on all the "
            "same, so that the model learns to stop; write them before {% endgeneration %}, and this is not said"
        )
    return (
        f"{place}: an answer that ends without a special token: {around}. A model that is trained on it does not learn to stop there; "
        "write the tokenizer's EOS behind answers in the chat template (data.chat_template=FILE.jinja, in a script "
        "tokenizer.chat_template = ...)"
    )
