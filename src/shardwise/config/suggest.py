"""Find the name a user probably meant.

No heavy imports: the command line uses it before it knows what else to import.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence


def closest(word: str, known: Iterable[str]) -> str | None:
    """The entry of ``known`` most similar to ``word``, or None if none is similar enough.

    Case and ``-``/``_`` are ignored, and for dotted names the last part is also compared alone: ``steps`` finds
    ``train.steps``.
    """
    names = list(known)
    plain = {_plain(name): name for name in reversed(names)}
    found = difflib.get_close_matches(_plain(word), list(plain), n=1, cutoff=0.6)
    if found:
        return plain[found[0]]
    last_parts = {_plain(name).rpartition(".")[2]: name for name in reversed(names)}
    found = difflib.get_close_matches(_plain(word).rpartition(".")[2], list(last_parts), n=1, cutoff=0.75)
    return last_parts[found[0]] if found else None


def did_you_mean(word: str, known: Sequence[str], *, what: str, also_called: Mapping[str, str] | None = None) -> str:
    """The ``fix`` part of an error about an unknown name: the most similar name, if any, and all names that exist.

    Args:
        what: what they are, in the plural ("keys of train").
        also_called: words that mean one of the names without being spelled like it.
    """
    near = (also_called or {}).get(_plain(word)) or closest(word, known)
    hint = f"did you mean '{near}'? " if near else ""
    return f"{hint}{what}: {listing(known)}"


def missing_blank(key: str, value: object) -> str:
    """A hint for ``{dim:32}``, which YAML reads as the one key ``dim:32`` without a value; else an empty text."""
    name, colon, rest = key.partition(":")
    return f"YAML wants a blank after the colon: write '{name}: {rest}'" if colon and value is None else ""


def listing(names: Iterable[str]) -> str:
    """Names as text: ``a, b, c``, or ``(none)``; of more than 20, the first 16 and how many more."""
    known = list(names)
    more = f" and {len(known) - 16} more" if len(known) > 20 else ""
    return (", ".join(known[:16] if more else known) or "(none)") + more


def first_few(names: Iterable[str]) -> str:
    """Names as text where some are enough: ``a, b, c and 4 more``."""
    known = list(names)
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")
