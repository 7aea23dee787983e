"""The data of a training run: what the section ``data`` names, opened and split into training and validation."""

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Subset

from shardwise.config.target import called, load_target
from shardwise.config.tokenizer import is_tokens, tokenizer_path
from shardwise.data.batch import default_collate
from shardwise.data.corpus import BYTES, TokenFile, TokenWindows, encode, pydoc_text
from shardwise.data.labels import make_labels
from shardwise.data.loader_checks import refuse_no_dataset
from shardwise.data.sft.dataset import SFTDataset
from shardwise.data.stream import first_of, is_stream
from shardwise.data.token_cache import Say, TokenCache, cache_of
from shardwise.errors import ConfigError
from shardwise.run.config import Data, RunConfig
from shardwise.run.vocabulary import vocabulary_of

_TOPICS = "Python's help topics"
_SENTENCE = re.compile(r"(?<=[.\n] )[A-Z][a-z]+(?:\s[a-z]+){7}(?=\s)")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run: datasets for training and validation, how their samples are put together (None: stacked), the
    training text if the tokens are bytes, and what is to be told of the records and of where tokens are kept."""

    name: str
    train: Any
    val: Any
    text: str | None
    collate: Callable[[list[Any]], Mapping[str, Tensor]] | None = None
    report: str = ""
    kept: str = ""

    def example(self) -> Mapping[str, Tensor]:
        """A micro-batch of two samples, as a step gets it."""
        is_numbered = not is_stream(self.train)
        samples = [self.train[i] for i in range(min(2, len(self.train)))] if is_numbered else first_of(self.train, 2)
        return make_labels((self.collate or default_collate)(samples))

    @property
    def records(self) -> SFTDataset | None:
        """The records of fine-tuning that the model is tried on: those to validate, if there are some; None: other data."""
        found = self.train if self.val is None else self.val
        return found if isinstance(found, SFTDataset) else None

    @property
    def num_samples(self) -> tuple[int | None, int]:
        """Samples to train on (None: a stream does not say) and to validate."""
        sizes = [len(part) if hasattr(part, "__len__") else None for part in (self.train, self.val)]
        return sizes[0], sizes[1] or 0


def prompt_of(corpus: RunData) -> str:
    """A prompt: the first eight words of a sentence in the validation text; if it has none, its first words, about 40
    bytes."""
    source: Any = corpus.val or corpus.train
    text = bytes(source.tokens[: 1 << 16]).decode(errors="ignore")
    if match := _SENTENCE.search(text):
        return " ".join(match.group().split()) + " "
    words = text[:400].split()[1:] or ["The"]  # the text may begin in the middle of a word
    taken: list[str] = []
    while words and sum(map(len, taken)) < 32:
        taken.append(words.pop(0))
    return " ".join(taken) + " "


def open_data(data: Data, *, vocab: int | None, tokenizer: Any = None, say: Say = lambda kind, text: None) -> RunData:
    """Opens the data a config names and splits it into training and validation.

    Args:
        vocab: size of the model's vocabulary; None if it is not known.
        tokenizer: of transformers, where it is not as in its file: :func:`~shardwise.run.vocabulary.vocabulary_of`.
        say: called as ``say(kind, text)``: "trouble", tokens cannot be kept, or were damaged; "phase", whom this process
            waits for to make them; "progress", how far it is.
    """
    if data.build is not None:
        return _own(data, data.build)
    file = tokenizer_path(data.tokenizer)
    cache = None if file is None else cache_of(data.cache, say)
    whole = _open(data, data.path, file, tokenizer, vocab, cache)
    parts: tuple[Any, Any] = (whole, None)
    if data.val_path is not None:
        parts = whole, _open(data, data.val_path, file, tokenizer, vocab, cache)
    elif data.val_fraction > 0:
        parts = whole.split(data.val_fraction)
    kept = "\n".join(cache.notes) if cache is not None else ""
    if isinstance(whole, SFTDataset):
        notes = whole.report.notes or (parts[1].report.notes if data.val_path is not None else [])
        report = "\n".join([str(whole.report), *notes])
        return RunData(
            name=whole.name, train=parts[0], val=parts[1], text=None, collate=whole.collate, report=report, kept=kept
        )
    is_bytes = file is None and not is_tokens(data.path)
    text = bytes(parts[0].tokens[: 1 << 24]).decode(errors="replace") if is_bytes else None
    return RunData(name=whole.name, train=parts[0], val=parts[1], text=text, kept=kept)


def _own(data: Data, build: str) -> RunData:
    """The datasets that a function of the user returns: one, or one to train on and one to validate."""
    made = called(load_target(build, what="data.build"), data.args, f"data.args={data.args} for {build}")
    train, val = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if train is None:
        raise ConfigError(
            f"data.build={build!r}",
            why="it returned None, and a dataset has len() and [i], or is iterable",
            fix="end the function with a return: of a dataset, or of a pair of one to train on and one to validate",
        )
    for part in (train, val):
        refuse_no_dataset(part, f"data.build={build!r}")
        is_numbered = hasattr(part, "__getitem__") and hasattr(part, "__len__")
        if part is not None and not (is_numbered or is_stream(part)):
            raise ConfigError(
                f"data.build={build!r}",
                why=f"it returned {type(part).__name__}, and a dataset has len() and [i], or is iterable",
                fix="return a dataset, or a pair of one to train on and one to validate",
            )
    for part, what in ((train, "to train on"), (val, "to validate")):
        if part is not None and not is_stream(part) and not len(part):
            raise ConfigError(
                f"data.build={build!r}: a dataset of 0 samples {what}",
                why="there is nothing to make a micro-batch of",
                fix="look at the files and filters that it is made of"
                + ("; to validate nothing return the other dataset alone, with data.val_fraction=0" * (part is val)),
            )
    if val is None and data.val_fraction > 0 and not is_stream(train):
        cut = len(train) - max(1, round(data.val_fraction * len(train)))
        if cut < 1:
            raise ConfigError(
                f"data.build={build!r}: a dataset of {len(train)} samples",
                why=f"with data.val_fraction={data.val_fraction} none would be left to train on",
                fix="give more samples, or data.val_fraction=0",
            )
        train, val = Subset(train, range(cut)), Subset(train, range(cut, len(train)))
    return RunData(name=build, train=train, val=val, text=None)


def _open(
    data: Data, path: str | None, file: Path | None, tokenizer: Any, vocab: int | None, cache: TokenCache | None
) -> Any:
    """A :class:`TokenWindows`, or a :class:`SFTDataset`."""
    if data.has_records and path is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(line|row) \d+ of ")  # notes of its report, which the screen shows once
            records = SFTDataset(
                path, tokenizer or str(file), seq_len=data.seq_len, pack=data.pack, unusable=data.unusable, cache=cache
            )
        if vocab is not None:
            records.limit(vocab)
        return records
    if file is not None:
        name, content = f"{path or _TOPICS}, by {file}", tokenizer and tokenizer.backend_tokenizer.to_str()
        return TokenWindows(encode(path, file, cache, content), data.seq_len, vocab=vocab, name=name)
    if path is None:
        return TokenWindows.from_text(pydoc_text(), data.seq_len, vocab=vocab, name=_TOPICS)
    return TokenFile(path, data.seq_len, dtype=data.dtype if path.endswith(".bin") else None, vocab=vocab)


def vocab_of(config: RunConfig) -> int | None:
    """Size of the vocabulary of a Hugging Face directory or of the reference model; None for a model of the user's
    own."""
    if config.model.hf is not None:
        return vocabulary_of(config).rows
    return config.model.args.get("vocab", BYTES) if config.model.build is None else None


def limit_to_model(corpus: RunData, model: nn.Module) -> None:
    """Refuses tokens outside the vocabulary of a user's model, if it states its size: by ``get_input_embeddings()`` or
    ``config.vocab_size``, as models of transformers do."""
    size = rows_of(model)
    for part in (corpus.train, corpus.val):
        if isinstance(part, TokenWindows | SFTDataset) and part.vocab is None and size is not None:
            part.limit(size)


def rows_of(model: nn.Module) -> int | None:
    """Tokens that a model has, if it states that as models of transformers do."""
    embeddings: Any = None
    if callable(getattr(model, "get_input_embeddings", None)):
        with contextlib.suppress(NotImplementedError):
            embeddings = model.get_input_embeddings()  # type: ignore[operator]
    size = getattr(embeddings, "num_embeddings", getattr(getattr(model, "config", None), "vocab_size", None))
    return size if isinstance(size, int) else None
