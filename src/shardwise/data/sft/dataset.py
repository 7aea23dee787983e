"""The dataset of fine-tuning: samples of tokens and labels from a JSONL file or a saved dataset, padded or packed."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.config.keywords import public_call
from shardwise.config.tokenizer import tokenizer_path
from shardwise.data.batch import IGNORED, default_collate, pad_collate
from shardwise.data.sft.documents import Documents
from shardwise.data.sft.encode_file import Encoding, SFTReport, Unusable
from shardwise.data.sft.encode_record import Encoder, load_tokenizer
from shardwise.data.sft.packing import Packs, check_attention, packs
from shardwise.data.sft.refusals import beyond_vocabulary
from shardwise.data.sft.saved import training_split
from shardwise.data.token_cache import TokenCache
from shardwise.data.token_store import in_memory
from shardwise.errors import ConfigError
from shardwise.model.calling import call

_FIRST = 8  # tokens of a text from which it is continued, to try a model


class SFTDataset:
    """Samples for supervised fine-tuning from texts, prompts with completions, or conversations, in a JSONL file or a dataset of
    Hugging Face that was saved.

    ``[i]`` is ``{"input_ids": int64 [n], "labels": int64 [n]}`` with n at most ``seq_len``: ``labels[t]`` is the token after
    ``input_ids[t]`` where that belongs to an answer, and -100 elsewhere, so that they are aligned with the logits. With
    ``pack`` a sample has several documents and n is ``seq_len``: ``position_ids`` begin anew with each, by which models of
    transformers keep their attention within a document (:meth:`check_attention`), and the rest is padded.

    Keys of other formats that change what is trained on (``weight`` of a message) are honoured or refused; others are counted in
    the report. Special tokens that end an answer are trained on, whatever the marks of the chat template leave out.

    Give :attr:`collate` to the :class:`~shardwise.Loader`: it pads samples of unequal length.

    Args:
        path: a file with a JSON object in each line, with ``text``, or ``prompt`` and ``completion``, or ``messages``; a ``.parquet``
            with these columns; or a directory that ``save_to_disk`` of ``datasets`` has written. Of a ``DatasetDict`` the split
            ``train`` is read; another is named by its folder: ``"DIRECTORY/validation"``.
        tokenizer: a fast tokenizer of transformers; or a directory with a ``tokenizer.json``, or that file.
        seq_len: positions of a sample, at most. What is beyond them is cut off, and counted.
        pack: put documents together in samples of ``seq_len`` positions.
        unusable: what happens to a record without an answer: one that is empty, or does not begin within ``seq_len``.
            "refuse" it, or "drop" it, and count it.
        cache: a folder that keeps the tokens, so that they are made once for a file, a tokenizer and a ``seq_len``, by one of the
            processes that need them, and are mapped into memory; None: they are made in memory.

    Attributes:
        report: what the file has become, a :class:`SFTReport`.
        collate: list of samples -> mapping of tensors.

    Raises:
        ConfigError: a line that is no record, or cannot be used, with the number of its line, or of its row, counted from 0;
            no chat template, or one that does not show what the answers are; data without a record that can be used; a key that would change what is trained on.

    Example::

        data = sw.SFTDataset("chat.jsonl", "model", seq_len=512)
        loader = sw.Loader(data, world, global_batch=32, micro_batch=4, collate=data.collate)
    """

    @public_call()
    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        seq_len: int,
        pack: bool = False,
        unusable: Unusable = "refuse",
        cache: str | Path | TokenCache | None = None,
    ):
        if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
            raise ConfigError(
                f"seq_len={seq_len!r}", why="it counts the positions of a sample", fix="give seq_len >= 1"
            )
        if unusable not in ("refuse", "drop"):
            raise ConfigError(f"unusable={unusable!r}", why="there is no such choice", fix='use "refuse" or "drop"')
        if isinstance(tokenizer, str | Path):
            file = tokenizer_path(str(tokenizer))
            if file is None:
                raise ConfigError(
                    f"tokenizer={tokenizer!r} for {str(path)!r}",
                    why="records become tokens by the tokenizer of a model, which knows their special tokens",
                    fix="give a directory with a tokenizer.json",
                )
            tokenizer = load_tokenizer(file)
        if Path(path).is_dir():
            path, _ = training_split(path)
        self.path, self.seq_len, self.pack, self.name = path, seq_len, pack, str(path)
        self.vocab: int | None = None
        self._unusable: Unusable = unusable
        self._encoder = Encoder(tokenizer, path)
        self.pad_id = next(
            (i for i in (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos")) if i is not None), 0
        )
        self.documents = self._encoded(TokenCache(Path(cache)) if isinstance(cache, str | Path) else cache)
        self.packs = self._packs()
        self.report = SFTReport(**self.documents.facts["report"], samples=len(self.packs))
        for note in self.report.notes:
            warnings.warn(note, stacklevel=level_of_caller())
        self.content_digest = self.documents.digest()
        self.collate: Callable[[list[Any]], Mapping[str, Tensor]] = (
            default_collate if pack else pad_collate(input_ids=self.pad_id)
        )

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self.packs):
            raise IndexError(f"sample {index} of {len(self.packs)} of {self.name}")
        parts = [self.documents[i] for i in self.packs[index]]
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in parts]).astype(np.int64))
        labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]).astype(np.int64))
        if not self.pack:
            return {"input_ids": ids, "labels": labels}
        places = torch.cat([torch.arange(len(ids)) for ids, _ in parts])
        rest = self.seq_len - len(ids)
        return {
            "input_ids": torch.nn.functional.pad(ids, (0, rest), value=self.pad_id),
            "labels": torch.nn.functional.pad(labels, (0, rest), value=IGNORED),
            # Zeros: each position of the padding is a document of its own.
            "position_ids": torch.nn.functional.pad(places, (0, rest)),
        }

    def check_attention(self, model: nn.Module, forward: Callable[..., Any] = call, *, micro_batch: int = 2) -> None:
        """Runs the model on samples of two documents, to see that neither attends to the other. All ranks must call it,
        before training on packed samples.

        Args:
            model: from ``parallelize``, or a plain one.
            forward: how training calls it: ``forward(model, batch)``.
            micro_batch: samples of a micro-batch, as of the :class:`~shardwise.Loader`: there are models for which one sample is
                right and two are not (flash attention).

        Raises:
            ConfigError: one does.
        """
        check_attention(model, forward, micro_batch)

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each sample, without padding to others; by them ``Loader(micro_tokens=)`` puts samples together."""
        return np.full(len(self), self.seq_len) if self.pack else self.documents.lengths

    def question(self) -> tuple[list[int], str, str]:
        """A prompt to try the model on: the first document up to its last answer, as tokens and as text; and that answer."""
        ids, labels = (row.tolist() for row in self.documents[0])
        last = max(t for t, label in enumerate(labels) if label != IGNORED)
        first = next((t + 1 for t in range(last, -1, -1) if labels[t] == IGNORED), 0)
        prompt = ids[: max(first, min(_FIRST - 1, last)) + 1]
        return prompt, self.decode(prompt), self.decode(labels[len(prompt) - 1 : last + 1])

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        return self._encoder.tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def end(self) -> int | None:
        """The token that ends a sequence."""
        return self._encoder.tokenizer.eos_token_id

    def split(self, val_fraction: float) -> "tuple[SFTDataset, SFTDataset]":
        """Splits by position: the last ``val_fraction`` of the records is for validation.

        Raises:
            ConfigError: there are not two records.
        """
        cut = len(self.documents) - max(1, round(val_fraction * len(self.documents)))
        if cut < 1:
            raise ConfigError(
                f"{self.name} with {len(self.documents)} records, of which {val_fraction:g} are for validation",
                why="none would be left to train on",
                fix="give more records, or validation records of their own (data.val_path), or none (data.val_fraction=0)",
            )
        return self._part(slice(cut), "training part"), self._part(slice(cut, None), "validation part")

    def _part(self, numbers: slice, name: str) -> "SFTDataset":
        part = copy.copy(self)
        part.name = f"{self.name} ({name})"
        part.documents = self.documents.part(numbers)
        part.packs, part.content_digest = part._packs(), part.documents.digest()
        return part

    def _packs(self) -> Packs:
        return packs(self.documents.lengths, self.seq_len) if self.pack else Packs.single(len(self.documents))

    def limit(self, vocab: int) -> None:
        """Sets the size of the model's vocabulary, once it is known.

        Raises:
            ConfigError: a token is outside of it.
        """
        self.vocab = vocab
        if self.documents.facts["worst"] < vocab:  # of the whole file: its tokens need not be read
            return
        for line, (ids, labels) in zip(self.documents.lines, self.documents, strict=True):
            worst = int(max(ids.max(), labels.max()))
            if worst >= vocab:
                raise beyond_vocabulary(
                    self.path,
                    int(line),
                    token=worst,
                    text=self._encoder.tokenizer.convert_ids_to_tokens(worst),
                    vocab=vocab,
                    num_known=len(self._encoder.tokenizer),
                )

    def _encoded(self, cache: TokenCache | None) -> Documents:
        encoding = Encoding(self._encoder, self.path, self.seq_len, self._unusable)
        if cache is None:
            return Documents.of(in_memory(encoding.produce, np.int32))
        return Documents.of(cache.tokens(self.path, encoding.inputs(), encoding.produce, np.int32))
