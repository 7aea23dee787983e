"""Refuses, before any rank starts, data that is not there or is of no kind that is read. Torch-free: launchers use it too."""

from collections.abc import Mapping
from pathlib import Path

from shardwise.data.sft.saved import hub_advice, open_rows
from shardwise.errors import ConfigError
from shardwise.run.data_config import Data


def check_data_files(data: Data, origins: Mapping[str, str]) -> None:
    """Refuses a ``data.path`` or ``data.val_path`` that is neither a file nor the directory of a saved dataset.

    Raises:
        ConfigError: with the key and where its value is from.
    """
    for key, path in (("path", data.path), ("val_path", data.val_path)):
        if path is None or Path(path).is_file():
            continue
        origin = origins[f"data.{key}"]
        if not Path(path).exists():
            raise _missing(key, path, origin)
        if not data.has_records:
            raise ConfigError(
                f"data.{key}={path!r} ({origin})",
                why="it is a directory",
                fix="give the path of a text file, or of tokens as .npy or .bin",
            )
        try:
            open_rows(path)
        except ConfigError as error:  # which begins with the path
            error.given = f"data.{key}={error.given} ({origin})"
            raise


def _missing(key: str, path: str, origin: str) -> ConfigError:
    fix = (
        "give the path of a text, of tokens as .npy or .bin, or of records: a .jsonl or a saved dataset"
        if key == "path"
        else "give the path of data like that of data.path"
    )
    return ConfigError(
        f"data.{key}={path!r} ({origin})",
        why=f"there is no such file or directory (relative to {Path.cwd()})",
        fix=f"{fix}{hub_advice(path)}",
    )
