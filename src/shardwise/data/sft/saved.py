"""Records in a directory that ``save_to_disk`` of Hugging Face ``datasets`` has written, or in a Parquet file: rows, one after the
other. Torch-free: launchers use it too.

Such a directory has its rows in Arrow files, in the order that ``state.json`` lists, already selected and shuffled. They are read by
pyarrow, which ``datasets`` brings along: it maps them into memory and takes a tenth of the time to import. A ``DatasetDict`` is
a directory of such directories, one for each split.
"""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.config.tokenizer import read_json
from shardwise.data.sft.keys import RECORD_KEYS
from shardwise.errors import ConfigError, first_line

COLUMNS = ("text", "messages", "prompt", "completion", "tools")
VALIDATION = ("validation", "valid", "val", "dev")
"""Names of a split that is validation data; those that ``datasets`` itself gives to files of these names."""

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_AT_ONCE = 64  # rows that are Python objects at a time
_SAVE = "datasets.load_dataset(...).save_to_disk(FOLDER)"
_OF_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti")


def is_table(path: str | Path) -> bool:
    """Whether a data file is a table of its own, by its ending."""
    return str(path).endswith(".parquet")


def is_rows(path: str | Path) -> bool:
    """Whether records are rows of such a directory or file, not lines."""
    return is_table(path) or Path(path).is_dir()


def hub_advice(path: str | Path) -> str:
    """What to do with a path that is not there and may be the name of a dataset of the Hugging Face Hub, to be added to a fix."""
    end = Path(path).suffix[1:]
    if not _OF_THE_HUB.fullmatch(str(path)) or (end and not end.isdigit()):
        return ""
    return (
        "; nothing is downloaded: a dataset of the Hugging Face Hub is saved first, in Python: "
        f"datasets.load_dataset({str(path)!r}).save_to_disk('FOLDER'), and its FOLDER given"
    )


# ---- splits ----------------------------------------------------------------------------------------------------------


def splits_of(path: str | Path) -> list[str]:
    """The splits of a ``DatasetDict``; empty: it is something else."""
    found = read_json(Path(path) / _SPLITS).get("splits")
    return [str(name) for name in found] if isinstance(found, list) else []


def training_split(path: str | Path) -> tuple[str, list[str]]:
    """The directory to train on, and those to validate on, of a ``DatasetDict``; of anything else ``path``, and none.

    Raises:
        ConfigError: it has no split ``train``.
    """
    splits = splits_of(path)
    if not splits:
        return str(path), []
    if "train" not in splits:
        raise _no_train(path, splits)
    return str(Path(path) / "train"), [str(Path(path) / name) for name in VALIDATION if name in splits]


def _no_train(path: str | Path, splits: list[str]) -> ConfigError:
    train = next((name for name in splits if name.startswith("train")), splits[0])
    pairs = [f"{name}{train.removeprefix('train')}" for name in (*VALIDATION, "test")]
    val = next((name for name in pairs if name in splits and name != train), None)
    return ConfigError(
        f"{str(path)!r}: a DatasetDict with the splits {', '.join(splits)}",
        why="none of them is named train, and nothing says which is trained on",
        fix=f"name it by its folder: --data.path={Path(path) / train}"
        + (f" --data.val_path={Path(path) / val}" if val else ""),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of a directory or of a Parquet file, which are read as they are needed.

    Attributes:
        path: as given, for messages.
        files: with the rows, in this order.
        shown: the columns that the dataset shows (``set_format``); None: all.
    """

    path: str
    files: tuple[Path, ...]
    shown: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The columns of records of each row, as JSON has them: without what is null, which Arrow writes where a row, or a
        message of it, lacks a field that another has. A column that is not read has None.

        Raises:
            ConfigError: pyarrow is missing or cannot read a file, or there is no column of records.
        """
        pa = _pyarrow(self.path)
        try:
            for file in self.files:
                for batch, others in self._batches(file):
                    kinds = {field.name: field.type for field in batch.schema}
                    for start in range(0, batch.num_rows, _AT_ONCE):
                        for row in batch.slice(start, _AT_ONCE).to_pylist():
                            known = {
                                key: _plain(value, kinds[key], pa) for key, value in row.items() if value is not None
                            }
                            yield known | dict.fromkeys(others)
        except FileNotFoundError as error:
            raise ConfigError(
                f"data file {self.path!r}",
                why=f"there is no such file (relative to {Path.cwd()})",
                fix="give the path of a file of records, or of a saved dataset",
            ) from error
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            raise ConfigError(
                f"data file {self.path!r}",
                why=f"it cannot be read: {first_line(error)}",
                fix=f"write it again: {_SAVE}",
            ) from error

    def _batches(self, file: Path) -> Iterator[tuple[Any, list[str]]]:
        """Rows of a file, with the columns that are read, and the names of the others."""
        import pyarrow as pa

        if is_table(file):
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(file, memory_map=True) as table:
                columns, others = self._columns(table.schema_arrow)
                # Without threads of its own, as worker processes may be forked later.
                for batch in table.iter_batches(_AT_ONCE, columns=columns, use_threads=False):
                    yield batch, others
            return
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            columns, others = self._columns(stream.schema)
            for batch in stream:
                yield batch.select(columns), others

    def _columns(self, schema: Any) -> tuple[list[str], list[str]]:
        """The columns that are read, if only to refuse them, and the others. Raises ConfigError where they are none of records."""
        import pyarrow as pa

        shown = [name for name in schema.names if self.shown is None or name in self.shown]
        columns = [name for name in RECORD_KEYS if name in shown]
        if not {"text", "messages", "prompt"} & {*columns}:
            raise self._no_records(shown)
        for name in [name for name in COLUMNS if name in shown]:
            kind = schema.field(name).type
            if not (pa.types.is_nested(kind) or pa.types.is_null(kind) or _is_text(kind, pa)):
                raise ConfigError(
                    f"{self.path!r}: its column {name} is of type {kind}",
                    why="records are texts, or lists of messages",
                    fix=f"make it one with datasets, and save it again: load_from_disk({self.path!r}).map(...).save_to_disk(FOLDER)",
                )
        media = [name for name, kind in _features(schema).items() if name in shown and kind in _MEDIA]
        if media:
            raise ConfigError(
                f"{self.path!r}: its columns {', '.join(media)} are pictures, sound or other media",
                why="only texts are read, and the records belong to them",
                fix="give such samples by a function of yours (data.build), or, if the texts are meant: "
                f"load_from_disk({self.path!r}).remove_columns({media}).save_to_disk(FOLDER)",
            )
        return columns, [name for name in shown if name not in columns]

    def _no_records(self, shown: list[str]) -> ConfigError:
        fix = "make them with datasets, and save it again: load_from_disk(...).map(...) or .rename_column(...), then .save_to_disk(FOLDER)"
        why = "the columns are text, or prompt and completion, or messages"
        if "input_ids" in shown:
            why = f"it holds tokens already, and {why}, which become tokens by data.tokenizer"
            fix = (
                "give the texts; or these samples by a function that returns them, --data.build=FILE.py:FUNCTION: "
                f"datasets.load_from_disk({self.path!r}).with_format('torch')"
            )
        return ConfigError(
            f"{self.path!r}: a dataset with the columns {', '.join(shown) or '(none)'}", why=why, fix=fix
        )


def open_rows(path: str | Path) -> Rows:
    """The rows of a directory that ``save_to_disk`` has written, or of a Parquet file; nothing of them is read.

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(path)
    if not folder.is_dir():
        return Rows(str(path), (folder,))
    splits, state = splits_of(folder), read_json(folder / _STATE)
    if splits:
        raise ConfigError(
            f"{str(path)!r}: a DatasetDict with the splits {', '.join(splits)}",
            why="one split is read here",
            fix=f"name it by its folder, such as {folder / next((name for name in VALIDATION if name in splits), splits[0])}",
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) and "filename" in each for each in listed):
        raise _not_saved(folder)
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{str(path)!r}: saved by an old version of datasets, with the order of its rows apart from them",
            why="versions of datasets since then ignore that order, and so would this",
            fix="save it again by the version that wrote it: load_from_disk(...).flatten_indices().save_to_disk(FOLDER)",
        )
    files = tuple(folder / str(each["filename"]) for each in listed)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{str(path)!r} without {', '.join(missing)}",
            why=f"its {_STATE} lists files that are not there",
            fix="copy the whole directory, or save it again",
        )
    columns = state.get("_format_columns")
    is_shown = isinstance(columns, list) and not state.get("_output_all_columns")
    return Rows(str(path), files, tuple(columns) if is_shown else None)


def _not_saved(folder: Path) -> ConfigError:
    """A directory that is something else, as an error that says what to do with what it has."""
    names = sorted(file.name for file in islice(folder.iterdir(), 1000) if not file.name.startswith("."))
    if any(name.startswith(("data-", "cache-")) or name.endswith(".arrow") for name in names):
        why, fix = f"it has Arrow files without a {_STATE}: it is of the cache of datasets, or incomplete", _SAVE
    elif parquet := [name for name in names if name.endswith(".parquet")]:
        why = f"it has Parquet files ({', '.join(parquet[:3])}), and nothing says which of them are trained on"
        fix = (
            f"name one of them: --data.path={folder / parquet[0]}; or save them together: datasets.load_dataset('parquet', "
            f"data_files={str(folder / '*.parquet')!r}, split='train').save_to_disk(FOLDER)"
        )
    elif lines := [name for name in names if name.endswith((".jsonl", ".ndjson"))]:
        why, fix = "records are read from one file", f"name the file: {folder / lines[0]}"
    else:
        why = "it is not one that save_to_disk of datasets has written" + (
            f" (it has {', '.join(names[:5])})" if names else ": it is empty"
        )
        fix = f"{_SAVE}; or name a .jsonl"
    return ConfigError(f"{str(folder)!r}: a directory", why=why, fix=fix)


# ---- values ----------------------------------------------------------------------------------------------------------


def _plain(value: Any, kind: Any, pa: Any) -> Any:
    """A value of an Arrow type as JSON has it. What ``datasets`` stores as JSON, its type ``Json``, has its own nulls."""
    if _is_json(kind, pa):
        return None if value is None else json.loads(value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {key: _plain(inner, kind.field(key).type, pa) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_plain(inner, kind.value_type, pa) for inner in value]
    return value


def _is_text(kind: Any, pa: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or _is_json(kind, pa)


def _is_json(kind: Any, pa: Any) -> bool:
    return isinstance(kind, getattr(pa, "JsonType", ()))  # not in an old pyarrow


def _features(schema: Any) -> dict[str, str]:
    """Column -> kind of feature, as ``datasets`` notes it in its files."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: each["_type"] for name, each in found.items() if isinstance(each, dict) and "_type" in each}
    except (KeyError, TypeError, ValueError):
        return {}


def _pyarrow(path: str) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"data file {path!r}",
            why="it is read by pyarrow, a part of Hugging Face datasets, which is not installed",
            fix="pip install 'shardwise[hf]'; or write the records to a .jsonl",
        )
    import pyarrow

    return pyarrow
