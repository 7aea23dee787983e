"""Refuses, before any rank starts, a run whose text would be read as other tokens than those of the model's tokenizer.

Torch-free: launchers use it too.
"""

import importlib.util
import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from shardwise.config.tokenizer import BYTES_MEANT, is_tokens, tokenizer_files, tokenizer_path
from shardwise.data.sft.first_look import look_at
from shardwise.data.sft.records import read_records
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig
from shardwise.run.vocabulary import check_vocabulary, template_in, vocab_of_folder

_BYTES = 256
_HEAD = 1 << 16  # bytes of a file that are checked
_RECORDS = 20_000  # lines
_INSTALL = "pip install 'shardwise[hf]'"


def check_tokens(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses a text for a model that has a tokenizer unless ``data.tokenizer`` is set; and a data file that is not
    text."""
    data = config.data
    check_vocabulary(config, origins)
    if data.build is not None:
        return
    if is_tokens(data.path) or data.tokenizer == BYTES_MEANT:
        return
    if data.has_records:
        _check_records(config, origins)
        return
    if data.path is not None:
        _refuse_no_text(data.path, origins["data.path"])
    if data.tokenizer is None:
        _refuse_bytes(config, origins)
        return
    tokenizer_path(data.tokenizer)
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer!r} ({origins['data.tokenizer']})",
            why="the library tokenizers, which reads it, is not installed",
            fix=f"{_INSTALL}, or give tokens as .npy",
        )


def _check_records(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses records for fine-tuning without a tokenizer, that are none, or that its template refuses; the first ones, as all
    are read later."""
    data = config.data
    given = f"data.path={data.path!r} ({origins['data.path']})"
    if data.tokenizer is None:
        raise ConfigError(
            f"{given} without data.tokenizer",
            why="records become tokens by the tokenizer of the model, with its special tokens and its chat template",
            fix="name the directory that has it: --data.tokenizer=DIRECTORY; or train a model directory: --model.hf=DIRECTORY",
        )
    tokenizer = tokenizer_path(data.tokenizer)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(given, why="records are read by transformers, which is not installed", fix=_INSTALL)
    template = None if data.chat_template is None else template_in(data.chat_template)
    # Where rows are added, there are enough for the tokenizer.
    vocab = None if config.model.may_grow else vocab_of_folder(config.model.hf, config.model.args)
    for path in filter(None, (data.path, data.val_path)):
        records = read_records(path, most=_RECORDS)
        if tokenizer is not None:
            given = {"seq_len": data.seq_len, "vocab": vocab, "refuses": data.unusable == "refuse"}
            look_at(records, path, tokenizer, **given, added=config.model.add_tokens, template=template)


def _refuse_bytes(config: RunConfig, origins: Mapping[str, str]) -> None:
    model = config.model
    text = "Python's help topics, the built-in text" if config.data.path is None else repr(config.data.path)
    named = ((key, getattr(model, key)) for key in ("hf", "weights"))
    for key, folder in ((key, folder) for key, folder in named if folder is not None):
        if found := tokenizer_files(folder):
            has_file = found[0].name == "tokenizer.json"
            raise ConfigError(
                f"a text ({text}) for model.{key}={folder!r} ({origins[f'model.{key}']}), which has a tokenizer ({found[0].name})",
                why="without data.tokenizer each byte of the text is a token, and the model knows those of its tokenizer",
                fix=f"use its tokenizer: --data.tokenizer={'hf' if key == 'hf' and has_file else folder}; or give its tokens as .npy or .bin; "
                "or, if bytes are meant, --data.tokenizer=bytes",
            )
    size = vocab_of_folder(model.hf, model.args)
    if size is not None and size != _BYTES:
        raise ConfigError(
            f"a text ({text}) for model.hf={model.hf!r} ({origins['model.hf']}), with a vocabulary of {size:,} tokens",
            why="without data.tokenizer each byte of the text is a token, which are 256; no tokenizer is in the directory",
            fix="give its tokenizer: --data.tokenizer=DIRECTORY; or tokens as .npy or .bin; if bytes are meant: --data.tokenizer=bytes",
        )


def _refuse_no_text(path: str, origin: str) -> None:
    with Path(path).open("rb") as file:
        head = file.read(_HEAD)
    lines = [line for line in head.split(b"\n")[: -1 if len(head) == _HEAD else None] if line.strip()]
    first = list(islice(lines, 3))
    if path.endswith((".csv", ".tsv")):
        why = "it is a table; read as a text, names of columns, commas and quotes would be trained on"
        fix = (
            "save it as records, with columns text, or prompt and completion, or messages: "
            f"datasets.load_dataset('csv', data_files={path!r}, split='train').save_to_disk('FOLDER'), and --data.path=FOLDER; for one long text "
            "write the text of its rows to a file"
        )
    elif first and all(_is_object(line) for line in first):
        why = "it is JSON; read as a text, names of fields, quotes and escapes would be trained on"
        fix = (
            "name it .jsonl, if it has a record for fine-tuning in each line: text, or prompt and completion, or messages; for one long text "
            "write the text of its records to a file (json.loads(line)['text'] of each line)"
        )
    elif b"\0" in head:
        why = "it is no text: it has bytes of value 0, as tables, archives and UTF-16 have"
        fix = "write its text to a file in UTF-8, or its tokens to a .npy"
    else:
        return
    raise ConfigError(
        f"data.path={path!r} ({origin})",
        why=why,
        fix=f"{fix}; --data.tokenizer=bytes takes the bytes of the file as they are",
    )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
