"""Checks whether a run with this configuration may resume from a checkpoint in its folder.

Every checkpoint of ``shardwise train`` contains the configuration of its run, and digests of the files that it names. A
key whose value has changed is of one of three kinds:

- its value is restored from the checkpoint (:data:`RESTORED`), so that the new one would have no effect;
- with the new value, the checkpoint's weights are of another model, or its data position of other data (:data:`FIXED`);
- it takes effect from here on: all others.

The first two are refused, with the key's name and both values.
"""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardwise.config.render import dump_config, flow_text
from shardwise.config.sources import EXTENSIONS
from shardwise.config.target import looks_like_target, target_file
from shardwise.config.tokenizer import BYTES_MEANT, tokenizer_path
from shardwise.data.corpus import pydoc_text
from shardwise.data.sft.saved import open_rows
from shardwise.errors import CheckpointError, ConfigError
from shardwise.run.config import RunConfig
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.integrity.manifest import folder_name, steps_in

CONFIG, FILES = "training/config.yaml", "training/files.json"

_OPTIMIZER = "the optimizer keeps the settings it had"
_MODEL = "the checkpoint holds the weights of the model as it was"
_DATA = "the position in the data counts samples of the order as it was"
_START = "the weights are those of the checkpoint"
RESTORED = {
    "optim.": _OPTIMIZER,
    "train.seed": "the order of samples and dropout go on with the seed they had",
    "train.scaler.": "the scale and its rules come with the checkpoint",
}
START = dict.fromkeys(
    ("model.weights", "model.adapter", "model.rename", "model.cast", "model.strict", "parallel.init"), _START
)
"""Keys for a run's initial values: the command that resumes it may leave them out."""
_BASE = {key: START[key] for key in ("model.weights", "model.rename", "model.cast", "model.strict")}
FIXED = {
    "model.": _MODEL,
    "parallel.lora": _MODEL,
    "data.": _DATA,
    "train.loss": _DATA,
    "train.count": _DATA,
    "train.forward": _DATA,
}
MAY_CHANGE = tuple(
    f"data.{key}" for key in ("global_batch", "micro_batch", "micro_tokens", "num_workers", "prefetch", "cache")
)
"""Keys of :data:`FIXED` that change neither which samples there are nor their order: how many are taken at once, and how they are
read. A key that is added to ``data`` is refused until it is listed here."""
_OPEN = ("model.args.", "model.rename.", "data.args.", "optim.args.", "schedule.args.", "parallel.")
"""Prefixes of keys that are not in the defaults: the user's own, or keys that depend on another value."""
_CODE = (
    *(f"{section}.build" for section in ("model", "data", "optim", "schedule")),
    *(f"train.{key}" for key in ("loss", "count", "forward", "callback")),
)
"""Keys that name a function of the user's: its file may move, and what is in it may change, which is said."""
_OF_CODE = "code of "
_OF_TOKENIZER = "data.tokenizer/"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""What is beside a tokenizer.json, and says which tokens the records of conversations become."""
_WHOLE = ("optim.groups",)
"""Mappings whose keys are patterns, not parts of a key."""
OF_A_NODE = ("log.", "launch.", "data.cache")
"""Prefixes of keys in which the nodes of a run may differ: what they say is of one machine."""
_UNREPORTED = (*OF_A_NODE, "checkpoint.")
"""Prefixes of keys that may change without a word: they change nothing in what is trained."""
_REPORTED = ("checkpoint.frozen",)
"""Keys of these that are reported: what is in the checkpoints from here on."""


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The configuration in a checkpoint: keys and values, and digests of the files that it names."""

    folder: Path
    values: Mapping[str, Any]
    files: Mapping[str, str]


def texts_of(config: RunConfig) -> dict[str, str]:
    """The files in a checkpoint that identify its run: the configuration, and digests of the files that it names."""
    return {CONFIG: dump_config(config), FILES: json.dumps({**files_of(config), **_code_of(config)}, indent=1)}


def changes_since(root: Path, config: RunConfig) -> list[str]:
    """The settings that differ from those of the newest checkpoint below ``root`` and take effect: ``KEY OLD -> NEW``."""
    saved = _newest(root)
    if saved is None:
        return []  # not of `shardwise train`, or not readable: reported when the run is restored
    now, was, default = flat(config), saved.values, flat(RunConfig())
    files = files_of(config)
    for key in files:
        if key.startswith(_OF_TOKENIZER) and key in saved.files:  # an earlier version did not note them
            now[key] = default[key] = key.removeprefix(_OF_TOKENIZER)
    leaves = "leave" in (now.get("checkpoint.frozen"), was.get("checkpoint.frozen"))
    refused: dict[str, str] = {}
    changed: list[str] = []
    for key in dict.fromkeys((*now, *was)):
        old, new = (values.get(key, default.get(key)) for values in (was, now))
        if key not in now and key not in default and not key.startswith(_OPEN):
            continue  # a key of another version of Shardwise
        if key in files or key in saved.files:
            identity = saved.files.get(key)
            if identity is None:  # the checkpoint does not have it: compare with the file as it is now
                with contextlib.suppress(OSError, ConfigError):  # not there any more, or no saved dataset
                    identity = _identity_of(key, old)
            same = identity is not None and identity == files.get(key)
        else:
            same = old == new or (key in _CODE and _file_name(old) == _file_name(new))
        if key == "data.tokenizer" and {old, new} <= {None, BYTES_MEANT}:
            continue  # both mean that a text is read as bytes
        if same or (_of(START, key) and new == default.get(key)):
            continue
        if leaves and _of(_BASE, key):
            continue  # it is loaded beside the checkpoint, which compares its values
        why = _refused(key)
        if why is not None:
            refused[key] = why
        elif not key.startswith(_UNREPORTED) or key in _REPORTED:
            changed.append(f"{key} {flow_text(old)} -> {flow_text(new)}")
    if refused:
        raise _refusal(saved, config, refused, now, default)
    code = _code_of(config)
    edited = [name.removeprefix(_OF_CODE) for name in code if code[name] != saved.files.get(name, code[name])]
    return changed + [f"the file of {key}={now[key]} has changed since the checkpoint was saved" for key in edited]


def _refusal(
    saved: _Saved, config: RunConfig, refused: Mapping[str, str], now: Mapping[str, Any], default: Mapping[str, Any]
) -> ConfigError:
    def shown(key: str, values: Mapping[str, Any], files: Mapping[str, str]) -> str:
        values = {**default, **values}
        text = flow_text(values[key]) if key in values else "not given"
        return f"{text} ({files[key]})" if key in files else text

    reasons, restoring = [], []
    for key, why in refused.items():
        here, there = shown(key, now, files_of(config)), shown(key, saved.values, saved.files)
        reasons.append(f"{key} is {here}, and was {there}: {why}")
        here, there = shown(key, now, {}), shown(key, saved.values, {})
        again = shlex.quote(f"--{key}={there}") if there != "not given" else f"no {key}"
        restoring.append(f"the file of {key} as it was" if here == there else again)
    return ConfigError(
        f"{', '.join(refused)}: not as in the run that {saved.folder} is of",
        why="\n       ".join(reasons),
        fix=f"resume with what it had: {', '.join(restoring)}; or start from the beginning: --fresh, which moves the checkpoints aside",
    )


def _newest(root: Path) -> _Saved | None:
    for step in reversed(steps_in(root)):
        folder = root / folder_name(step)
        with contextlib.suppress(CheckpointError, msgspec.DecodeError), SavedRun(folder) as saved:
            if CONFIG not in saved.manifest.files:
                continue
            text = saved.files.whole(folder / CONFIG).decode(errors="replace")
            values = flat(EXTENSIONS[".yaml"](text, str(folder / CONFIG)).values)
            noted = saved.files.whole(folder / FILES) if FILES in saved.manifest.files else b"{}"
            files = msgspec.json.decode(noted, type=dict[str, str])
            if values.get("data.build"):  # an earlier version noted the built-in text, which such a run does not read
                files.pop("data.path", None)
            return _Saved(folder=folder, values=values, files=files)
    return None


def _refused(key: str) -> str | None:
    """Why another value of a key is refused; None: it takes effect."""
    takes_effect = key in (*MAY_CHANGE, "parallel.lora.dropout")
    return None if takes_effect else _of(RESTORED, key) or _of(START, key) or _of(FIXED, key)


def _of(kinds: Mapping[str, str], key: str) -> str | None:
    """The reason that ``kinds`` has for a key or for a prefix of it."""
    return next((why for name, why in kinds.items() if f"{key}.".startswith(f"{name.rstrip('.')}.")), None)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, as a configuration file would give it; an empty mapping has no key."""
    values: dict[str, Any] = {}
    for key, inner in (msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value).items():
        if isinstance(inner, Mapping) and f"{prefix}{key}" not in _WHOLE:
            values |= flat(inner, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = _as_read(inner)
    return values


def _as_read(value: Any) -> Any:
    return [_as_read(inner) for inner in value] if isinstance(value, list | tuple) else value


# ---- contents of files: a copy in another place is the same ------------------------------------------------------


def files_of(config: RunConfig) -> dict[str, str]:
    """Key -> size and digest of the file that it names, as text: equal for copies in other places. Of ``model.hf``, its
    config.json."""
    files = {} if config.data.build else {"data.path": _identity_of("data.path", config.data.path)}
    if config.data.val_path is not None:
        files["data.val_path"] = file_sample(Path(config.data.val_path))
    tokenizer = tokenizer_path(config.data.tokenizer)
    if tokenizer is not None:
        files["data.tokenizer"] = file_sample(tokenizer)
        if config.data.has_records:
            files |= _beside(tokenizer.parent, has_template=config.data.chat_template is None)
    if config.data.chat_template is not None:
        files["data.chat_template"] = file_sample(Path(config.data.chat_template))
    if config.model.hf is not None:
        files["model.hf"] = _identity_of("model.hf", config.model.hf)
    return files


def _code_of(config: RunConfig) -> dict[str, str]:
    """As :func:`files_of`, of the files of the user's functions. What these import is not looked at."""
    files: dict[str, str] = {}
    for key, name in flat(config).items():
        if key in _CODE and name is not None and looks_like_target(name):
            with contextlib.suppress(
                OSError, ConfigError
            ):  # of a function that is not there the run itself has an error
                if (file := target_file(name, f"{key}={name!r}")) is not None:
                    files[f"{_OF_CODE}{key}"] = file_sample(file)
    return files


def _beside(folder: Path, *, has_template: bool) -> dict[str, str]:
    """The files of a tokenizer's directory by which records become tokens: of its chat template if that is used."""
    names = (*_SETTINGS, *(_TEMPLATES if has_template else ()))
    return {f"{_OF_TOKENIZER}{n}": file_sample(folder / n) if (folder / n).is_file() else "no such file" for n in names}


def _identity_of(key: str, path: str | None) -> str:
    if path is None:
        text = pydoc_text().encode()
        return f"Python's help topics, {len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()[:12]}"
    return file_sample(Path(path) / "config.json" if key == "model.hf" else Path(path))


def _file_name(build: Any) -> Any:
    """``file.py:fn`` of a function in a file, without folders: the file may have moved."""
    return build.rpartition("/")[2] if isinstance(build, str) else build


def file_sample(path: Path, blocks: int = 16, block_bytes: int = 1 << 16) -> str:
    """A file's size and a digest of 1 MiB of it, evenly spaced, as text: all of a large file would take minutes. A file of up to 1 MiB is
    read whole. For a directory of
    a saved dataset, of each of the files of its rows, in their order, and of the columns it shows."""
    total, digest, files = 0, hashlib.sha256(), [path]
    if path.is_dir():
        rows = open_rows(path)
        files = [*rows.files]
        digest.update(repr(rows.shown).encode())
    for each in files:
        size = each.stat().st_size
        total += size
        with each.open("rb") as file:
            for n in range(blocks):
                file.seek(max(0, size - block_bytes) * n // (blocks - 1))
                digest.update(file.read(block_bytes))
    return f"{total:,} bytes, sample sha256 {digest.hexdigest()[:12]}"
