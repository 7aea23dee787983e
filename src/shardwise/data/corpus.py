"""Datasets of token sequences from files: text as bytes or through a tokenizer, ``.npy`` and ``.bin`` arrays; and a
text that comes with Python.

A file is one long row of tokens, cut into windows of ``seq_len + 1``. Neighbouring windows share one token, the last
target of one and the first input of the next, so that every token but the first is predicted exactly once per epoch.
Arrays are memory-mapped: a file may be larger than memory, and the ranks of one machine share its pages.
"""

import codecs
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.token_cache import TokenCache
from shardwise.data.token_store import in_memory
from shardwise.errors import ConfigError

BYTES = 256
"""Size of the vocabulary when the tokens are bytes."""

# Characters tokenized at once: the tokenizer's result takes some 100 bytes per token.
_PIECE = 1 << 20
_VERSION = 2  # of what a text becomes: a change of it makes kept tokens anew
_SCANNED = 1 << 26  # tokens checked when a file is opened; later ones are checked when they are read


def pydoc_text() -> str:
    """The English text behind Python's ``help()`` topics (about 0.7 MB), in alphabetical order of the topics.

    Raises:
        ConfigError: this Python was installed without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "the built-in text (no data.path)",
            why=f"this Python was installed without its help topics ({error})",
            fix="name a text file: data.path=my.txt",
        ) from error
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def encode(
    path: str | Path | None, tokenizer: Path, cache: TokenCache | None = None, content: str | None = None
) -> np.ndarray:
    """Tokenizes a text with a ``tokenizer.json``: uint32 [n], without special tokens. The tokenizer gets about a
    million characters at once, cut at the end of a line, and no more of the text is held. The result is the same on every
    rank.

    Args:
        path: a file in UTF-8; None: :func:`pydoc_text`.
        tokenizer: path of the ``tokenizer.json``.
        cache: keeps the tokens of a file; None: in memory, for the next call.
        content: of the ``tokenizer.json``, where tokens were added to it; None: as it is.

    Raises:
        ConfigError: the text is not UTF-8, the file is not a tokenizer, or the library ``tokenizers`` is missing.
    """
    if path is None or cache is None:
        ages = tuple(file and Path(file).stat().st_mtime_ns for file in (path, tokenizer))
        return _encoded(path and str(path), str(tokenizer), content, ages)
    inputs = {
        "kind": "text",
        "version": _VERSION,
        "tokenizer": hashlib.sha256(tokenizer.read_bytes() if content is None else content.encode()).hexdigest(),
        "tokenizers": importlib.metadata.version("tokenizers") if importlib.util.find_spec("tokenizers") else None,
        "order": sys.byteorder,
    }
    return cache.tokens(path, inputs, functools.partial(_produce, str(path), str(tokenizer), content), np.uint32).tokens


@functools.lru_cache(maxsize=1)  # a run opens its data twice: to train, and to compare with one process
def _encoded(path: str | None, tokenizer: str, content: str | None, ages: tuple[Any, ...]) -> np.ndarray:
    return in_memory(functools.partial(_produce, path, tokenizer, content), np.uint32).tokens


def _produce(
    path: str | None, tokenizer: str, content: str | None, add: Callable[..., object]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    read = _tokenizer(tokenizer, content)
    size = Path(path).stat().st_size if path is not None and Path(path).is_file() else 0
    try:
        with io.StringIO(pydoc_text()) if path is None else Path(path).open(encoding="utf-8", newline="") as text:
            while piece := text.read(_PIECE):
                piece += text.readline()
                share = min(1.0, os.lseek(text.fileno(), 0, os.SEEK_CUR) / size) if size else None
                add(np.array(read.encode(piece, add_special_tokens=False).ids, dtype=np.uint32), share)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={path!r}",
            why=f"it is not UTF-8: {error.reason} at byte {_wrong_byte(path)}",
            fix="write it again in UTF-8, or give tokens as .npy",
        ) from error
    return {}, {}


def _wrong_byte(path: str | None) -> int:
    """The place in a file of the first byte that is not UTF-8: the error has its place in a block."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with Path(str(path)).open("rb") as file:
        while True:
            block, held = file.read(_PIECE), len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return done - held + error.start
            if not block:
                return done
            done += len(block)


def _tokenizer(file: str, content: str | None) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={file!r}",
            why=f"it needs the library tokenizers: {error}",
            fix="pip install 'shardwise[hf]', or give tokens as .npy",
        ) from error
    try:
        read = Tokenizer.from_file(file) if content is None else Tokenizer.from_str(content)
    except Exception as error:  # the library has no exception class of its own
        raise ConfigError(
            f"data.tokenizer={file!r}",
            why=f"it cannot be read as a tokenizer: {error}",
            fix="give the tokenizer.json that save_pretrained of a tokenizer has written",
        ) from error
    read.no_truncation()
    read.no_padding()
    return read


class TokenWindows:
    """A dataset of fixed-length sequences cut from one row of tokens: ``[i]`` is ``{"input_ids": int64 [seq_len +
    1]}``.

    Args:
        tokens: integers [n], in memory or memory-mapped.
        seq_len: positions predicted per sequence.
        vocab: tokens must lie in ``[0, vocab)``; None: only negative ones are refused.
        name: its name in errors.

    Raises:
        ConfigError: fewer than ``seq_len + 1`` tokens, not a row of integers, or a token outside the vocabulary.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, *, vocab: int | None = BYTES, name: str = "tokens"):
        _check_row(tokens, name)
        self.tokens, self.seq_len, self.vocab, self.name = tokens, seq_len, vocab, name
        if seq_len < 1:
            raise ConfigError(f"seq_len={seq_len}", why="it counts the positions of a window", fix="give seq_len >= 1")
        if len(tokens) < seq_len + 1:
            raise ConfigError(
                f"{name} with {len(tokens)} tokens",
                why=f"one window of seq_len={seq_len} needs {seq_len + 1} tokens",
                fix=f"use more data or seq_len={max(1, len(tokens) - 1)} or less",
            )
        self._check_range(tokens[:_SCANNED], 0)

    @classmethod
    def from_text(cls, text: str, seq_len: int, *, vocab: int | None = BYTES, name: str = "text") -> "TokenWindows":
        """Windows over the UTF-8 bytes of ``text``."""
        return cls(np.frombuffer(text.encode(), dtype=np.uint8), seq_len, vocab=vocab, name=name)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)} of {self.name}")
        start = index * self.seq_len
        window = np.asarray(self.tokens[start : start + self.seq_len + 1])
        self._check_range(window, start)
        return {"input_ids": torch.from_numpy(window.astype(np.int64))}

    def split(self, val_fraction: float) -> "tuple[TokenWindows, TokenWindows]":
        """Splits by position: the last ``val_fraction`` of the tokens is for validation, and shares none with training.

        Raises:
            ConfigError: the fraction is outside (0, 1), or a part is shorter than one sequence.
        """
        if not 0.0 < val_fraction < 1.0:
            raise ConfigError(
                f"val_fraction={val_fraction}",
                why="it is the share of the tokens kept for validation",
                fix="give a number between 0 and 1, such as 0.1",
            )
        cut = len(self.tokens) - max(1, round(val_fraction * len(self.tokens)))
        return (
            TokenWindows(self.tokens[:cut], self.seq_len, vocab=self.vocab, name=f"{self.name} (training part)"),
            TokenWindows(self.tokens[cut:], self.seq_len, vocab=self.vocab, name=f"{self.name} (validation part)"),
        )

    def limit(self, vocab: int) -> None:
        """Sets the size of the vocabulary, once it is known.

        Raises:
            ConfigError: a token is outside of it.
        """
        self.vocab = vocab
        self._check_range(self.tokens[:_SCANNED], 0)

    def _check_range(self, tokens: np.ndarray, start: int) -> None:
        for worst, at in ((tokens.max(), tokens.argmax), (tokens.min(), tokens.argmin)):
            if int(worst) < 0 or (self.vocab is not None and int(worst) >= self.vocab):
                size = f"the vocabulary has {self.vocab} tokens, 0 to {self.vocab - 1}" if self.vocab else ""
                raise ConfigError(
                    f"token {int(worst)} at position {start + int(at())} of {self.name}",
                    why=size or "tokens are numbered from 0",
                    fix="check the dtype of the file, or give the model the vocabulary these tokens were made with (--model.vocab=N adds rows to "
                    "a model.hf)",
                )


class TokenFile(TokenWindows):
    """A :class:`TokenWindows` over a file: the bytes of a text, or a saved array of tokens.

    Args:
        path: ``.npy`` (a one-dimensional integer array), ``.bin`` (raw integers of ``dtype``), or any text file, whose
            bytes are the tokens.
        seq_len: positions predicted per sequence.
        dtype: of the integers in a ``.bin`` file ("uint16"); not used for the other kinds.
        vocab: tokens must lie in ``[0, vocab)``; None: only negative ones are refused.

    Raises:
        ConfigError: the file is missing or unreadable, or is not what its name says; and as for :class:`TokenWindows`.
    """

    def __init__(self, path: str | Path, seq_len: int, *, dtype: str | None = None, vocab: int | None = BYTES):
        file = Path(path)
        if not file.is_file():
            raise ConfigError(
                f"data file {str(file)!r}",
                why="it is a directory" if file.is_dir() else f"there is no such file (relative to {Path.cwd()})",
                fix="give the path of a text file, or of tokens as .npy or .bin",
            )
        if dtype is not None and file.suffix != ".bin":
            raise ConfigError(
                f"dtype={dtype!r} for {str(file)!r}",
                why="a .npy file states its own dtype, and a text is read as bytes: the option would have no effect",
                fix="leave dtype out; it is for .bin files",
            )
        super().__init__(_open_tokens(file, dtype), seq_len, vocab=vocab, name=str(file))


def _open_tokens(file: Path, dtype: str | None) -> np.ndarray:
    if file.stat().st_size == 0:
        raise ConfigError(f"data file {str(file)!r}", why="it is empty", fix="give a file with text or tokens")
    try:
        if file.suffix == ".npy":
            return np.load(file, mmap_mode="r", allow_pickle=False)
        if file.suffix == ".bin":
            return _open_bin(file, dtype)
        tokens = np.memmap(file, dtype=np.uint8, mode="r")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data file {str(file)!r}",
            why=f"it cannot be read: {error}",
            fix="check that it is readable, and that a .npy file was written by numpy.save with integers",
        ) from error
    if (tokens[: 1 << 16] == 0).any():
        raise ConfigError(
            f"data file {str(file)!r} as text",
            why="it holds zero bytes, so it is not a text",
            fix="give a text file, or save the tokens as .npy (numpy.save) or .bin (tokens.tofile)",
        )
    return tokens


def _open_bin(file: Path, dtype: str | None) -> np.ndarray:
    kinds = "uint8, uint16, uint32, int32 or int64"
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if dtype is None or kind.kind not in "iu":
        raise ConfigError(
            f"dtype={dtype!r} for {str(file)!r}",
            why="a .bin file does not say which integers it holds",
            fix=f"give dtype as {kinds}",
        )
    size = file.stat().st_size
    if size % kind.itemsize:
        raise ConfigError(
            f"{str(file)!r} of {size} bytes as {kind.name}",
            why=f"the size is not a multiple of {kind.itemsize} bytes, so these are other integers",
            fix=f"give the dtype the file was written with: {kinds}",
        )
    return np.memmap(file, dtype=kind, mode="r")


def _check_row(tokens: np.ndarray, name: str) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} of dtype {tokens.dtype} and shape {list(tokens.shape)}",
            why="tokens are one long row of integers",
            fix="save them as numpy.save(path, numpy.concatenate(documents).astype('uint16'))",
        )
