"""The records of a file as documents, one after the other: nothing but small integers is held of those that are done."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwise.data.sft.documents import row_of
from shardwise.data.sft.encode_record import Encoder
from shardwise.data.sft.records import Chat, Record, Text, read_records
from shardwise.data.sft.refusals import empty_answer, too_long, unusable
from shardwise.errors import ConfigError

_VERSION = 3  # of what a record becomes: a change of it makes kept tokens anew
_PLACES = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")
_NEEDED = ("tokenizers", "transformers", "jinja2")
_NAMED = 8  # keys
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
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
        unread: key of records (or "key of messages") -> records with it, which nothing reads.
        roles: role of messages, not one of those that chat templates have in common -> messages with it, which are context.
        notes: of answers that do not end with a special token, or whose marks leave it out, or whose header is trained on.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    truncated: int = 0
    inside: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        notes = [f"{self.truncated:,} truncated"] if self.truncated else []
        notes += [f"{num:,} dropped: {why}" for why, num in self.dropped.items()]
        notes += (
            [f"{self.inside:,} answer{'s begin' if self.inside > 1 else ' begins'} inside a token"]
            if self.inside
            else []
        )
        if self.unread:
            notes.append(f"keys that are not read: {_counted(self.unread)}")
        if self.roles:
            notes.append(f"messages that are context, since an answer has the role assistant: {_counted(self.roles)}")
        told = f"{self.records:,} records, {self.tokens:,} tokens, {self.trained:,} of them trained on"
        return "; ".join([told, *notes])


def _counted(nums: Mapping[str, int]) -> str:
    names = [f"{name} ({num:,})" for name, num in nums.items()]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


@dataclass(frozen=True)
class Encoding:
    """How the records of a file become documents.

    Attributes:
        encoder: of the tokenizer.
        path: of the records.
        seq_len: positions of a document, at most.
        unusable: what happens to a record of which nothing would be trained on.
    """

    encoder: Encoder
    path: str | Path
    seq_len: int
    unusable: Unusable

    def inputs(self) -> dict[str, Any]:
        """What the documents depend on besides the content of the file, as JSON has it. Not packing, which is computed from the
        lengths of documents, and which validation records change."""
        tokenizer = self.encoder.tokenizer
        template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
        settings = {
            key: str(value) for key, value in getattr(tokenizer, "init_kwargs", {}).items() if key not in _PLACES
        }
        backend = getattr(tokenizer, "backend_tokenizer", None)
        known = [type(tokenizer).__name__, backend and backend.to_str(), template, settings, self._special()]
        return {
            "kind": "records",
            "version": _VERSION,
            "tokenizer": hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest(),
            "seq_len": self.seq_len,
            "unusable": self.unusable,
            "libraries": {name: _version(name) for name in _NEEDED},
            "order": sys.byteorder,
            # A template that writes the date makes other tokens every day.
            "day": str(datetime.datetime.now().astimezone().date()) if "strftime_now" in template else None,
        }

    def _special(self) -> dict[str, int | None]:
        names = ("bos", "eos")
        return {name: getattr(self.encoder.tokenizer, f"{name}_token_id", None) for name in names}

    def produce(self, add: Callable[..., object]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Calls ``add`` with each document, and the share of the file up to it; returns the arrays and facts of
        :class:`~shardwise.data.sft.documents.Documents`.

        Raises:
            ConfigError: a line that is no record, or cannot be used, with the number of its line; none can be used.
        """
        report, dropped, unread, worst = SFTReport(), Counter[str](), Counter[str](), 0
        roles = Counter[str]()
        lines, ends = array("q"), array("q", [0])
        self.encoder.begin()
        share: float | None = None

        def read(now: float) -> None:
            nonlocal share
            share = now

        for record in read_records(self.path, read=read):
            report.records += 1
            empty = empty_answer(record)
            self.encoder.unread = []
            encoded = ([], []) if empty else self.encoder.encode(record)
            unread.update([*record.others, *(f"{name} of messages" for name in self.encoder.unread)])
            ids, trained = np.asarray(encoded[0], dtype=np.int32), np.asarray(encoded[1], dtype=bool)
            why = empty or self._problem(record, ids, trained)
            if isinstance(record, Chat):
                trains = {*record.answers, *(range(record.num_given, len(record.messages)) if record.num_given else ())}
                others = (m["role"] for i, m in enumerate(record.messages) if i not in trains)
                roles.update(role for role in others if role not in _ROLES)
            if why:
                if self.unusable == "refuse":
                    raise unusable(self.path, record.line, why)
                dropped[why] += 1
                continue
            row = row_of(ids[: self.seq_len + 1], trained[: self.seq_len + 1])
            report.truncated += len(ids) > self.seq_len + 1
            report.tokens += len(row) - 1
            report.trained += int((row[1:] < 0).sum())
            used = row if row[-1] < 0 else row[:-1]
            worst = max(worst, int(used.max()), int((~used).max()))
            lines.append(record.line)
            ends.append(ends[-1] + len(row))
            add(row, share)
        report.dropped, report.inside = dict(dropped), self.encoder.num_inside
        report.unread, report.roles, report.notes = dict(unread), dict(roles), [*self.encoder.notes.values()]
        if not lines:
            raise ConfigError(
                f"data file {str(self.path)!r}",
                why=f"none of its records can be used: {report}",
                fix="write answers that are not empty, or give a larger seq_len",
            )
        # The number of samples depends on packing.
        told = {key: value for key, value in dataclasses.asdict(report).items() if key != "samples"}
        return {"ends": np.array(ends), "lines": np.array(lines)}, {"worst": worst, "report": told}

    def _problem(self, record: Record, ids: np.ndarray, trained: np.ndarray) -> str:
        """Why nothing of a record would be trained on, or nothing but ends; "" if something is."""
        targets, end = ids[1:][trained[1:]], self.encoder.tokenizer.eos_token_id
        if len(targets) and not isinstance(record, Text) and end is not None and (targets == end).all():
            if trained[0]:
                return "it has no prompt, and its answer is one token: nothing predicts the first of a sample"
            return "all of an answer is inside a token that begins in its prompt"
        if trained[1 : self.seq_len + 1].any():
            return ""
        if trained[1:].any():
            return too_long(self.seq_len)
        return "it has no answer" if len(ids) > 1 else "it has less than two tokens"


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
