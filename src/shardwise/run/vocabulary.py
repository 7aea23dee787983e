"""The tokenizer of a run, with the tokens that are added to it, and the rows of the model's embedding.

What is certain without transformers is refused before any rank starts; which numbers added tokens get is transformers' to say, on
the ranks. Torch-free.
"""

import importlib.util
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.config.suggest import did_you_mean
from shardwise.config.tokenizer import add_special, is_tokens, tokenizer_path
from shardwise.data.sft.encode_record import load_tokenizer
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig
from shardwise.run.pretrained import vocab_in


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens and rows of a run.

    Attributes:
        tokenizer: what reads the data, of transformers; None: the one in the file ``data.tokenizer``, as it is.
        there: tokens that were to be added, and were there.
        num_tokens: numbers that it gives to tokens, from 0 on; None: not counted.
        stored: rows of the embedding in the model's directory; None: not known.
        eos: number of the token that ends a text, if that was set.
    """

    tokenizer: Any = None
    added: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    num_tokens: int | None = None
    stored: int | None = None
    rows: int | None = None
    eos: int | None = None

    @property
    def growth(self) -> tuple[int, int] | None:
        """Rows in the directory and in the model; None: as many."""
        has_grown = self.stored is not None and self.rows is not None and self.rows > self.stored
        return (self.stored or 0, self.rows or 0) if has_grown else None

    def __str__(self) -> str:
        parts = [f"added {', '.join(self.added)}"] if self.added else []
        parts += [f"{', '.join(self.there)} {'was' if len(self.there) == 1 else 'were'} there"] if self.there else []
        if self.growth is not None:
            parts.append(f"{self.stored:,} rows became {self.rows:,}")
        elif self.num_tokens is not None and self.rows is not None:
            parts.append(f"{self.rows:,} rows are enough for {self.num_tokens:,} tokens")
        return "; ".join(parts)


def vocabulary_of(config: RunConfig) -> Vocabulary:
    """The tokens and rows of a run. It reads the tokenizer only where the configuration changes or counts it."""
    model, data = config.model, config.data
    stored = vocab_of_folder(model.hf, model.args)
    is_changed = bool(model.add_tokens or data.chat_template or data.eos_token)
    file = _file_of(config) if is_changed or model.may_grow else None
    if file is None:
        return Vocabulary(stored=stored, rows=_rows(config, stored, None))
    template = None if data.chat_template is None else template_in(data.chat_template)
    tokenizer, added, num_tokens = _read(file, file.stat().st_mtime_ns, model.add_tokens, template, data.eos_token)
    return Vocabulary(
        tokenizer=tokenizer if is_changed else None,
        added=added,
        there=tuple(token for token in model.add_tokens if token not in added),
        num_tokens=num_tokens if model.may_grow else None,
        stored=stored,
        rows=_rows(config, stored, num_tokens),
        eos=None if data.eos_token is None else tokenizer.eos_token_id,
    )


@lru_cache(maxsize=1)  # for the data, the model and the proof of a run
def _read(
    file: Path, age: int, tokens: tuple[str, ...], template: str | None, eos: str | None
) -> tuple[Any, tuple[str, ...], int]:
    """The tokenizer of transformers with what is added and set, the tokens that it did not have, and how many it has."""
    tokenizer = load_tokenizer(file)
    known, are_special = tokenizer.get_vocab(), {*tokenizer.all_special_tokens, *_special_in(tokenizer)}
    added = tuple(token for token in tokens if token not in known)
    if special := [token for token in tokens if token not in are_special]:  # a word that is there becomes a special one
        tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    if template is not None:
        tokenizer.chat_template = template
    known = tokenizer.get_vocab()
    if eos is not None:
        if eos not in known:
            raise ConfigError(
                f"data.eos_token={eos!r}",
                why="the tokenizer has no such token",
                fix=f"add it: --model.add_tokens={eos!r}; or {did_you_mean(eos, sorted(_special_in(tokenizer)), what='special tokens')}",
            )
        tokenizer.eos_token = eos
    return tokenizer, added, max(known.values()) + 1


def _special_in(tokenizer: Any) -> set[str]:
    """Tokens that the tokenizer takes out of a text before it cuts the rest, and leaves out of a decoded one."""
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def saved_files(tokenizer: Any) -> Mapping[str, bytes]:
    """File name -> content, as ``save_pretrained`` of a tokenizer writes them."""
    with tempfile.TemporaryDirectory(prefix="shardwise-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def vocab_of_folder(folder: str | None, changes: Mapping[str, object]) -> int | None:
    """Size of the vocabulary of a model directory, or that in ``changes``; None if neither has it."""
    changed = changes.get("vocab_size")
    return None if folder is None else changed if isinstance(changed, int) else vocab_in(folder)


# ---- before any rank starts ------------------------------------------------------------------------------------------


def check_vocabulary(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses a template that cannot be read, and rows that are too few, as far as that is certain."""
    if config.data.chat_template is not None:
        template_in(config.data.chat_template, origins["data.chat_template"])
    if config.model.may_grow:
        file, has_library = _file_of(config), importlib.util.find_spec("tokenizers") is not None
        num_tokens = _count(file, config.model.add_tokens) if file is not None and has_library else None
        _rows(config, vocab_of_folder(config.model.hf, config.model.args), num_tokens)


def _file_of(config: RunConfig) -> Path | None:
    data = config.data
    return None if data.build is not None or is_tokens(data.path) else tokenizer_path(data.tokenizer)


def _count(file: Path, tokens: Iterable[str]) -> int | None:
    """How many tokens a tokenizer has with those added, or fewer where transformers adds some of its own; None: unknown."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library has no exception class of its own; where the tokenizer is read, it is an error
        return None
    add_special(tokenizer, tokens)
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _rows(config: RunConfig, stored: int | None, num_tokens: int | None) -> int | None:
    """Rows of the embedding, for a tokenizer of ``num_tokens``; None for either: not known."""
    model = config.model
    if not model.may_grow:
        return stored
    given = f"model.add_tokens={list(model.add_tokens)}" if model.vocab is None else f"model.vocab={model.vocab!r}"
    if stored is None:
        raise ConfigError(
            f"{given} with model.hf={model.hf!r}",
            why="its config.json does not say how many tokens the model has (vocab_size)",
            fix="use the tokens that the model has; or add rows by transformers (model.resize_token_embeddings) and save the model",
        )
    if not isinstance(model.vocab, int):
        return max(stored, num_tokens or 0)
    if model.vocab < stored:
        raise ConfigError(
            f"{given} with model.hf={model.hf!r}",
            why=f"the model has {stored:,} rows, and none are taken away",
            fix=f"give {stored} or more, or remove model.vocab",
        )
    if num_tokens is not None and model.vocab < num_tokens:
        raise ConfigError(
            f"{given} for a tokenizer that numbers {num_tokens:,} tokens",
            why="tokens without a row could not be read",
            fix=f"give {num_tokens} or more; or --model.vocab=tokenizer: as many as are needed",
        )
    return model.vocab


def template_in(path: str, origin: str = "") -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
        why = "" if text.strip() else "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        text, why = "", (error.strerror or str(error)) if isinstance(error, OSError) else f"it is not UTF-8: {error}"
    if why:
        raise ConfigError(
            f"data.chat_template={path!r}{f' ({origin})' if origin else ''}",
            why=f"{why} (relative to {Path.cwd()})",
            fix="name a file with a template in Jinja, as chat_template.jinja in a model directory is",
        )
    return text
