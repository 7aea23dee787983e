"""An option of another tool, and the kinds of answers there are to one. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Word:
    """An option of other tools.

    Attributes:
        like: a value that it is given there, as an example; "": it is a switch.
        write: the override to write, ``{}`` being the value; a word in capitals is for the user to choose. "": Shardwise
            has nothing like it, or needs nothing.
        values: values there -> overrides here, where they are other words; "": leave it out.
        text: what else to know, or what to do instead.
        texts: values there -> another text; a value without an override is answered by it alone.
        tools: the tools that have the option.
    """

    like: str = ""
    write: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    tools: str = ""


def to(key: str, like: str, text: str = "") -> Word:
    """The same value under another key."""
    return Word(like=like, write=f"{key}={{}}", text=text)


def fixed(write: str, like: str, text: str = "") -> Word:
    """An override that has the value inside, or cannot be computed from it."""
    return Word(like=like, write=write, text=text)


def switch(write: str, text: str = "") -> Word:
    """An option that is given or left out."""
    return Word(write=write, values={"": write, "true": write, "1": write, "false": "", "0": ""}, text=text)


def choice(key: str, text: str = "", **values: str) -> Word:
    """An option of few values; an override stands for itself, ``""`` for leaving it out."""
    given = {name: f"{key}={ours}" if ours and "=" not in ours else ours for name, ours in values.items()}
    return Word(like=next(name for name, ours in given.items() if ours), write=f"{key}=VALUE", values=given, text=text)


def none(text: str, like: str = "", *, off: str = "") -> Word:
    """An option that Shardwise does not have; ``off``: what to say where it is switched off, if that is something else."""
    return Word(like=like, text=text, texts=dict.fromkeys(("false", "0"), off) if off else {})
