"""Matches stored weights to the tensors of a model whose modules load their state by methods of their own."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.parallel import Runtime
from shardwise.state.files import OpenFiles
from shardwise.state.match_names import Matched, Rename, Wanted, match_names
from shardwise.state.own_load import OwnLoad
from shardwise.state.own_values import stored_tensors
from shardwise.state.stored import Source, TensorSource


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
    found = match_names(runtime.module, asked, computed, source, rename)
    buffers = runtime.saved_buffers()
    odd = {name: s for name, s in found.tensors.items() if name in asked and s.shape != asked[name].shape}
    resized = {n: stored[n].key for n in odd if n in stored and stored[n].key in buffers}
    buffers |= {key: (odd[name].shape, odd[name].dtype) for name, key in resized.items()}
    odd = {name: s for name, s in odd.items() if name not in resized}
    told = {name: s for name, s in found.tensors.items() if name not in odd or stored[name].made_of is not None}
    tensors: dict[str, TensorSource] = {}
    for name, tensor in told.items():
        tensors |= dict.fromkeys((name, *asked[name].aliases), tensor)
    names = {name: found.names[name] for name in found.tensors}
    for name in found.unexpected:
        tensors[found.current[name]], names[found.current[name]] = source.tensors[name], name
    values = {**source.extra, **source.values}
    own = OwnLoad(runtime, tensors, values, _metadata(source, found), files, buffers)
    loaded = own.sources({name: entry.dtype for name, entry in stored.items()})
    loaded |= {stored[name].key if name in stored else name: s for name, s in odd.items() if name not in told}
    for name in loaded.keys() - wanted.keys():
        buffer = runtime.recipe.buffers[name]
        wanted[name] = Wanted(buffer.shape, buffer.dtype, buffer.aliases)
    origins = homes | own.found.direct
    origins |= {name: min(made_of, default=name) for name, made_of in own.found.computed.items()}
    found.names = {name: names.get(origins.get(name, name), name) for name in loaded}
    found.doubles = {stored[n].key: others for n, others in found.doubles.items() if n in stored}
    found.doubles = {name: others for name, others in found.doubles.items() if name in own.found.direct}
    found.tensors = loaded
    found.missing = tuple(n for n in own.found.missing if n not in loaded and n not in found.ignored)
    strange = {*own.found.unexpected}
    found.unexpected = tuple(name for name in found.unexpected if found.current[name] in strange)
    return found, own


def _metadata(source: Source, found: Matched) -> Mapping[str, Any] | None:
    """The versions of modules, by the names that their tensors were given."""
    if source.metadata is None:
        return None
    moved = {
        now.rpartition(".")[0]: source.metadata[name.rpartition(".")[0]]
        for name, now in found.current.items()
        if name.rpartition(".")[0] in source.metadata
    }
    return {**source.metadata, **moved}
