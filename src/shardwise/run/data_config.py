"""The section ``data`` of the configuration of ``shardwise train``: what is read, how it becomes samples, and how these are grouped.
Torch-free."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.limits import BelowOne, Count, Positive
from shardwise.config.record import Options, default_of, doc
from shardwise.config.target import check_build
from shardwise.config.tokenizer import BYTES_MEANT, is_tokens
from shardwise.data.sft.records import is_records
from shardwise.data.sft.saved import training_split
from shardwise.errors import ConfigError

MICRO_BATCH = 8  # of a run that says neither data.micro_batch nor data.micro_tokens


class Data(Options, frozen=True, kw_only=True):
    """Section ``data``: the training data, sequence length and batch sizes."""

    needless_with_build: ClassVar[tuple[str, ...]] = (
        "path", "val_path", "tokenizer", "dtype", "seq_len", "pack", "unusable", "chat_template", "eos_token", "cache",
    )  # fmt: skip

    path: Annotated[
        str | None,
        doc(
            "a text file, .npy or .bin of tokens, or records for fine-tuning (text; prompt and completion; messages) as .jsonl, .parquet or the "
            "directory that save_to_disk of Hugging Face datasets has written; null: Python's help topics"
        ),
    ] = None
    build: Annotated[
        str | None, doc("pkg.mod:fn, which returns a dataset, or two: to train on, to validate; null: path is read")
    ] = None
    args: Annotated[dict[str, Any], doc("keyword arguments of build")] = msgspec.field(default_factory=dict)
    val_path: Annotated[
        str | None, doc("validation data of that kind; null: the split validation of path, else val_fraction of it")
    ] = None
    tokenizer: Annotated[
        str | None,
        doc(
            "how a text becomes tokens. bytes: each byte is one; hf: by the tokenizer.json in the directory model.hf; the path of another "
            "directory: by the tokenizer.json in it; null: bytes, refused for a model that has a tokenizer; for records hf"
        ),
    ] = None
    dtype: Annotated[Literal["uint8", "uint16", "uint32", "int32", "int64"], doc("dtype of the tokens in a .bin")] = (
        "uint16"
    )
    val_fraction: Annotated[BelowOne, doc("part of the tokens kept for validation, taken from the end")] = 0.1
    seq_len: Annotated[Positive, doc("tokens a sample predicts")] = 128
    global_batch: Annotated[Positive, doc("samples of one optimizer step, over all ranks")] = 16
    micro_batch: Annotated[
        Positive | None, doc("samples of one forward on one rank; null: 8, or as micro_tokens says")
    ] = None
    micro_tokens: Annotated[
        Positive | None, doc("of padded records, in place of micro_batch: positions that a forward has, with padding")
    ] = None
    pack: Annotated[
        bool, doc("of records: several of them share a sample of seq_len tokens, and none attends to another")
    ] = False
    unusable: Annotated[
        Literal["refuse", "drop"], doc("of records: one without an answer within seq_len is an error, or left out")
    ] = "refuse"
    chat_template: Annotated[
        str | None, doc("of records: a file with another chat template (Jinja), saved with the final weights too")
    ] = None
    eos_token: Annotated[
        str | None, doc("of records: another token that ends a text; saved with the final weights, for the model too")
    ] = None
    cache: Annotated[
        str | None,
        doc(
            "folder that keeps the tokens that a tokenizer makes of path, so that it reads a file once; none: keep nothing; null: "
            "$SHARDWISE_CACHE, else ~/.cache/shardwise, for files of 1 MB and more"
        ),
    ] = None
    num_workers: Annotated[Count, doc("processes of each rank that read samples ahead of training; 0: none")] = 0
    prefetch: Annotated[Positive | None, doc("micro-batches that each of them is ahead; null: 2")] = None

    def check(self) -> None:
        if self.has_records and self.build is None:
            self._settle_splits()
        if self.micro_tokens is not None:
            self._check_micro_tokens(self.micro_tokens)
        elif self.micro_batch is None:
            msgspec.structs.force_setattr(self, "micro_batch", MICRO_BATCH)
        micro = self.micro_batch
        if micro is not None and self.global_batch % micro:
            near = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            best = min(near, key=lambda n: (abs(n - micro), n))
            raise ConfigError(
                f"data.micro_batch={micro} with data.global_batch={self.global_batch}",
                why="a step is a whole number of micro-batches, so micro_batch divides global_batch",
                fix=f"use micro_batch={best}, or global_batch={-(-self.global_batch // micro) * micro}",
            )
        if self.prefetch is not None and not self.num_workers:
            raise ConfigError(
                f"data.prefetch={self.prefetch} with data.num_workers=0",
                why="nothing is read ahead without workers, so it would have no effect",
                fix="give data.num_workers=2 too, or remove data.prefetch",
            )
        self._check_build()
        for key in ("pack", "unusable", "chat_template", "eos_token"):
            if getattr(self, key) != default_of(Data, key) and not self._may_have_records:
                raise ConfigError(
                    f"data.{key}={getattr(self, key)} with data.path={self.path!r}",
                    why="it is for records (a .jsonl, a saved dataset), which a tokenizer reads, so it would have no effect",
                    fix=f"name such data, or remove data.{key}",
                )
        if self.val_path is not None:
            self._check_val_path(self.val_path)
        if self.cache is not None and self.build is None:
            self._check_cache(self.cache)
        if self.tokenizer is not None and is_tokens(self.path):
            raise ConfigError(
                f"data.tokenizer={self.tokenizer!r} with data.path={self.path!r}",
                why="the file holds tokens already, so it would have no effect",
                fix="remove data.tokenizer, or name a text file",
            )
        if self.dtype != "uint16" and not (self.path or "").endswith(".bin"):
            raise ConfigError(
                f"data.dtype={self.dtype!r} with data.path={self.path!r}",
                why="only a .bin file needs a dtype, so this would have no effect",
                fix="remove data.dtype, or name a .bin file",
            )

    def _check_micro_tokens(self, most: int) -> None:
        if self.micro_batch is not None:
            raise ConfigError(
                f"data.micro_tokens={most} with data.micro_batch={self.micro_batch}",
                why="each of them says how much one forward of a rank has",
                fix="remove one; on the command line, over a file that has it: --data.micro_batch=null or --data.micro_tokens=null",
            )
        if self.build is None and (self.pack or not self._may_have_records):
            raise ConfigError(
                f"data.micro_tokens={most} with data.path={self.path!r} and data.pack={self.pack}",
                why="all samples have seq_len positions, so that it would have no effect beyond that of micro_batch",
                fix=f"use data.micro_batch={max(1, most // self.seq_len)}; micro_tokens is for padded records (a .jsonl, a saved dataset)",
            )
        if self.build is None and most < self.seq_len:
            raise ConfigError(
                f"data.micro_tokens={most} with data.seq_len={self.seq_len}",
                why="a record of seq_len positions would not fit into a micro-batch by itself",
                fix=f"use micro_tokens={self.seq_len} or more, or a smaller seq_len",
            )

    @property
    def samples_at_least(self) -> int:
        """Samples of a micro-batch, at least: in an evaluation, whose micro-batches have equally many."""
        return self.micro_batch or max(1, (self.micro_tokens or 1) // self.seq_len)

    def _check_cache(self, cache: str) -> None:
        if not cache:
            raise ConfigError("data.cache=''", why="it names no folder", fix="give the path of a folder, or none")
        # The words of a text are its bytes where no tokenizer is named.
        is_read = not is_tokens(self.path) and (self.tokenizer not in (None, BYTES_MEANT) or self._may_have_records)
        if not is_read or self.path is None:
            raise ConfigError(
                f"data.cache={cache!r} with data.path={self.path!r} and data.tokenizer={self.tokenizer!r}",
                why="only tokens that a tokenizer makes of a file are kept, so it would have no effect",
                fix="remove data.cache, or name a tokenizer: data.tokenizer=DIRECTORY",
            )

    def _check_build(self) -> None:
        if not check_build("data", self.build, self.args):
            return
        for key in self.needless_with_build:
            if getattr(self, key) != default_of(Data, key):
                raise ConfigError(
                    f"data.{key}={getattr(self, key)!r} with data.build={self.build!r}",
                    why="the function gives the samples as they are, so it would have no effect",
                    fix=f"remove data.{key}, or pass it to the function: data.args={{{key}: ...}}",
                )

    @property
    def has_records(self) -> bool:
        """Whether ``path`` holds records for fine-tuning, read by a tokenizer."""
        return is_records(self.path) and self.tokenizer != BYTES_MEANT

    @property
    def _may_have_records(self) -> bool:
        """Also of a path that is not here: the configuration of a run is read where its data is not (``shardwise generate``), and
        ``shardwise train`` refuses the path itself."""
        is_away = self.path is not None and not is_tokens(self.path) and not Path(self.path).exists()
        return self.has_records or (is_away and self.tokenizer != BYTES_MEANT)

    def _settle_splits(self) -> None:
        """Names the splits of a ``DatasetDict`` that are read, so that all later code sees directories of one dataset each."""
        path = str(self.path)
        train, validation = training_split(path)
        if train == path:
            return
        msgspec.structs.force_setattr(self, "path", train)
        if self.val_path is not None or not validation:
            return
        names = ", ".join(Path(each).name for each in validation)
        if self.val_fraction != default_of(Data, "val_fraction"):
            raise ConfigError(
                f"data.val_fraction={self.val_fraction} with data.path={path!r}, which has the split {names}",
                why="that is the validation data, and nothing of the split train is kept for it, so it would have no effect",
                fix=f"remove data.val_fraction, or name the split to train on by itself: data.path={train}",
            )
        if len(validation) > 1:
            raise ConfigError(
                f"data.path={path!r}, which has the splits {names}",
                why="each of them is a name for validation data",
                fix=f"name one: data.val_path={validation[0]}",
            )
        msgspec.structs.force_setattr(self, "val_path", validation[0])

    def _check_val_path(self, path: str) -> None:
        if self.val_fraction != default_of(Data, "val_fraction"):
            raise ConfigError(
                f"data.val_fraction={self.val_fraction} with data.val_path={path!r}",
                why="nothing of data.path is kept for validation, so it would have no effect",
                fix="remove one of them",
            )
        kinds = [
            "records" if is_records(each) else Path(each).suffix if is_tokens(each) else "text"
            for each in (self.path or "", path)
            if not each or is_tokens(each) or Path(each).exists()  # what is not there is refused by that
        ]
        if len({*kinds}) > 1:
            raise ConfigError(
                f"data.val_path={path!r} with data.path={self.path!r}",
                why="the two are of different kinds",
                fix="give both as a text, .npy, .bin or records (.jsonl, a saved dataset)",
            )
