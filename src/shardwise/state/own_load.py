"""What is loaded into a model with modules that answer for their state themselves: most entries are copied to a tensor of it,
piece by piece as for any model; what a method computes is computed on each rank, a group of tensors at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, ShardwiseError, first_line
from shardwise.model import dtype_name, dtype_of
from shardwise.model.names import canonical_modules
from shardwise.model.own_state import HELD, Decoded
from shardwise.model.plain_state import tensors_in
from shardwise.model.state_trace import NeedsValuesError
from shardwise.parallel import Runtime
from shardwise.recipe.boxes import Box, index_of
from shardwise.state.files import OpenFiles
from shardwise.state.match_names import Matched, Rename, Wanted, match_names
from shardwise.state.own_values import Facts, groups_of, own_of, stored_tensors
from shardwise.state.rounding import copy_checked
from shardwise.state.stored import Chunk, Source, TensorSource

_ATTRIBUTES = ""  # stands for the plain attributes of all modules among what is made of stored tensors


class OwnLoad:
    """What the modules' own methods make of stored tensors.

    Args:
        tensors: name, as the model stores it -> stored tensor; several names may have one.
        values: entries of the state dict that are no tensors.
        metadata: as torch puts it on a state dict.
        files: reads values where a method looks at them.
        buffers: the shapes and dtypes that buffers have while they are loaded.

    Attributes:
        found: which tensors are copied and which computed.
    """

    def __init__(
        self,
        runtime: Runtime,
        tensors: Mapping[str, TensorSource],
        values: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        files: OpenFiles,
        buffers: Facts,
    ):
        self._runtime, self._buffers = runtime, buffers
        self._tensors, self._values, self._metadata = tensors, values, metadata
        self._seen: dict[str, Tensor] = {}  # tensors that methods look at
        self._last: tuple[int, Mapping[str, Tensor]] = (-1, {})
        self.found = self._without_values(files)
        made_of = {name: frozenset([origin]) for name, origin in self.found.direct.items()} | self.found.computed
        if self.found.attributes_of:
            made_of[_ATTRIBUTES] = self.found.attributes_of
        self._groups = [
            (homes, needed)
            for homes, needed in groups_of(made_of, lambda name: tensors[name].num_bytes if name in tensors else 0)
            if not self.found.direct.keys() >= set(homes)
        ]
        self._attributes = _with_values(self.found.attributes)

    def sources(self, dtypes: Mapping[str, str]) -> dict[str, TensorSource]:
        """Canonical name -> where its values come from. ``dtypes``: of the model's entries, by name: what is computed from one
        of another dtype is of that."""
        found = {name: self._tensors[origin] for name, origin in self.found.direct.items()}
        for name, made_of in self.found.computed.items():
            value = self.found.values[name]
            others = (self._tensors[n].dtype for n in made_of if n in dtypes and self._tensors[n].dtype != dtypes[n])
            dtype = next(others, dtype_name(value.dtype))
            found[name] = ComputedTensor(tuple(value.shape), dtype, self, name, made_of)
        return found

    def origins(self, made_of: Iterable[str]) -> tuple[Chunk, ...]:
        return tuple(chunk for name in made_of if name in self._tensors for chunk in self._tensors[name].origins)

    def value(self, name: str, files: OpenFiles) -> Tensor:
        """The full value of a computed tensor. Those that are computed with it are kept until another is asked for."""
        number = next(number for number, (homes, _) in enumerate(self._groups) if name in homes)
        if self._last[0] != number:
            self._last = number, self._compute(*self._groups[number], files)
        return self._last[1][name]

    def attributes(self, files: OpenFiles) -> dict[str, dict[str, Any]]:
        """Name of a module -> its plain attributes that the methods have changed."""
        for homes, needed in self._groups:
            if _ATTRIBUTES in homes:
                self._compute(homes, needed, files)
        self._last = (-1, {})
        return self._attributes

    def _compute(self, homes: list[str], needed: frozenset[str], files: OpenFiles) -> Mapping[str, Tensor]:
        real = {name: self._tensors[name].load(files) for name in needed if name in self._tensors}
        into = frozenset(homes) - {_ATTRIBUTES}
        found = self._decoded(real, into)
        if any(name.startswith(HELD) for name in needed):
            again = self._decoded(real, into, fill=1)
            for name in into:
                if not torch.equal(again.values[name], found.values[name]):
                    raise CheckpointError(
                        "a tensor that its module's own method computes from what the model held before",
                        why="of that each rank may have a part",
                        fix="let the method compute it from what is loaded",
                        name=name,
                    )
        for name, values in _with_values(found.attributes).items():
            self._attributes.setdefault(name, {}).update(values)
        return found.values

    def _without_values(self, files: OpenFiles) -> Decoded:
        while True:
            try:
                return self._decoded({}, frozenset())
            except NeedsValuesError as error:
                more = [name for name in error.names if name in self._tensors and name not in self._seen]
                if not more:
                    raise self._failed(error) from error
                self._seen |= {name: self._tensors[name].load(files) for name in more}

    def _decoded(self, real: Mapping[str, Tensor], into: frozenset[str], fill: int = 0) -> Decoded:
        have = {**self._seen, **real}
        made: dict[int, Tensor] = {}
        state = dict(self._values)
        for name, stored in self._tensors.items():
            if id(stored) not in made:
                bare = torch.empty(stored.shape, dtype=dtype_of(stored.dtype), device="meta")
                made[id(stored)] = have.get(name, bare)
            state[name] = made[id(stored)]
        try:
            own = own_of(self._runtime, self._buffers)
            return own.decode(state, self._metadata, self._runtime.module, into, fill)
        except ShardwiseError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> CheckpointError:
        name, methods = own_of(self._runtime).module_of(error)
        looked = isinstance(error, NeedsValuesError)
        return CheckpointError(
            f"weights that {', '.join(methods)} cannot load",
            why="it looks at values that the model held before"
            if looked
            else f"{type(error).__name__}: {first_line(error)}",
            fix="give what the plain model's load_state_dict takes, with strict=False too",
            name=name or None,
        )


def give_attributes(module: Any, attributes: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """Sets plain attributes of modules, by canonical name, as :meth:`OwnLoad.attributes` has returned them."""
    for name, child in canonical_modules(module) if attributes else ():
        for attr, value in attributes.get(name, {}).items():
            vars(child)[attr] = value.to(device) if isinstance(value, Tensor) else value


def _with_values(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of which no tensor is on meta."""
    return {
        name: {attr: value for attr, value in values.items() if not any(tensor.is_meta for tensor in tensors_in(value))}
        for name, values in attributes.items()
    }


@dataclass(frozen=True, eq=False)
class ComputedTensor(TensorSource):
    """A tensor that a module's own method computes from stored ones."""

    load_: OwnLoad
    name: str
    made_of: frozenset[str]

    @property
    def origins(self) -> tuple[Chunk, ...]:
        return self.load_.origins(self.made_of)

    def read(self, box: Box, out: Tensor, files: OpenFiles) -> None:
        copy_checked(out, self.load_.value(self.name, files)[index_of(box)], f"what {self.name} is computed from")


def match_own(
    runtime: Runtime,
    wanted: dict[str, Wanted],
    computed: Iterable[str],
    source: Source,
    rename: Rename,
    files: OpenFiles,
) -> tuple[Matched, OwnLoad]:
    """As :func:`~shardwise.state.match_names.match_names`: names are first matched to those that the model stores, then the
    modules' own methods say which of its tensors they are. ``wanted`` gets the further tensors that they compute."""
    stored = stored_tensors(runtime)
    homes = {entry.key: name for name, entry in stored.items() if entry.made_of is None}
    asked = {
        name: Wanted(e.shape, e.dtype, wanted[e.key].aliases if e.key in wanted else ()) for name, e in stored.items()
    }
    asked |= {name: want for name, want in wanted.items() if name not in homes and name not in stored}
    matched = match_names(runtime.module, asked, computed, source, rename)
    buffers = runtime.saved_buffers()
    misfits = {name: s for name, s in matched.tensors.items() if name in asked and s.shape != asked[name].shape}
    resized = {n: stored[n].key for n in misfits if n in stored and stored[n].key in buffers}
    buffers |= {key: (misfits[name].shape, misfits[name].dtype) for name, key in resized.items()}
    misfits = {name: s for name, s in misfits.items() if name not in resized}
    passed = {name: s for name, s in matched.tensors.items() if name not in misfits or stored[name].made_of is not None}
    tensors: dict[str, TensorSource] = {}
    for name, tensor in passed.items():
        tensors |= dict.fromkeys((name, *asked[name].aliases), tensor)
    names = {name: matched.names[name] for name in matched.tensors}
    for name in matched.unexpected:
        tensors[matched.current[name]], names[matched.current[name]] = source.tensors[name], name
    values = {**source.extra, **source.values}
    own = OwnLoad(runtime, tensors, values, _metadata(source, matched), files, buffers)
    loaded = own.sources({name: entry.dtype for name, entry in stored.items()})
    loaded |= {stored[name].key if name in stored else name: s for name, s in misfits.items() if name not in passed}
    for name in loaded.keys() - wanted.keys():
        buffer = runtime.recipe.buffers[name]
        wanted[name] = Wanted(buffer.shape, buffer.dtype, buffer.aliases)
    origins = homes | own.found.direct
    origins |= {name: min(made_of, default=name) for name, made_of in own.found.computed.items()}
    matched.names = {name: names.get(origins.get(name, name), name) for name in loaded}
    matched.doubles = {stored[n].key: others for n, others in matched.doubles.items() if n in stored}
    matched.doubles = {name: others for name, others in matched.doubles.items() if name in own.found.direct}
    matched.tensors = loaded
    matched.missing = tuple(n for n in own.found.missing if n not in loaded and n not in matched.ignored)
    matched.unexpected = tuple(name for name in matched.unexpected if matched.current[name] in own.found.unexpected)
    return matched, own


def _metadata(source: Source, matched: Matched) -> Mapping[str, Any] | None:
    """The versions of modules, by the names that their tensors were given."""
    if source.metadata is None:
        return None
    moved = {
        now.rpartition(".")[0]: source.metadata[name.rpartition(".")[0]]
        for name, now in matched.current.items()
        if name.rpartition(".")[0] in source.metadata
    }
    return {**source.metadata, **moved}
