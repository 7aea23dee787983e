"""The contents of a checkpoint, and the place of each byte in its files::

    step-00000100/
      model.safetensors          weights, as a plain Hugging Face directory
      config.json ...            the other files of a Hugging Face directory
      training/
        optimizer.safetensors    per-element optimizer state: "NAME/KEY"
        extra.safetensors        tensors of ``extra`` objects that are cut over the ranks
        exact.safetensors        tensors that the modules' own methods store otherwise than the model has them
        rest.safetensors         every other tensor, full: step counts, random streams, state of ``extra`` objects
        state.json               everything that is not a tensor
        recipe.json              which bytes each rank of the run had
        frozen.json              with frozen="leave": digests of the weights that are left out, and where they are
        config.yaml, files.json  of ``shardwise train``: the run's configuration, digests of the files that it names
      extra/NAME/                weights of further sharded models
      manifest.json              written last

The files contain full tensors under canonical names, whatever the layout of the run that wrote them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, UsageError
from shardwise.model import dtype_name
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffers import agree_on_saved
from shardwise.state.checkpoint.extra_objects import (
    EXTRA,
    STATE_OF_ITS_OWN,
    CutTensors,
    is_sharded,
    owner_of,
    refuse_numbered,
    saved_of,
)
from shardwise.state.checkpoint.json_state import to_plain, to_text
from shardwise.state.checkpoint.optimizers import optimizer_state
from shardwise.state.checkpoint.sharded_files import CUT, ShardedFiles, Take, cut_files, weight_files
from shardwise.state.extra_state import extra_states
from shardwise.state.file_layout import PlannedFile, planned_files
from shardwise.state.formats.safetensors import CODES
from shardwise.state.integrity.manifest import MANIFEST, is_inside
from shardwise.state.integrity.sums import sum_of
from shardwise.state.left_base import FROZEN, frozen_names, text_of
from shardwise.state.origin import record_of
from shardwise.techniques import fold
from shardwise.world import World
from shardwise.world.collectively import collectively
from shardwise.world.rng import streams

STATE, REST, OPTIMIZER = "training/state.json", "training/rest.safetensors", "training/optimizer"
RECIPE = "training/recipe.json"


@dataclass
class Contents:
    """Everything that one checkpoint contains.

    Attributes:
        groups: the sharded tensors; equal on every rank except for the values.
        rest: full tensors; rank 0's are written.
        texts: path -> whole file; rank 0's are written.
        plain: the content of :data:`STATE`, as :func:`~shardwise.state.checkpoint.json_state.to_plain` returned it; rank 0's
            is written.
    """

    step: int
    groups: tuple[ShardedFiles, ...]
    rest: dict[str, Tensor]
    texts: dict[str, bytes]
    plain: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def rest_file(self) -> PlannedFile:
        """The layout of the file of full tensors."""
        facts = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self.rest.items()}
        (file,) = planned_files(facts, max_shard_bytes=1 << 62, stem=REST.removesuffix(".safetensors"))
        return file

    @functools.cached_property
    def whole_texts(self) -> dict[str, bytes]:
        """Path -> content of every file without tensors, on rank 0. Made on first use, when training may already
        continue."""
        return {**self.texts, STATE: to_text(self.plain)}

    def staged(self, take: Take) -> "Contents":
        """The same with copies of all sharded tensors, so that training can continue; full ones are copies already."""
        return replace(self, groups=tuple(group.staged(take) for group in self.groups))

    def sizes(self) -> dict[str, int]:
        """Path -> bytes of every file, on rank 0."""
        found = {group.prefix + file.name: file.size for group in self.groups for file in group.file_layout.files}
        found[REST] = self.rest_file.size
        return found | {path: len(text) for path, text in self.whole_texts.items()}

    def heads(self) -> dict[str, bytes]:
        """Path -> first bytes of every file with tensors, on rank 0."""
        found = {group.prefix + file.name: file.head for group in self.groups for file in group.file_layout.files}
        return {**found, REST: self.rest_file.head}


def contents_of(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    *,
    own: Callable[[], Mapping[str, Any]],
    extra: Mapping[str, Any],
    texts: Mapping[str, bytes],
    of_rank: Callable[[], Any] = lambda: None,
    leaves_frozen: bool = False,
) -> Contents:
    """Collects what has to be saved; sharded tensors are those of the run, not copies. All ranks must call it.

    Args:
        optim: its optimizer; None: there is none.
        own: returns name -> JSON-like value with tensors: the step's state, the loader's position.
        extra: objects that :func:`check_extra` accepts.
        of_rank: returns what differs between ranks: the state of the dataset.
        leaves_frozen: the frozen weights of ``model`` are left out.

    Raises:
        UnsupportedError: on every rank; some state is neither JSON nor a tensor; with its name.
        RankError: on the other ranks, if a ``state_dict`` fails on one.
        UsageError: on every rank; ranks have different state.
        ConfigError: one of ``texts`` has the name of a file that is written anyway.
    """
    runtime = runtime_of(model)
    world = runtime.world
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    found: dict[str, bytes] = dict(texts)
    models = {"": model, **{f"{EXTRA}/{name}/": other for name, other in extra.items() if is_sharded(other)}}
    for other in models.values():
        runtime_of(other).check_values()
        agree_on_saved(runtime_of(other), "a checkpoint")
    left = frozen_names(runtime) if leaves_frozen else ()
    if leaves_frozen:
        found[FROZEN] = text_of(runtime, left)
    groups = [
        group
        for prefix, other in models.items()
        for group in weight_files(prefix, other, found, notes, without=() if prefix else left)
    ]
    # The user's code may fail on one rank only: the others would wait for that rank in the next exchange.
    place = "a checkpoint, taking down what modules and extra objects keep"
    cut = CutTensors([runtime_of(other) for other in models.values()])
    mine: dict[str, Tensor] = {}
    plain, data = collectively(
        world,
        place,
        lambda: (_plain_states(own(), models, extra, tensors, cut), to_plain(of_rank(), f"data/{world.rank}", mine)),
    )
    plain |= _facts_of(models)
    groups += _add_optimizers(runtime, optim, extra, plain, tensors, cut)
    _add_ranks(world, plain, tensors, data, mine)
    found[RECIPE] = runtime.recipe.to_json().encode()
    _refuse_unknown_dtypes(tensors)
    for path, text in texts.items():
        if found[path] is not text:
            given = f"texts={{{path!r}: ...}}"
            raise ConfigError(given, why="the model brings a file of that name", fix="use a name of your own")
    return Contents(runtime.step, tuple(groups), tensors, found, plain, notes)


def _add_optimizers(
    runtime: Runtime,
    optim: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    plain: dict[str, Any],
    tensors: dict[str, Tensor],
    cut: CutTensors,
) -> list[ShardedFiles]:
    """Adds the state of the optimizer, and of those among the extra objects; returns the files of what is cut of all of them."""
    files: list[ShardedFiles] = []
    if optim is not None:
        own_cut = CutTensors(cut.models)
        plain["optimizer"] = optimizer_state(runtime, "optimizer", "", optim, tensors, own_cut)
        files += cut_files(own_cut, OPTIMIZER)
    plain["optimizers"] = {
        name: optimizer_state(owner, f"optimizers/{name}", f"{EXTRA}/{name}/", value, tensors, cut)
        for name, value in extra.items()
        if (owner := owner_of(name, value)) is not None
    }
    return files + list(cut_files(cut, CUT))


def _facts_of(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What a resume compares before it reads values, by prefix of a model."""
    # A forward may have given buffers other shapes and dtypes than the model's code does.
    buffers = {
        prefix: {name: [list(shape), dtype] for name, (shape, dtype) in saved.items()}
        for prefix, model in models.items()
        if (saved := runtime_of(model).saved_buffers(of_main=True))
    }
    meaning = {prefix: said for prefix, model in models.items() if (said := fold.meaning(runtime_of(model).recipe))}
    origin = {prefix: said for prefix, model in models.items() if (said := record_of(runtime_of(model))) is not None}
    return {"buffers": buffers, "meaning": meaning, "origin": origin}


def _add_ranks(
    world: World, plain: dict[str, Any], tensors: dict[str, Tensor], data: Any, mine: dict[str, Tensor]
) -> None:
    """Adds what each rank has of its own, its random streams and its data, to the state that all have alike.

    Raises:
        UsageError: on every rank; ranks have different state where one is kept for all.
    """
    digests = _digests(plain, tensors)
    random = to_plain(streams(world.device), f"random/{world.rank}", mine)
    everyone = world.gather((random, data, {name: tensor.numpy() for name, tensor in mine.items()}, digests))
    sums = [told for *_, told in everyone]
    names = sorted({name for told in sums for name in told if any(told.get(name) != other.get(name) for other in sums)})
    if names:
        ranks = [rank for rank, told in enumerate(sums) if any(told.get(n) != sums[0].get(n) for n in names)]
        raise UsageError(
            f"state that is not equal on every rank: {', '.join(names)}",
            why=f"one of each is kept, for all ranks, and rank {', '.join(map(str, ranks))} has another than rank 0",
            fix="let state_dict() give what all ranks share (gathered, or reduced), and compute the rest when it is loaded",
        )
    plain["random"] = {"seed": world.seed, "ranks": [told for told, *_ in everyone]}
    plain["data"] = {"ranks": [told for _, told, *_ in everyone]}
    for _, _, theirs, _ in everyone:
        tensors |= {name: torch.from_numpy(values) for name, values in theirs.items()}


def _plain_states(
    own: Mapping[str, Any],
    models: Mapping[str, nn.Module],
    extra: Mapping[str, Any],
    tensors: dict[str, Tensor],
    cut: CutTensors,
) -> dict[str, Any]:
    plain = {name: to_plain(value, name, tensors) for name, value in own.items()}
    plain["model"] = {
        prefix: to_plain(extra_states(other), f"extra state{prefix and ' of ' + prefix}", tensors)
        for prefix, other in models.items()
    }
    # Their random numbers are named by how many windows they have had, as those of the run's model are by its steps.
    plain["windows"] = {prefix: runtime_of(other).step for prefix, other in models.items() if prefix}
    plain["extra"] = {
        name: to_plain(_state_of(name, value, cut.models), f"{EXTRA}/{name}", tensors, cut.note)
        for name, value in extra.items()
        if saved_of(name, value) == STATE_OF_ITS_OWN
    }
    return plain


def _state_of(name: str, value: Any, models: Sequence[Runtime]) -> Any:
    state = value.state_dict()
    if not isinstance(value, torch.optim.Optimizer):  # else it is one of plain parameters
        refuse_numbered(f"{EXTRA}/{name}", state, models)
    return state


def check_texts(texts: Mapping[str, str]) -> None:
    """Refuses further files with a path that a checkpoint cannot have."""
    for path in texts:
        taken = path in (MANIFEST, STATE, REST, RECIPE, FROZEN) or path.startswith((f"{EXTRA}/", OPTIMIZER))
        if not is_inside(path) or taken or path.endswith((".safetensors", ".safetensors.index.json")):
            raise ConfigError(
                f"texts={{{path!r}: ...}}",
                why="it is the name of a file that a checkpoint has anyway"
                if is_inside(path)
                else "it is no path inside a checkpoint's directory",
                fix="use a name of your own, such as 'notes/run.txt'",
            )


def _digests(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Name -> a checksum of the state under that name."""
    parts = {name: value for name, value in plain.items() if name not in ("extra", "time")}
    parts |= {f"{EXTRA}/{name}": value for name, value in plain["extra"].items()}
    found = {name: sum_of(to_text(value)) for name, value in parts.items()}
    for place, tensor in tensors.items():
        name = "/".join(place.split("/")[:2]) if place.startswith(f"{EXTRA}/") else place.split("/")[0]
        values = f"{place} {tensor.dtype} {tuple(tensor.shape)}".encode() + bytes_of(tensor).numpy().tobytes()
        found[name] = found.get(name, 0) ^ sum_of(values)
    return found


def _refuse_unknown_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in CODES:
            raise UsageError(
                f"{name}: a tensor of {tensor.dtype}",
                why="it goes into safetensors, a format without this dtype",
                fix="keep complex64, or real and imaginary part in two tensors",
                name=name,
            )
