"""Values of configurations: as words that rows name them by, as the types that a row takes, as they are shown. Torch-free."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

KINDS = ("int", "float", "bool", "str", "dtype", "list", "map", "table", "path", "any")
UNRESOLVED = "only other keys of the same file are put in: print the resolved configuration first, and import that"
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
_TRUE, _FALSE, _NONE = ("true", "yes", "on"), ("false", "no", "off"), ("none", "null", "")
_DTYPES = {
    **{name: name for name in ("float16", "float32", "float64", "bfloat16")},
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32", "double": "float64",
}  # fmt: skip
_CALLED = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "dtype": "a dtype", "list": "a list",
    "map": "a mapping", "path": "a path",
}  # fmt: skip


class RefusedError(Exception):
    """A key or value that would silently change training, or that is not known: why, and behind a colon what to write."""

    def __init__(self, key: str, text: str, value: Any = ABSENT, *, is_default: bool = False):
        super().__init__(f"{key}: {text}")
        self.key, self.text, self.value, self.is_default = key, text, value, is_default

    @property
    def given(self) -> str:
        default = " (the default there)" if self.is_default else ""
        return self.key if self.value is ABSENT else f"{self.key}={short(self.value)}{default}"


def coerced(value: Any, takes: tuple[str, ...], key: str, *, may_be_infinite: bool = False) -> Any:
    """The value as its own type: words of YAML 1.1 and of an environment are switches and numbers too."""
    fit = _text_as(value.strip(), takes) if isinstance(value, str) else _value_as(value, takes)
    if fit is not ABSENT:
        wrong = _not_countable(fit)
        if wrong is not None and wrong is fit and str(wrong) in takes:
            return str(wrong)  # infinity, by the word of the row
        if wrong is not None and not (may_be_infinite and fit == math.inf):
            raise RefusedError(key, "it is no number that a run can count with: write another", value)
        return fit
    words = [kind for kind in takes if kind not in (*KINDS, "none")]
    if isinstance(value, str) and "${" in value:
        raise RefusedError(key, UNRESOLVED, value)
    near = difflib.get_close_matches(str(value), words, 1)
    kinds = [_CALLED.get(kind, kind) for kind in takes]
    fix = f"did you mean {near[0]!r}?" if near else f"write {'one of them' if len(kinds) > 1 else kinds[0]}"
    raise RefusedError(key, f"it takes {', '.join(kinds)}: {fix}", value)


def _not_countable(value: Any) -> Any:
    """The first number in a value that is not a number, infinite, or of more than 64 bits; None: there is none."""
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return next((wrong for one in inner if (wrong := _not_countable(one)) is not None), None)
    is_wrong = not math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and abs(value) >= 2**63
    return value if is_wrong else None


def _text_as(text: str, takes: tuple[str, ...]) -> Any:
    plain = text.lower()
    word = next((kind for kind in takes if kind.lower() == plain and kind not in KINDS), None)
    if word is not None:
        return None if word == "none" else word
    if "bool" in takes and plain in _TRUE + _FALSE:
        return plain in _TRUE
    if "bool" in takes and plain in ("1", "0") and not {"int", "float"} & {*takes}:
        return plain == "1"
    if "dtype" in takes and text.removeprefix("torch.") in _DTYPES:
        return _DTYPES[text.removeprefix("torch.")]
    if plain in _NONE and ("str" not in takes or "none" in takes):
        return None
    for kind, number in (("int", lambda: int(text.replace("_", ""))), ("float", lambda: float(text))):
        if kind in takes:
            try:
                return number()
            except ValueError:
                continue
    if "list" in takes and "str" not in takes:
        return [part.strip() for part in text.split(",")]
    return text if {"str", "any", "path", "list"} & {*takes} else ABSENT


def _value_as(value: Any, takes: tuple[str, ...]) -> Any:
    if value is None or "any" in takes:
        return value
    if isinstance(value, bool):
        texts = ("yes" if value else "no", "true" if value else "false")
        return value if "bool" in takes else next((text for text in texts if text in takes), ABSENT)
    if isinstance(value, int | float):
        if "float" in takes or (isinstance(value, int) and "int" in takes):
            return value
        if "int" in takes and float(value).is_integer():
            return int(value)
        return str(value) if str(value) in takes or "str" in takes else ABSENT
    return value if {"list", "map", "path", "table"} & {*takes} else ABSENT


def word_of(value: Any) -> str:
    """A value as the word that rows name it by."""
    if value is None:
        return "none"
    if isinstance(value, bool | str):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def short(value: Any) -> str:
    """A value as it is shown, in one short line."""
    text = _flow(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flow(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    return value if isinstance(value, str) else word_of(value)


def literal(text: str) -> Any:
    """A value as a table writes it: ``true``, ``8e-4``, ``null``, ``[0.9, 0.999]``; else the text."""
    if text in ("true", "false", "null"):
        return None if text == "null" else text == "true"
    if text.startswith("["):
        return [literal(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
