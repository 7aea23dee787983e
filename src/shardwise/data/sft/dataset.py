"""The dataset of fine-tuning: samples of tokens and labels from a JSONL file, padded or packed."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.config.tokenizer import tokenizer_path
from shardwise.data.batch import IGNORED, default_collate
from shardwise.data.padding import pad_collate
from shardwise.data.sft.encode import Encoded, Encoder, load_tokenizer
from shardwise.data.sft.packing import check_attention, packs
from shardwise.data.sft.records import Record, Text, read_records
from shardwise.data.sft.refusals import beyond_vocabulary, empty_answer, too_long, unusable
from shardwise.errors import ConfigError
from shardwise.model.calling import call

__all__ = ["SFTDataset", "SFTReport"]

_FIRST = 8  # tokens of a text from which it is continued, to try a model
Unusable = Literal["refuse", "drop"]


@dataclass
class SFTReport:
    """What a file has become.

    Attributes:
        records: records of the file.
        samples: samples of the dataset; with packing fewer than documents.
        tokens: tokens that the model is given, without padding.
        trained: of these, tokens that are predicted and count in the loss.
        truncated: records that were longer than the context: what is beyond it was cut off.
        inside: answers that began inside a token, which is not trained on.
        dropped: why -> records that were left out.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    truncated: int = 0
    inside: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        notes = [f"{self.truncated:,} truncated"] if self.truncated else []
        notes += [f"{num:,} dropped: {why}" for why, num in self.dropped.items()]
        notes += [f"{self.inside:,} answers begin inside a token"] if self.inside else []
        told = f"{self.records:,} records, {self.tokens:,} tokens, {self.trained:,} of them trained on"
        return "; ".join([told, *notes])


class SFTDataset:
    """Samples for supervised fine-tuning from a JSONL file of texts, prompts with completions, or conversations.

    ``[i]`` is ``{"input_ids": int64 [n], "labels": int64 [n]}`` with n at most ``seq_len``: ``labels[t]`` is the token after
    ``input_ids[t]`` where that belongs to an answer, and -100 elsewhere, so that they are aligned with the logits. With
    ``pack`` a sample has several documents and n is ``seq_len``: ``position_ids`` begin anew with each, by which models of
    transformers keep their attention within a document (:meth:`check_attention`), and the rest is padded.

    Give :attr:`collate` to the :class:`~shardwise.Loader`: it pads samples of unequal length.

    Args:
        path: a JSON object in each line, with ``text``, or ``prompt`` and ``completion``, or ``messages``.
        tokenizer: a fast tokenizer of transformers; or a directory with a ``tokenizer.json``, or that file.
        seq_len: positions of a sample, at most. What is beyond them is cut off, and counted.
        pack: put documents together in samples of ``seq_len`` positions.
        unusable: what happens to a record without an answer: one that is empty, or does not begin within ``seq_len``.
            "refuse" it, or "drop" it, and count it.

    Attributes:
        report: what the file has become, a :class:`SFTReport`.
        collate: list of samples -> mapping of tensors.

    Raises:
        ConfigError: a record that is none, or cannot be used, with the number of its line; no chat template, or one that does
            not show what the answers are; a file without a record that can be used.

    Example::

        data = sw.SFTDataset("chat.jsonl", "model", seq_len=512)
        loader = sw.Loader(data, world, global_batch=32, micro_batch=4, collate=data.collate)
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        seq_len: int,
        pack: bool = False,
        unusable: Unusable = "refuse",
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
        self.path, self.seq_len, self.pack, self.name = path, seq_len, pack, str(path)
        self.vocab: int | None = None
        self._unusable, self._encoder = unusable, Encoder(tokenizer, path)
        self.pad_id = next(
            (i for i in (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos")) if i is not None), 0
        )
        self.report = SFTReport()
        self._lines: list[int] = []
        self.documents = [*self._documents(read_records(path))]
        if not self.documents:
            raise ConfigError(
                f"data file {str(path)!r}",
                why=f"none of its records can be used: {self.report}",
                fix="write answers that are not empty, or give a larger seq_len",
            )
        self.packs = self._packs()
        self.report.samples, self.report.inside = len(self.packs), self._encoder.num_inside
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

    def check_attention(self, model: nn.Module, forward: Callable[..., Any] = call) -> None:
        """Runs the model on two documents in one sample, to see that neither attends to the other. All ranks must call it,
        before training on packed samples.

        Args:
            model: from ``parallelize``, or a plain one.
            forward: how training calls it: ``forward(model, batch)``.

        Raises:
            ConfigError: one does.
        """
        check_attention(model, forward)

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
        part.documents, part._lines = self.documents[numbers], self._lines[numbers]
        part.packs = part._packs()
        return part

    def _packs(self) -> list[list[int]]:
        lengths = [len(labels) for _, labels in self.documents]
        return packs(lengths, self.seq_len) if self.pack else [[i] for i in range(len(lengths))]

    def limit(self, vocab: int) -> None:
        """Sets the size of the model's vocabulary, once it is known.

        Raises:
            ConfigError: a token is outside of it.
        """
        self.vocab = vocab
        for line, (ids, labels) in zip(self._lines, self.documents, strict=True):
            worst = int(max(ids.max(), labels.max()))
            if worst >= vocab:
                raise beyond_vocabulary(
                    self.path,
                    line,
                    token=worst,
                    text=self._encoder.tokenizer.convert_ids_to_tokens(worst),
                    vocab=vocab,
                    num_known=len(self._encoder.tokenizer),
                )

    def _documents(self, records: Iterable[Record]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Inputs and labels of each record that can be used, int32 [n]."""
        dropped: Counter[str] = Counter()
        for record in records:
            self.report.records += 1
            empty = empty_answer(record)
            ids, trained = ([], []) if empty else self._encoder.encode(record)
            why = empty or self._problem(record, ids, trained)
            if why:
                self._refuse(record, why)
                dropped[why] += 1
                continue
            self._lines.append(record.line)
            yield self._document((ids, trained))
        self.report.dropped = dict(dropped)

    def _document(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        self.report.truncated += len(encoded[0]) > self.seq_len + 1
        ids, trained = (
            np.asarray(row[: self.seq_len + 1], dtype=kind) for row, kind in zip(encoded, (np.int32, bool), strict=True)
        )
        labels = np.where(trained[1:], ids[1:], IGNORED).astype(np.int32)
        self.report.tokens += len(labels)
        self.report.trained += int(trained[1:].sum())
        return ids[:-1], labels

    def _problem(self, record: Record, ids: list[int], trained: list[bool]) -> str:
        """Why nothing of a record would be trained on, or nothing but ends; "" if something is."""
        targets = [i for i, flag in zip(ids[1:], trained[1:], strict=True) if flag]
        if targets and not isinstance(record, Text) and set(targets) == {self.end}:
            return "all of an answer is inside a token that begins in its prompt"
        if any(trained[1 : self.seq_len + 1]):
            return ""
        if any(trained[1:]):
            return too_long(self.seq_len)
        return "it has no answer" if len(ids) > 1 else "it has less than two tokens"

    def _refuse(self, record: Record, why: str) -> None:
        if self._unusable == "refuse":
            raise unusable(self.path, record.line, why)
