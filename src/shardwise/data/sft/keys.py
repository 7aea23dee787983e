"""The keys of records and messages in formats of fine-tuning data: what is done with each, and who writes it. Torch-free.

Whatever changes what is trained on is honoured or refused; any other key is counted (:class:`~shardwise.data.sft.encode_file.SFTReport`).
The table in docs/finetuning.md is :func:`table` of these.
"""

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["KEYS", "KEYS_OF", "RECORD_KEYS", "Key", "table"]


@dataclass(frozen=True)
class Key:
    """Keys that mean the same.

    Attributes:
        names: of the keys.
        place: where they stand.
        does: what is done with them, for the docs.
        by: who writes them.
        why: why they are refused, where they are; "": they are not.
        fix: what to do then.
        beside: kinds of records (text, prompt, messages) beside which they are refused; elsewhere they are counted.
        allowed: the value that changes nothing, beside an empty one.
        needs_template: they go to the chat template, and are refused where it does not read them.
    """

    names: tuple[str, ...]
    place: Literal["record", "message"]
    does: str
    by: str
    why: str = ""
    fix: str = "remove it"
    beside: tuple[str, ...] = ("text", "prompt", "messages")
    allowed: Any = None
    needs_template: bool = False


_CHATS = ("prompt", "messages")
_TURNS = "what it says belongs before the answer, and would be missing"
_IN_TEMPLATE = "goes to the chat template; refused where that does not read it"
_TRAINS = "`{}`: the answer is context, not trained on; `{}`: it is trained on; any other value, or that of another role, is refused"
_ONE_ANSWER = "it belongs to training on better and worse answers, and here each answer is trained on"
_PAIRS = "write the better answer alone: prompt and completion, or messages; and remove what is worse"
_MEDIA = "pictures, sound and video are not read, and the texts belong to them"
_OWN_DATA = "give such samples by a function of yours (data.build); or, if the texts alone are meant, remove it"

KEYS = (
    Key(("text",), "record", "trained on as a whole", "TRL, axolotl, torchtune"),
    Key(("messages",), "record", "each answer in it is trained on", "OpenAI, TRL, axolotl, LLaMA-Factory, torchtune"),
    Key(("prompt", "completion"), "record", "the completion is trained on", "TRL, OpenAI (older)"),
    Key(("tools",), "record", _IN_TEMPLATE, "OpenAI, TRL, axolotl, LLaMA-Factory", needs_template=True),
    Key(
        ("parallel_tool_calls",),
        "record",
        "refused, unless true",
        "OpenAI",
        "it changes the prompt that OpenAI writes for tools, and the chat template is not given it",
        allowed=True,
    ),
    Key(
        ("functions",),
        "record",
        "refused",
        "OpenAI (older)",
        "functions are given to a chat template as tools",
        'write them as "tools": [{"type": "function", "function": ...}]',
    ),
    Key(
        ("weight",),
        "record",
        "refused, unless 1",
        "Fireworks",
        "it weighs a record against the others, and all count alike here",
        "remove it; a record of weight 0 is left out of the file",
        allowed=1,
    ),
    Key(
        ("chosen", "rejected", "rejected_response", "preferred_output", "non_preferred_output"),
        "record",
        "refused",
        "TRL, axolotl, LLaMA-Factory, torchtune, OpenAI, ms-swift",
        _ONE_ANSWER,
        _PAIRS,
    ),
    Key(
        ("kto_tag",),
        "record",
        "refused",
        "LLaMA-Factory",
        _ONE_ANSWER,
        "keep the records whose tag is true, without it",
    ),
    Key(
        ("label",),
        "record",
        "refused beside `prompt` and `messages`",
        "TRL, ms-swift",
        _ONE_ANSWER,
        "keep the records whose label is true, without it",
        _CHATS,
    ),
    Key(
        ("completions", "labels"),
        "record",
        "refused beside `prompt` and `messages`",
        "TRL",
        "it judges the steps of an answer, and here each answer is trained on",
        "write the steps that are right as one completion, and remove it",
        _CHATS,
    ),
    Key(
        ("system",),
        "record",
        "refused beside `prompt` and `messages`",
        "LLaMA-Factory, axolotl, ms-swift",
        _TURNS,
        'write it as the first message: {"role": "system", "content": "..."}; or at the beginning of a prompt',
        _CHATS,
    ),
    Key(
        ("history",),
        "record",
        "refused beside `prompt` and `messages`",
        "LLaMA-Factory, ms-swift",
        _TURNS,
        "write all turns as messages",
        _CHATS,
    ),
    Key(
        ("instruction", "input", "output", "query", "response"),
        "record",
        "refused beside `prompt`",
        "LLaMA-Factory, axolotl, torchtune, ms-swift (Alpaca)",
        _TURNS,
        "write Alpaca's instruction, with its input behind it, as prompt, and its output as completion",
        ("prompt",),
    ),
    Key(
        ("conversations", "conversation"),
        "record",
        "refused",
        "axolotl, LLaMA-Factory, torchtune, ms-swift (ShareGPT)",
        "it is a conversation of another format, and nothing says which of the two is meant",
        "write ShareGPT's conversations as messages: from and value are role and content, human and gpt are user and assistant",
    ),
    Key(
        ("segments",),
        "record",
        "refused",
        "axolotl (input_output)",
        "each of its parts says whether it is trained on, which one prompt and one completion cannot say",
        "write messages with weight 0 or 1; or a prompt and a completion",
    ),
    Key(
        ("images", "image", "videos", "video", "audios", "audio", "objects"),
        "record",
        "refused",
        "TRL, axolotl, LLaMA-Factory, torchtune, ms-swift",
        _MEDIA,
        _OWN_DATA,
    ),
    Key(
        ("input_ids", "completion_mask", "assistant_masks"),
        "record",
        "refused",
        "TRL, axolotl",
        "tokens, or masks of tokens, are not read from records, which become tokens by data.tokenizer",
        "remove it; or give such samples by a function of yours (data.build)",
    ),
    Key(
        ("chat_template_kwargs",),
        "record",
        "refused",
        "TRL",
        "one chat template is used for all records, without values for each of them",
        "set the value in the template, {% set NAME = ... %} at its beginning (data.chat_template); and remove it",
    ),
    Key(("role", "content"), "message", "go to the chat template; the role `assistant` is an answer", "all of them"),
    Key(("weight",), "message", _TRAINS.format("0", "1"), "OpenAI, Fireworks"),
    Key(
        ("train", "training", "loss"),
        "message",
        _TRAINS.format("false", "true"),
        "axolotl (`train`), ms-swift (`loss`)",
    ),
    Key(("masked",), "message", _TRAINS.format("true", "false"), "torchtune"),
    Key(
        ("train_detail", "training_detail"),
        "message",
        "refused",
        "axolotl",
        "an answer is trained on as a whole, or not at all",
        'split the answer into several messages, with "weight": 0 for what is context; and remove it',
    ),
    Key(
        ("eot",),
        "message",
        "refused, unless true",
        "torchtune",
        "the chat template writes what ends a message",
        "remove it, and use a template that ends messages so (data.chat_template)",
        allowed=True,
    ),
    Key(
        ("ipython",),
        "message",
        "refused, unless false",
        "torchtune",
        "calls of tools are written by the chat template, from tool_calls",
        'write the call as "tool_calls": [...] of the message, and remove it',
        allowed=False,
    ),
    Key(("tool_calls",), "message", _IN_TEMPLATE, "OpenAI, TRL, axolotl", needs_template=True),
    Key(("function_call",), "message", _IN_TEMPLATE, "OpenAI (older)", needs_template=True),
    Key(
        ("reasoning_content", "thinking", "reasoning"),
        "message",
        _IN_TEMPLATE,
        "TRL, axolotl",
        needs_template=True,
    ),
    Key(
        ("refusal",),
        "message",
        "refused",
        "OpenAI",
        "it is an answer that is given in place of content",
        "write it as content; and remove it",
    ),
    Key(
        ("images", "image", "videos", "video", "audios", "audio"),
        "message",
        "refused",
        "OpenAI (`audio`), TRL, torchtune",
        _MEDIA,
        _OWN_DATA,
    ),
    Key(
        ("name", "tool_call_id"), "message", "go to the chat template; counted where that does not read them", "OpenAI"
    ),
    Key(
        ("from", "value"),
        "message",
        "refused",
        "axolotl, LLaMA-Factory, torchtune (ShareGPT)",
        "who speaks is the role of a message, and what is said its content",
        "write from and value as role and content; human and gpt are user and assistant",
    ),
)
KEYS_OF = {
    place: {name: key for key in KEYS if key.place == place for name in key.names} for place in ("record", "message")
}
RECORD_KEYS = tuple(KEYS_OF["record"])
"""Keys of a record that are read, if only to refuse them."""


def table() -> str:
    """The table of the docs."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in key.names)} | {'a message' if key.place == 'message' else 'a record'} | {key.does} | {key.by} |"
        for key in KEYS
    ]
    return "\n".join(["| key | of | what is done | who writes it |", "|---|---|---|---|", *rows])
