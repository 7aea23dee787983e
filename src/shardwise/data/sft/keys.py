"""The keys of records and messages in formats of fine-tuning data: what is done with each, and who writes it. Torch-free.

Whatever changes what is trained on is honoured or refused; any other key is counted (:class:`~shardwise.data.sft.encode_file.SFTReport`).
The table in docs/finetuning.md is :func:`table` of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Key:
    """Keys that mean the same.

    Attributes:
        place: where they stand.
        names: of the keys.
        by: who writes them.
        why: why they are refused, where they are; "": they are not.
        fix: what to do then.
        does: what is done with them, for the docs.
        beside: kinds of records (text, prompt, messages) beside which they are refused; elsewhere they are counted.
        allowed: the value that changes nothing, beside an empty one.
        needs_template: they go to the chat template, and are refused where it does not read them.
        says: value -> whether the message is trained on; empty: they do not say it.
        is_common: other data has keys of these names too, so that they are no sign of another format.
    """

    place: Literal["record", "message"]
    names: tuple[str, ...]
    by: str
    why: str = ""
    fix: str = "remove it"
    does: str = ""
    beside: tuple[str, ...] = ("text", "prompt", "messages")
    allowed: Any = None
    needs_template: bool = False
    says: Mapping[Any, bool] = field(default_factory=dict)
    is_common: bool = False

    @property
    def done(self) -> str:
        """What is done with them, for the docs."""
        if self.needs_template:
            return "goes to the chat template; refused where that does not read it"
        if self.says:
            words = {is_trained: str(value).lower() for value, is_trained in self.says.items()}
            return (
                f"`{words[False]}`: the answer is context, not trained on; `{words[True]}`: it is trained on; any other value, or that of "
                "another role, is refused"
            )
        if self.does:
            return self.does
        if len(self.beside) < 3:
            return f"refused beside {' and '.join(f'`{kind}`' for kind in self.beside)}"
        return "refused" if self.allowed is None else f"refused, unless {str(self.allowed).lower()}"


def _record(names: str, by: str, why: str = "", fix: str = "remove it", **more: Any) -> Key:
    return Key("record", tuple(names.split()), by, why, fix, **more)


def _message(names: str, by: str, why: str = "", fix: str = "remove it", **more: Any) -> Key:
    return Key("message", tuple(names.split()), by, why, fix, **more)


_CHATS = ("prompt", "messages")
_TURNS = "what it says belongs before the answer, and would be missing"
_ONE_ANSWER = "it belongs to training on better and worse answers, and here each answer is trained on"
_PAIRS = "write the better answer alone: prompt and completion, or messages; and remove what is worse"
_MEDIA = "pictures, sound and video are not read, and the texts belong to them"
_OWN_DATA = "give such samples by a function of yours (data.build); or, if the texts alone are meant, remove it"

KEYS = (
    _record("text", "TRL, axolotl, torchtune", does="trained on as a whole"),
    _record("messages", "OpenAI, TRL, axolotl, LLaMA-Factory, torchtune", does="each answer in it is trained on"),
    _record("prompt completion", "TRL, OpenAI (older)", does="the completion is trained on"),
    _record("tools", "OpenAI, TRL, axolotl, LLaMA-Factory", needs_template=True),
    _record("parallel_tool_calls", "OpenAI",
        "it changes the prompt that OpenAI writes for tools, and the chat template is not given it", allowed=True, is_common=True),
    _record("functions", "OpenAI (older)",
        "functions are given to a chat template as tools", 'write them as "tools": [{"type": "function", "function": ...}]'),
    _record("weight", "Fireworks",
        "it weighs a record against the others, and all count alike here", "remove it; a record of weight 0 is left out of the file", allowed=1, is_common=True),
    _record("chosen rejected rejected_response preferred_output non_preferred_output", "TRL, axolotl, LLaMA-Factory, torchtune, OpenAI, ms-swift",
        _ONE_ANSWER, _PAIRS),
    _record("kto_tag", "LLaMA-Factory", _ONE_ANSWER, "keep the records whose tag is true, without it"),
    _record("label", "TRL, ms-swift", _ONE_ANSWER, "keep the records whose label is true, without it", beside=_CHATS, is_common=True),
    _record("completions", "TRL",
        "it judges the steps of an answer, and here each answer is trained on", "write the steps that are right as one completion, and remove it", beside=_CHATS),
    _record("labels", "TRL",
        "it judges the steps of an answer, and here each answer is trained on", "write the steps that are right as one completion, and remove it", beside=_CHATS, is_common=True),
    _record("system", "LLaMA-Factory, axolotl, ms-swift",
        _TURNS, 'write it as the first message: {"role": "system", "content": "..."}; or at the beginning of a prompt', beside=_CHATS),
    _record("history", "LLaMA-Factory, ms-swift", _TURNS, "write all turns as messages", beside=_CHATS),
    _record("instruction input output query response", "LLaMA-Factory, axolotl, torchtune, ms-swift (Alpaca)",
        _TURNS, "write Alpaca's instruction, with its input behind it, as prompt, and its output as completion", beside=("prompt",)),
    _record("conversations conversation", "axolotl, LLaMA-Factory, torchtune, ms-swift (ShareGPT)",
        "it is a conversation of another format, and nothing says which of the two is meant", "write ShareGPT's conversations as messages: from and value are role and content, human and gpt are user and assistant"),
    _record("segments", "axolotl (input_output)",
        "each of its parts says whether it is trained on, which one prompt and one completion cannot say", "write messages with weight 0 or 1; or a prompt and a completion"),
    _record("images image videos video audios audio objects", "TRL, axolotl, LLaMA-Factory, torchtune, ms-swift", _MEDIA, _OWN_DATA),
    _record("input_ids completion_mask assistant_masks", "TRL, axolotl",
        "tokens, or masks of tokens, are not read from records, which become tokens by data.tokenizer", "remove it; or give such samples by a function of yours (data.build)"),
    _record("chat_template_kwargs", "TRL",
        "one chat template is used for all records, without values for each of them", "set the value in the template, {% set NAME = ... %} at its beginning (data.chat_template); and remove it"),
    _message("role content", "all of them", does="go to the chat template; the role `assistant` is an answer"),
    _message("weight", "OpenAI, Fireworks", says={0: False, 1: True}),
    _message("train training loss", "axolotl (`train`), ms-swift (`loss`)", says={False: False, True: True}),
    _message("masked", "torchtune", says={True: False, False: True}),
    _message("train_detail training_detail", "axolotl",
        "an answer is trained on as a whole, or not at all", 'split the answer into several messages, with "weight": 0 for what is context; and remove it'),
    _message("eot", "torchtune",
        "the chat template writes what ends a message", "remove it, and use a template that ends messages so (data.chat_template)", allowed=True),
    _message("ipython", "torchtune",
        "calls of tools are written by the chat template, from tool_calls", 'write the call as "tool_calls": [...] of the message, and remove it', allowed=False),
    _message("tool_calls", "OpenAI, TRL, axolotl", needs_template=True),
    _message("function_call", "OpenAI (older)", needs_template=True),
    _message("reasoning_content thinking reasoning", "TRL, axolotl", needs_template=True),
    _message("refusal", "OpenAI", "it is an answer that is given in place of content", "write it as content; and remove it"),
    _message("images image videos video audios audio", "OpenAI (`audio`), TRL, torchtune", _MEDIA, _OWN_DATA),
    _message("name tool_call_id", "OpenAI", does="go to the chat template; counted where that does not read them"),
    _message("from value", "axolotl, LLaMA-Factory, torchtune (ShareGPT)",
        "who speaks is the role of a message, and what is said its content", "write from and value as role and content; human and gpt are user and assistant"),
)  # fmt: skip
KEYS_OF = {
    place: {name: key for key in KEYS if key.place == place for name in key.names} for place in ("record", "message")
}
RECORD_KEYS = tuple(KEYS_OF["record"])
"""Keys of a record that are read, if only to refuse them."""


def table() -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in key.names)} | {'a message' if key.place == 'message' else 'a record'} | {key.done} | {key.by} |"
        for key in KEYS
    ]
    return "\n".join(["| key | of | what is done | who writes it |", "|---|---|---|---|", *rows])
