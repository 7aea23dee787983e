"""Refuses, before any rank starts, a run of which the configuration and the heads of its files show that it cannot work: layout,
functions, files, positions, and (by files of their own) attention, vocabulary, tokens, dtypes. Torch-free: launchers use it too."""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.config.loader import Loaded
from shardwise.config.target import check_target
from shardwise.config.tokenizer import read_json
from shardwise.data.sft.saved import hub_advice, open_rows
from shardwise.errors import ConfigError, LayoutError, UnsupportedError
from shardwise.launch.environment import is_rank, rank_and_size
from shardwise.layout import layout_of, parse_layout
from shardwise.run.attention import check_attention_args
from shardwise.run.config import RunConfig
from shardwise.run.data_config import Data
from shardwise.run.loggers import check_loggers
from shardwise.run.reference_config import check_reference_args
from shardwise.run.stored_dtype import check_stored_dtype, stored_tensors
from shardwise.run.token_check import check_tokens
from shardwise.run.train_config import MODEL_LOSS
from shardwise.techniques import AXES_IN_USE, fold

_TABLE = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_NAMES = ("position", "wpe", "pos_emb")
_MOST_OFFSET = 8  # rows that a table of positions has in front of the first one


def check_early(loaded: Loaded[RunConfig]) -> None:
    """Raises the errors that can be found before a process starts: an invalid layout, a missing model function, sizes
    that do not fit, a missing data file."""
    config, origins = loaded.config, loaded.origins
    with at_origin(origins["parallel.layout"]):
        parse_layout(config.parallel.layout, AXES_IN_USE)
    if config.model.hf is not None:
        _check_hf(config.model.hf, origins["model.hf"])
        check_attention_args(config, origins)
    elif config.model.build is None:
        check_reference_args(config.model.args, seq_len=config.data.seq_len, origins=origins)
    else:
        check_target(config.model.build, what="model.build", origin=origins["model.build"])
    _check_functions(config, origins)
    fold.check_early(config.parallel, origins)
    check_loggers(config.log.to, config.log.wandb_mode, origins["log.to"])
    _check_weights(config, origins)
    _check_data_files(config.data, origins)
    check_tokens(config, origins)
    _check_positions(config, origins)
    check_stored_dtype(config, origins)
    _check_size(config, origins)


def check_ranks(loaded: Loaded[RunConfig]) -> None:
    """Raises the errors of a layout that does not fit its ranks, where their number is known: the launcher of this environment
    has started them, or ``launch.nproc`` names it. The default is counted on the machine that runs."""
    config, origins = loaded.config, loaded.origins
    nproc, size = config.launch.nproc, rank_and_size()[1] if is_rank() else None
    if size is not None and nproc not in (None, size):
        raise ConfigError(
            f"launch.nproc={nproc} ({origins['launch.nproc']}) on {size} ranks",
            why="the ranks were started by the launcher of this environment, so it would have no effect",
            fix="remove it, or start that many ranks",
        )
    if (ranks := size or nproc) is not None:
        with at_origin(origins["parallel.layout"]):
            layout_of(config.parallel.layout, ranks, nproc if size is None else _ranks_per_node, AXES_IN_USE)


@contextlib.contextmanager
def at_origin(origin: str) -> Iterator[None]:
    """Errors within say where the layout was written."""
    try:
        yield
    except (LayoutError, UnsupportedError) as error:
        error.given = f"{error.given} ({origin})"
        raise


def _check_functions(config: RunConfig, origins: Mapping[str, str]) -> None:
    targets = [(section, "build") for section in ("data", "optim", "schedule")]
    targets += [("train", key) for key in ("loss", "count", "forward", "callback")]
    for section, key in targets:
        target = getattr(getattr(config, section), key)
        if target is not None and (key, target) != ("loss", MODEL_LOSS):
            check_target(target, what=f"{section}.{key}", origin=origins[f"{section}.{key}"])


def _check_weights(config: RunConfig, origins: Mapping[str, str]) -> None:
    weights = config.model.weights
    if weights is not None and not Path(weights).exists():
        raise ConfigError(
            f"model.weights={weights!r} ({origins['model.weights']})",
            why=f"there is no such file or directory (relative to {Path.cwd()})",
            fix="give the path of a model directory, or of a file of weights",
        )


def _check_size(config: RunConfig, origins: Mapping[str, str]) -> None:
    path = config.data.path
    # A token is a byte or more, and training and validation each need one window.
    if (
        path is not None
        and not config.data.has_records
        and (size := Path(path).stat().st_size) < 2 * (config.data.seq_len + 1)
    ):
        raise ConfigError(
            f"data.path={path!r} ({origins['data.path']}): {size} bytes",
            why=f"training and validation each need a window of seq_len={config.data.seq_len} + 1 tokens",
            fix="use more data, or a smaller --data.seq_len",
        )


def _check_hf(folder: str, origin: str) -> None:
    """Refuses a path that is not a model directory, and a model whose library is not installed."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"model.hf={folder!r} ({origin})",
            why=f"there is no config.json in it (relative to {Path.cwd()})",
            fix="give a directory that save_pretrained has written; nothing is downloaded",
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"model.hf={folder!r} ({origin})", why="transformers is not installed", fix="pip install 'shardwise[hf]'"
        )


def _ranks_per_node() -> int:
    from shardwise.world.env import ranks_per_node, read_env  # imports torch, which this rank needs anyway

    return ranks_per_node(read_env())


# ---- data files --------------------------------------------------------------------------------------------------------


def _check_data_files(data: Data, origins: Mapping[str, str]) -> None:
    """Refuses a ``data.path`` or ``data.val_path`` that is neither a file nor the directory of a saved dataset."""
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
        "give the path of a text, of tokens as .npy or .bin, or of records: a .jsonl, a .json or a saved dataset"
        if key == "path"
        else "give the path of data like that of data.path"
    )
    return ConfigError(
        f"data.{key}={path!r} ({origin})",
        why=f"there is no such file or directory (relative to {Path.cwd()})",
        fix=f"{fix}{hub_advice(path)}",
    )


# ---- positions --------------------------------------------------------------------------------------------------------


def _check_positions(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses ``data.seq_len`` beyond the positions of a model directory that has a table of them. Torch-free."""
    if config.model.hf is None or config.data.build is not None:
        return
    folder = Path(config.model.hf)
    sizes = {**read_json(folder / "config.json"), **config.model.args}
    number = next((sizes[key] for key in _TABLE if isinstance(sizes.get(key), int)), None)
    if number is not None and number < config.data.seq_len and _has_table(folder, number):
        raise too_long(config, f"model.hf={config.model.hf!r}", number, origins.get("data.seq_len", "default"))


def _has_table(folder: Path, number: int) -> bool:
    """Whether a file of the directory has a learned table of so many positions, which rotary models have not."""
    return any(
        len(shape) == 2 and 0 <= shape[0] - number <= _MOST_OFFSET and any(word in name.lower() for word in _NAMES)
        for name, _, shape in stored_tensors(folder)
    )


def too_long(config: RunConfig, model: str, number: int, origin: str) -> ConfigError:
    """The error for a sample longer than the model has positions."""
    return ConfigError(
        f"data.seq_len={config.data.seq_len}{f' ({origin})' if origin else ''} with {model}, which has {number} positions",
        why="a sample has up to so many tokens, and the model has no position for those beyond its own",
        fix=f"use --data.seq_len={number} or less, or a model with more positions",
    )
