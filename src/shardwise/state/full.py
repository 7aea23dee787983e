"""Full state dicts: the full tensors of a sharded module on rank 0, assembled from the ranks' shards, and loaded back.
Names are canonical."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardwise.config.keywords import public_call
from shardwise.model import canonical_modules
from shardwise.model.own_state import ExtraState, OwnState, with_metadata
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffers import agree_on_saved
from shardwise.parallel.copies import refuse_diverged
from shardwise.state.extra_state import EXTRA_STATE, extra_states
from shardwise.state.load import load_weights
from shardwise.state.match_names import Rename
from shardwise.state.own_values import own_of, refuse_own_methods
from shardwise.state.packed import in_weights_place, packed_of
from shardwise.state.report import LoadReport
from shardwise.state.to_rank0 import full_tensors
from shardwise.world.collectively import collectively


@public_call({"cpu_offload": "leave it out: rank 0 has the values in host memory"})
def full_state_dict(model: nn.Module, *, trainable_only: bool = False, packed: bool = False) -> dict[str, Any]:
    """The full state dict of a sharded model: every parameter and persistent buffer, unsharded, on rank 0's CPU; ``{}``
    on the other ranks. All ranks must call it.

    The keys and values are those of the unsharded module's ``state_dict()``, in its order; tied names map to one tensor.
    The result of a module's ``get_extra_state`` is that of rank 0, unchanged. Where modules have own methods for it
    (``_save_to_state_dict``, hooks, ``state_dict``), those are run on full tensors.

    Args:
        model: from ``parallelize``.
        trainable_only: leave out frozen parameters, buffers and extra states.
        packed: of weights that are stored packed (``quantize=``), True: what they are stored in, as the module has it. False: their plain
            values, under the names and in the dtypes of the module before they were packed.

    Raises:
        RankError: a rank does not take part: it has exited, or makes another call.
    """
    runtime = runtime_of(model)
    runtime.check_values()
    # The sends that follow have no timeout: a rank that does not take part is named here.
    if trainable_only:
        runtime.world.agreement.sum({}, "full_state_dict, before it is gathered")
        refuse_diverged(runtime, "full_state_dict", runtime.trainable)
    else:
        agree_on_saved(runtime, "full_state_dict")
    found: dict[str, Any] = {} if trainable_only else extra_states(model)  # on every rank: it may communicate
    if runtime.own_state is not None:
        refuse_own_methods(runtime, "full_state_dict of", packed=packed)
        return _by_own_methods(runtime, own_of(runtime), found, trainable_only=trainable_only)
    aliases = {name: p.aliases for name, p in runtime.recipe.params.items() if p.trainable or not trainable_only}
    if not trainable_only:
        aliases |= {name: buffer.aliases for name, buffer in runtime.recipe.buffers.items() if buffer.persistent}
    names = aliases if packed else [*in_weights_place(runtime, aliases)]
    for name, whole in full_tensors(runtime, names).items():
        found.update(dict.fromkeys((name, *aliases.get(name, ())), whole))
    if not runtime.world.is_main:
        return {}
    return {name: found[name] for name in _order(model, found, packed_of(runtime))}


def _by_own_methods(
    runtime: Runtime, own: OwnState, extra: Mapping[str, Any], *, trainable_only: bool
) -> dict[str, Any]:
    """The state dict that the module's own methods give with full tensors."""
    place, trained = "full_state_dict, running the modules' own methods", set(runtime.trainable)
    plan = collectively(runtime.world, place, lambda: own.encode(runtime.module))
    kept = {
        name: entry.made_of for name, entry in plan.entries.items() if not trainable_only or entry.made_of & trained
    }
    names = set().union(
        *(made_of for made_of in kept.values() if made_of), () if trainable_only else runtime.parameters
    )
    wanted = [name for name in runtime.recipe.params if name in names]
    local = runtime.local_tensors()
    values = full_tensors(runtime, [*wanted, *(name for name in runtime.recipe.buffers if name in local)])
    told = collectively(runtime.world, place, lambda: own.encode(runtime.module, values).state, on_main=True)
    if told is None:
        return {}
    state = {
        name: extra[value.name] if isinstance(value, ExtraState) else value
        for name, value in told.items()
        if name in kept or not trainable_only
    }
    return with_metadata(state, getattr(told, "_metadata", None))


@public_call()
def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, rename: Rename = (), cast: bool = False
) -> LoadReport:
    """Loads a full state dict on rank 0 into the shards of all ranks. All ranks must call it; the ``state`` of the
    others is ignored.

    Rank 0 sends every rank its pieces, a bounded buffer at a time; apart from that no rank holds more than its shards.

    Args:
        model: from ``parallelize``.
        state: name -> tensor, as from :func:`full_state_dict` or an unsharded module's ``state_dict()``.
        strict: False: names that are missing, or not the model's, are left out and reported.
        rename: as for :func:`load_weights`.
        cast: True: floating values of another dtype than the model stores are converted.

    Raises:
        CheckpointError: on every rank; names, shapes or dtypes do not fit. Nothing has changed then.
    """
    return load_weights(model, state, strict=strict, rename=rename, cast=cast, shared_files=False)


def _order(model: nn.Module, names: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Sorts names in the order of the module's own state dict: by module, then parameters, buffers, extra state. ``packed``: of weights,
    which are no parameters of their layers, and were their first."""
    wanted, found = set(names), []
    weights = {name.rpartition(".")[0]: name for name in packed}
    for prefix, module in canonical_modules(model):
        if weights.get(prefix) in wanted:
            found.append(weights[prefix])
        for attr in (*module._parameters, *module._buffers, EXTRA_STATE):
            name = f"{prefix}.{attr}" if prefix else attr
            if name in wanted:
                found.append(name)
    return found
