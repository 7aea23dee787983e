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
        config.yaml, files.json  of ``shardwise train``: the run's configuration, digests of the files that it names
      extra/NAME/                weights of further sharded models
      manifest.json              written last

The files contain full tensors under canonical names, whatever the layout of the run that wrote them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import ConfigError, UsageError
from shardwise.model import dtype_name
from shardwise.model.tensors import bytes_of
from shardwise.parallel import Runtime, runtime_of
from shardwise.recipe import DTYPE_BYTES
from shardwise.state.checkpoint.extra_objects import CutTensors, is_sharded, owner_of, refuse_numbered
from shardwise.state.checkpoint.json_state import to_plain, to_text
from shardwise.state.extra_state import extra_states
from shardwise.state.file_layout import (
    SHARD_BYTES,
    FileLayout,
    Part,
    PlannedFile,
    file_layout_of,
    parts_of,
    planned_files,
)
from shardwise.state.formats.folder import INDEX
from shardwise.state.formats.safetensors import CODES
from shardwise.state.integrity.manifest import MANIFEST, is_inside
from shardwise.state.integrity.sums import sum_of
from shardwise.state.optimizer import agreed_kinds, settings_of
from shardwise.state.own_values import computed_values, not_stored
from shardwise.state.sidecars import sidecar_files
from shardwise.state.stored_parts import view_of_all
from shardwise.state.writing import stretches
from shardwise.world.collectively import collectively
from shardwise.world.rng import streams

STATE, REST, OPTIMIZER, EXTRA = "training/state.json", "training/rest.safetensors", "training/optimizer", "extra"
EXACT, CUT = "training/exact", "training/extra"
RECIPE = "training/recipe.json"
ALIGN = 1 << 20  # bytes: large tensors begin at multiples of it, so that parts of them are whole blocks
PADDED = 64  # the alignment is at most this part (1/64) of a file: its header is padded to it
STATE_OF_ITS_OWN, WEIGHTS_OF_A_MODEL = "its own state", "the weights of a sharded model"
STATE_OF_AN_OPTIMIZER = "the state of a sharded model's optimizer, by the names of its parameters"
Take = Callable[[str, Tensor, Callable[[], int]], Tensor]
"""``(name, tensor, offset) -> copy``: ``offset()`` is where the tensor begins in its file."""


@dataclass(frozen=True)
class Group:
    """Files of tensors that are sharded like a model's parameters: its weights, or its optimizer state.

    Attributes:
        prefix: of the files' paths.
        runtime: of the model.
        file_layout: the files.
        tensors: this rank's local tensors, by the model's name, or with ``by_stored`` by the name in the file.
    """

    prefix: str
    runtime: Runtime
    file_layout: FileLayout
    tensors: Mapping[str, Tensor]
    by_stored: bool = False

    def parts(self, rank: int) -> Iterator[tuple[str, PlannedFile, Part, Tensor]]:
        """``(path, file, part, values)`` of all that ``rank`` writes, file by file."""
        for part in parts_of(self.runtime, self.file_layout, rank):
            whole = self.tensors[part.tensor.name if self.by_stored else part.view.name]
            yield self.prefix + part.file.name, part.file, part, whole[part.local]

    def staged(self, take: "Take") -> "Group":
        """The same group with the copies that ``take`` makes of each tensor that is written; it is called with a unique
        name for each."""
        place = self.prefix + (f"{self.file_layout.files[0].name}/" if self.by_stored else "")
        stored = [tensor.name for file in self.file_layout.files for tensor in file.tensors]
        used = stored if self.by_stored else [self.file_layout.views[name].name for name in stored]
        return replace(
            self,
            tensors={
                name: take(place + name, self.tensors[name], functools.partial(self._offset_of, name))
                for name in dict.fromkeys(used)
                if name in self.tensors  # what is computed is on rank 0
            },
        )

    def _offset_of(self, name: str) -> int:
        """Where this rank's tensor begins in its file, or would begin if only a part of it is written."""
        return self._offsets.get(name, 0)

    @functools.cached_property
    def _offsets(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, _, part, values in self.parts(self.runtime.world.rank):
            name = part.tensor.name if self.by_stored else part.view.name
            if name not in found:
                before = values.storage_offset() - self.tensors[name].storage_offset()
                offset = next((offset for offset, _ in stretches(part, values)), 0)
                found[name] = offset - int(before) * values.element_size()
        return found


@dataclass
class Contents:
    """Everything that one checkpoint contains.

    Attributes:
        step: windows trained.
        groups: the sharded tensors; equal on every rank except for the values.
        rest: full tensors; rank 0's are written.
        texts: path -> whole file; rank 0's are written.
        plain: the content of :data:`STATE`, as :func:`~shardwise.state.checkpoint.json_state.to_plain` returned it; rank 0's
            is written.
        notes: what the user should know.
    """

    step: int
    groups: tuple[Group, ...]
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

    def staged(self, take: "Take") -> "Contents":
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
) -> Contents:
    """Collects what has to be saved; sharded tensors are those of the run, not copies. All ranks must call it.

    Args:
        model: from ``parallelize``.
        optim: its optimizer; None: there is none.
        own: returns name -> JSON-like value with tensors: the step's state, the loader's position.
        extra: objects that :func:`check_extra` accepts.
        texts: further files, by path.
        of_rank: returns what differs between ranks: the state of the dataset.

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
    groups = [group for prefix, other in models.items() for group in _weights(prefix, other, found, notes)]
    # The user's code may fail on one rank only: the others would wait for that rank in the next exchange.
    place = "a checkpoint, taking down what modules and extra objects keep"
    cut = CutTensors([runtime_of(other) for other in models.values()])
    mine: dict[str, Tensor] = {}
    plain, data = collectively(
        world,
        place,
        lambda: (_plain_states(own(), models, extra, tensors, cut), to_plain(of_rank(), f"data/{world.rank}", mine)),
    )
    if optim is not None:
        own_cut = CutTensors(cut.models)
        plain["optimizer"] = _optimizer(runtime, "optimizer", "", optim, tensors, own_cut)
        groups += _groups(own_cut, OPTIMIZER)
    plain["optimizers"] = {
        name: _optimizer(owner, f"optimizers/{name}", f"{EXTRA}/{name}/", value, tensors, cut)
        for name, value in extra.items()
        if (owner := owner_of(name, value)) is not None
    }
    groups += _groups(cut, CUT)
    digests = _digests(plain, tensors)
    random = to_plain(streams(world.device), f"random/{world.rank}", mine)
    everyone = world.gather((random, data, {name: tensor.numpy() for name, tensor in mine.items()}, digests))
    _refuse_unlike([told for *_, told in everyone])
    plain["random"] = {"seed": world.seed, "ranks": [told for told, *_ in everyone]}
    plain["data"] = {"ranks": [told for _, told, *_ in everyone]}
    for _, _, theirs, _ in everyone:
        tensors |= {name: torch.from_numpy(values) for name, values in theirs.items()}
    found[RECIPE] = runtime.recipe.to_json().encode()
    _refuse_unknown_dtypes(tensors)
    _refuse_taken(texts, found)
    return Contents(runtime.step, tuple(groups), tensors, found, plain, notes)


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
    """Refuses further files with a path that a checkpoint cannot have.

    Raises:
        ConfigError: a path cannot be used; with the path.
    """
    for path in texts:
        taken = path in (MANIFEST, STATE, REST, RECIPE) or path.startswith((f"{EXTRA}/", OPTIMIZER))
        if not is_inside(path) or taken or path.endswith((".safetensors", ".safetensors.index.json")):
            raise ConfigError(
                f"texts={{{path!r}: ...}}",
                why="it is the name of a file that a checkpoint has anyway"
                if is_inside(path)
                else "it is no path inside a checkpoint's directory",
                fix="use a name of your own, such as 'notes/run.txt'",
            )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuses ``extra`` objects that could not be saved.

    Raises:
        ConfigError: an object has no ``state_dict``, or its name cannot be a directory's.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"extra={extra!r:.80}", why="objects are saved under names", fix="use a mapping: extra={'average': average}"
        )
    for name, value in extra.items():
        has_both = all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
        if not has_both:
            raise ConfigError(
                f"extra[{name!r}]: a {type(value).__name__}",
                why="it has no state_dict() and load_state_dict(), by which it is saved and restored",
                fix="give it both methods, or leave it out",
            )
        owner_of(name, value)  # raises for an optimizer that cannot be saved
        if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
            raise ConfigError(
                f"extra[{name!r}]", why="the name becomes that of a file", fix="use letters, digits, - and _"
            )


def held_extra(state: Mapping[str, Any]) -> dict[str, str]:
    """Name -> what is saved of it, for the ``extra`` objects in a checkpoint with this state; see :func:`saved_of`."""
    weights = [prefix.removeprefix(f"{EXTRA}/").removesuffix("/") for prefix in state["model"] if prefix]
    return (
        dict.fromkeys(state["extra"], STATE_OF_ITS_OWN)
        | dict.fromkeys(weights, WEIGHTS_OF_A_MODEL)
        | dict.fromkeys(state.get("optimizers") or {}, STATE_OF_AN_OPTIMIZER)
    )


def saved_of(name: str, value: Any) -> str:
    """What is saved of an ``extra`` object."""
    if is_sharded(value):
        return WEIGHTS_OF_A_MODEL
    return STATE_OF_ITS_OWN if owner_of(name, value) is None else STATE_OF_AN_OPTIMIZER


def _weights(prefix: str, model: nn.Module, texts: dict[str, bytes], notes: list[str]) -> list[Group]:
    """The weights as they are stored, and the tensors of the model that are not stored as they are."""
    runtime = runtime_of(model)
    params = runtime.recipe.params.values()
    align = _align(sum(math.prod(param.shape) * DTYPE_BYTES[param.storage] for param in params))
    file_layout = file_layout_of(runtime, max_shard_bytes=SHARD_BYTES, align=align)
    sidecars, told = sidecar_files(runtime)
    index = file_layout.index()
    texts |= {prefix + name: content for name, content in sidecars.items()}
    texts |= {prefix + INDEX: index} if index is not None else {}
    notes += told
    local = runtime.local_tensors()
    groups = [Group(prefix, runtime, file_layout, {**local, **computed_values(runtime, "a checkpoint")})]
    if exact := not_stored(runtime):
        every = {name: (param.shape, param.storage) for name, param in runtime.recipe.params.items()}
        every |= runtime.saved_buffers(of_main=True)
        facts = {name: every[name] for name in exact}
        views = {name: view_of_all(name, shape) for name, (shape, _) in facts.items()}
        files = planned_files(facts, max_shard_bytes=SHARD_BYTES, align=align, stem=EXACT)
        groups.append(Group(prefix, runtime, FileLayout(files, views), {name: local[name] for name in exact}))
    return groups


def _groups(cut: CutTensors, stem: str) -> list[Group]:
    return [Group("", *each, by_stored=True) for each in cut.layouts(stem, lambda sizes: _align(sum(sizes)))]


def _optimizer(
    runtime: Runtime, place: str, prefix: str, optim: torch.optim.Optimizer, tensors: dict[str, Tensor], cut: CutTensors
) -> Any:
    """What is saved of an optimizer of a sharded model, at ``place``; its sharded tensors are added to ``cut``, their names behind
    ``prefix``."""
    parts: dict[str, tuple[str, Tensor]] = {}
    told = _optimizer_state(runtime, optim, prefix, parts)
    for stored, (param, tensor) in parts.items():
        cut.add(runtime, stored, param, tensor)
    return to_plain(told, place, tensors)


def _optimizer_state(
    runtime: Runtime, optim: torch.optim.Optimizer, prefix: str, parts: dict[str, tuple[str, Tensor]]
) -> dict[str, Any]:
    """The state of an optimizer by the names of parameters; what is sharded is added to ``parts``, by ``prefix`` and its name:
    the parameter that it is sharded as, and this rank's part."""
    kinds = agreed_kinds(runtime, optim, "a checkpoint, taking down the optimizer's state")
    kept = {name: dict(optim.state.get(runtime.parameters[name], {})) for name in kinds}
    keys: dict[str, dict[str, str | None]] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, values in kept.items():
        for key, value in values.items():
            if kinds[name][key]:
                parts[f"{prefix}{name}/{key}"] = name, local_tensor(value).detach()
            else:
                plain.setdefault(name, {})[key] = local_tensor(value) if isinstance(value, Tensor) else value
            keys.setdefault(name, {})[key] = dtype_name(value.dtype) if kinds[name][key] else None
    return {
        "class": type(optim).__name__,
        "keys": keys,
        "state": plain,
        "param_groups": [settings_of(runtime, group, kinds) for group in optim.param_groups],
    }


def _align(num_bytes: int) -> int:
    """The alignment of files with ``num_bytes`` of tensors: a power of two, equal on every rank."""
    return min(ALIGN, max(16, 1 << max(num_bytes // PADDED, 1).bit_length() - 1))


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


def _refuse_unlike(everyone: list[dict[str, int]]) -> None:
    names = sorted({name for told in everyone for name in told if any(told.get(name) != o.get(name) for o in everyone)})
    if names:
        ranks = [rank for rank, told in enumerate(everyone) if any(told.get(n) != everyone[0].get(n) for n in names)]
        raise UsageError(
            f"state that is not equal on every rank: {', '.join(names)}",
            why=f"one of each is kept, for all ranks, and rank {', '.join(map(str, ranks))} has another than rank 0",
            fix="let state_dict() give what all ranks share (gathered, or reduced), and compute the rest when it is loaded",
        )


def _refuse_taken(texts: Mapping[str, bytes], found: Mapping[str, bytes]) -> None:
    for path, text in texts.items():
        if found[path] is not text:
            raise ConfigError(
                f"texts={{{path!r}: ...}}", why="the model brings a file of that name", fix="use a name of your own"
            )


def _refuse_unknown_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in CODES:
            raise UsageError(
                f"{name}: a tensor of {tensor.dtype}",
                why="it goes into safetensors, a format without this dtype",
                fix="keep complex64, or real and imaginary part in two tensors",
                name=name,
            )
