"""The options of ``shardwise convert``, checked when the record is built, and the file kind that an ending stands for.

Torch-free: a mistake is reported before torch is imported.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.config.keymap import Rule
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

KINDS = ("hf", "safetensors", "torch", "dcp", "shardwise")
FILES = ("safetensors", "torch")
ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
FOREIGN = {
    ".gguf": "GGUF", ".ggml": "GGML", ".onnx": "ONNX", ".npz": "NumPy", ".npy": "NumPy", ".h5": "HDF5", ".hdf5": "HDF5",
    ".keras": "Keras", ".msgpack": "Flax", ".pb": "TensorFlow", ".tflite": "TensorFlow Lite",
}  # fmt: skip
"""Endings of weights files of other libraries, which are neither read nor written here."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One conversion: source, destination, and what changes on the way.

    Attributes:
        dest: file, or for ``hf``, ``dcp`` and ``shardwise`` a directory.
        to: ``hf``, ``safetensors``, ``torch``, ``dcp`` or ``shardwise`` (a checkpoint of weights); empty: the kind of
            the ending of ``dest``, else ``hf``.
        dtype: for floating-point tensors, as a word (``bf16``) or torch's name; None: unchanged.
        keep: regular expressions of names that keep their dtype.
        max_shard_bytes: largest size of a file, in bytes, where there may be several; None: 5 GiB.
        config: the model's configuration, if it is not next to the source.
        adapter: a directory of adapters in PEFT's files, which are merged into the weights.
        verify: whether every tensor is compared with the source before the result is moved to its place.
    """

    source: Path
    dest: Path
    to: str = ""
    dtype: str | None = None
    keep: tuple[str, ...] = ()
    max_shard_bytes: int | None = None
    rules: tuple[Rule, ...] = ()
    config: Path | None = None
    adapter: Path | None = None
    verify: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", self.to or _kind_by_name(self.dest))
        self._check_kind()
        self._check_dtype()
        object.__setattr__(self, "dtype", DTYPE_WORDS[self.dtype] if self.dtype else None)
        for idle, option, why, fix in (
            (self.keep and not self.dtype, "--keep", "it says what --dtype does not change", "add --dtype bfloat16"),
            (
                self.config and not self.rules,
                "--config",
                "it gives --map the numbers of heads",
                "add --map llama-to-meta",
            ),
            (self.max_shard_bytes and self.is_file, "--max-shard-bytes", f"{self.to} is one file", "use --to hf"),
        ):
            if idle:
                raise ConfigError(f"convert {option}", why=why, fix=f"{fix}, or leave {option} out")

    @property
    def is_file(self) -> bool:
        """Whether the result is one file; otherwise it is a directory."""
        return self.to in FILES

    def _check_kind(self) -> None:
        by_ending = ENDINGS.get(self.dest.suffix)
        if self.to not in KINDS:
            fix = did_you_mean(self.to, KINDS, what="kinds")
            raise ConfigError(f"--to {self.to}", why="weights are not written in that kind", fix=fix)
        if not self.is_file and by_ending is not None:
            raise ConfigError(
                f"--to {self.to} {self.dest}",
                why=f"{self.to} is a directory, and the name is one of a file",
                fix=f"name a directory, or use --to {by_ending}",
            )
        if self.to == "torch" and by_ending == "safetensors":
            raise ConfigError(
                f"--to torch {self.dest}",
                why="readers take a file of that name for safetensors",
                fix=f"use {self.dest.with_suffix('.pt')}, or leave --to out",
            )
        if self.to == "safetensors" and by_ending != "safetensors":
            raise ConfigError(
                f"--to safetensors {self.dest}",
                why="readers know such a file by its ending",
                fix=f"use {self.dest}.safetensors",
            )

    def _check_dtype(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_WORDS:
            fix = did_you_mean(self.dtype, list(DTYPE_WORDS), what="dtypes")
            raise ConfigError(f"--dtype {self.dtype}", why="weights are not rounded to that", fix=fix)
        for pattern in self.keep:
            try:
                re.compile(pattern)
            except re.error as error:
                why = f"not a valid regular expression: {error}"
                raise ConfigError(f"--keep {pattern}", why=why, fix="write dots as \\.") from None


def _kind_by_name(dest: Path) -> str:
    """The kind for the ending of ``dest``; a directory if it has none or an unknown one (``llama-3.1``)."""
    ending = dest.suffix
    if ending in ENDINGS:
        return ENDINGS[ending]
    if ending.lower() in FOREIGN:
        raise ConfigError(
            f"convert to {dest}",
            why=f"its name is one of a file for {FOREIGN[ending.lower()]}, which is not written here",
            fix=f"end it with one of {', '.join(ENDINGS)}; or name a directory",
        )
    meant = difflib.get_close_matches(ending, ENDINGS, n=1, cutoff=0.8)
    if meant:
        raise ConfigError(
            f"convert to {dest}",
            why=f"{ending} is not a known ending, so a directory would be made",
            fix=f"did you mean {dest.with_suffix(meant[0])}? for a directory of that name: --to hf",
        )
    return "hf"
