"""Reads a checkpoint of a run; bytes whose checksum differs are never used."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.state.checkpoint.contents import OPTIMIZER, REST, STATE
from shardwise.state.checkpoint.extra_objects import held_extra
from shardwise.state.checkpoint.json_state import from_plain
from shardwise.state.files import BUFFER
from shardwise.state.formats.safetensors import tensors_in
from shardwise.state.integrity.manifest import Manifest, damaged
from shardwise.state.integrity.reading import VerifiedCheckpoint, VerifiedFiles
from shardwise.state.left_base import FROZEN, LeftBase, base_of
from shardwise.state.stored import FileTensor


class _Optimizer(msgspec.Struct, kw_only=True, rename={"kind": "class"}):
    kind: str
    keys: dict[str, dict[str, str | None]]
    state: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]
    rest: dict[str, Any] | None = None  # what optim.state_dict() gives besides; earlier versions have none


class _Streams(msgspec.Struct):
    python: tuple[int, Any, Any]
    numpy: Any
    torch: Any


class _Random(msgspec.Struct):
    seed: int
    ranks: list[_Streams]


class _State(msgspec.Struct):
    """The fields that every ``state.json`` must have; the others are checked by the code that restores them."""

    step: dict[str, Any]
    model: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    random: _Random
    optimizer: _Optimizer | None = None
    optimizers: dict[str, _Optimizer] | None = None
    meaning: dict[str, dict[str, Any]] | None = None  # of techniques' own parameters; earlier versions have none
    buffers: dict[str, dict[str, tuple[list[int], str]]] | None = None  # shape and dtype; earlier versions have none


class SavedRun:
    """A checkpoint that is open for reading, with its manifest read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.files = VerifiedFiles(VerifiedCheckpoint(folder, self.manifest))

    def __enter__(self) -> "SavedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    @property
    def has_run(self) -> bool:
        """Whether a run can resume from it; otherwise it contains only weights, as a conversion writes them."""
        return STATE in self.manifest.files

    def left_base(self) -> LeftBase | None:
        """What it says of frozen weights that it does not hold; None: it holds all."""
        if FROZEN not in self.manifest.files:
            return None
        return base_of(self.files.whole(self.folder / FROZEN), self.folder / FROZEN)

    def verify(self, first: str = "") -> int:
        """Compares all files whose name begins with ``first`` with their checksums; returns the number of bytes of the checkpoint."""
        for name, fact in self.manifest.files.items():
            if not name.startswith(first):
                continue
            memory = memoryview(bytearray(min(fact.size, BUFFER)))
            for begin in range(0, fact.size, BUFFER):
                self.files.read(self.folder / name, begin, memory[: min(BUFFER, fact.size - begin)])
        return self.manifest.num_bytes

    def brief(self) -> dict[str, Any]:
        """The properties shown in a list of checkpoints, without reading a tensor: ``time``, ``loader``, ``figure``,
        ``best``, ``optimizer`` (its class), ``extra`` (names), as far as they exist."""
        if not self.has_run:
            return {}
        with self.as_written():
            plain = json.loads(self.files.whole(self.folder / STATE))
            shown = [name for name in ("time", "loader", "figure", "best") if name in plain]
            optimizer = plain.get("optimizer")
            return {name: from_plain(plain[name], {}.__getitem__) for name in shown} | {
                "optimizer": None if optimizer is None else optimizer["class"],
                "extra": sorted(held_extra(plain)),
            }

    @contextlib.contextmanager
    def as_written(self) -> Iterator[None]:
        """Within: any error of a state file that this library cannot have written is one of a damaged file."""
        try:
            yield
        except ShardwiseError:
            raise
        except Exception as error:
            why = f"it is not what a save writes: {type(error).__name__}: {error}"
            raise damaged(self.folder / STATE, why) from error

    def state(self) -> tuple[dict[str, Any], Mapping[str, FileTensor]]:
        """Everything except the models' weights: the state as it was saved, with its full tensors; and the tensors in
        the optimizer's files."""
        if not self.has_run:
            raise CheckpointError(
                f"the checkpoint {self.folder}",
                why="it holds weights only, as shardwise convert writes them: no optimizer's state, no step, no position in the data",
                fix=f"begin a run with them: sw.load_weights(model, {str(self.folder)!r}), or model.weights in the configuration",
            )
        self.files.check_heads(self.manifest.files)
        rest = tensors_in(self.folder / REST)
        with self.as_written():
            plain = dict(json.loads(self.files.whole(self.folder / STATE)))
            state = {n: from_plain(v, lambda name: rest[name].load(self.files)) for n, v in plain.items()}
            msgspec.convert(state, _State)
        return state, self.tensors(OPTIMIZER)

    def tensors(self, stem: str) -> dict[str, FileTensor]:
        """Name -> tensor of all files whose path begins with ``stem``."""
        return {
            key: tensor
            for name in self.manifest.files
            if name.startswith(stem) and name.endswith(".safetensors")
            for key, tensor in tensors_in(self.folder / name).items()
        }
