"""Saves weights as plain safetensors files, into which every rank writes its own bytes at their offsets.

Nothing is gathered, and no rank holds more than its shard: the plan of the files (:mod:`shardwise.state.file_layout`)
follows from the recipe. The directory is written next to its place and moved there when all of it is on disk
(:mod:`shardwise.state.staging`).
"""

import functools
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.caller import level_of_caller
from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.config.keywords import public_call
from shardwise.errors import ConfigError, UnsupportedError, UsageError
from shardwise.model import dtype_name
from shardwise.model.peft_names import names_of_peft
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.buffers import agree_on_saved
from shardwise.state.extra_state import extra_states
from shardwise.state.file_layout import SHARD_BYTES, Form, file_layout_of, made_for_packed, stored_dtypes
from shardwise.state.formats.safetensors import CODES
from shardwise.state.own_values import computed_values, refuse_own_methods, stored_tensors
from shardwise.state.packed import packed_of
from shardwise.state.stored import is_rounded
from shardwise.state.to_rank0 import computed_of_full
from shardwise.state.weight_files import WeightFiles
from shardwise.techniques import fold
from shardwise.techniques.fold import acts
from shardwise.techniques.technique import Merge
from shardwise.world.collectively import collectively


@public_call(
    {
        "tokenizer": "leave it out: the tokenizer's files are copied from the directory the model was loaded from; another one writes its own: tokenizer.save_pretrained(directory), on rank 0"
    }
)
def save_weights(
    model: nn.Module,
    dest: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: str | torch.dtype | None = None,
    merge: bool = True,
    packed: bool = False,
) -> Path:
    """Saves the weights of a sharded model as a Hugging Face directory of safetensors files: every parameter and
    persistent buffer. All ranks must call it.

    The files have canonical names (for a ``TaskModel`` the names in its model); a tied tensor is stored once, under its
    first name. Each rank writes its own pieces at their offsets in the final files; ranks that do not see the directory
    send theirs to rank 0, a buffer at a time. The directory appears complete or not at all: an older one is replaced
    when the new one is on disk, and files in it that are not weights are kept; one with
    adapters or a checkpoint is refused. The configuration and tokenizer files of
    the directory that the model was loaded from are copied, and a Hugging Face model's own configuration is written.
    The result of ``get_extra_state`` is left out, with a warning: the format has tensors only.

    Args:
        model: from ``parallelize``.
        dest: the directory; it is made. Rank 0's path is used.
        max_shard_bytes: largest size of one file, in bytes; a tensor is never divided.
        dtype: floating parameters are written in it; None: as they are stored. Buffers are written as they are.
        merge: of a model with adapters (``lora=``), the weights are written with these merged into them, in float32 or more and rounded
            once: a model without adapters that computes the same. False: the weights beside which the adapters are trained;
            :func:`save_adapter` writes those.
        packed: of weights that are stored packed (``quantize=``), True: their bytes are written as bitsandbytes does, with
            ``quantization_config`` in config.json, so that transformers loads them with bitsandbytes; of a model with adapters with
            ``merge=False``. False: their plain values.

    Returns:
        the path of ``model.safetensors``, or of the index if there are several files.

    Raises:
        CheckpointError: on every rank, if one of them cannot write, or something of another kind is there.
        ConfigError: an invalid dtype or size.
        UnsupportedError: on every rank, if the format does not have the dtype of a tensor (complex128), or an adapter cannot be merged
            because its weight is tied to another module's; or a packed weight has no place in bitsandbytes' files.
        UsageError: ``packed`` of a model without packed weights, or with adapters that would be merged.
        RankError: a rank does not take part, or is lost during the save.
    """
    runtime = runtime_of(model)
    runtime.world.refuse_imagined("save_weights")
    runtime.check_values()
    kind = _checked_dtype(dtype)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        given = f"max_shard_bytes={max_shard_bytes!r}"
        raise ConfigError(given, why="it is a number of bytes, 1 or more", fix="use 5 << 30 for 5 GiB")
    world, own = runtime.world, fold.own_names(runtime.recipe)
    if packed:
        _refuse_packed(runtime, own, merge)
    form: Form = "packed" if packed else "plain"
    without = _left_out(runtime)
    file_layout = file_layout_of(runtime, max_shard_bytes=max_shard_bytes, dtype=kind, without=without, form=form)
    collectively(
        world,
        "save_weights, before it begins",
        lambda: repr((max_shard_bytes, kind, bool(merge), bool(packed))),
        same=str,
        differ=ConfigError(
            f"save_weights(max_shard_bytes={max_shard_bytes}, dtype={dtype}, merge={merge}, packed={packed})",
            why="other ranks were given other values",
            fix="give every rank the same",
        ),
    )
    agree_on_saved(runtime, "save_weights")
    states = extra_states(model)  # on every rank: it may communicate
    whole, local = functools.partial(computed_of_full, runtime), runtime.local_tensors()
    values = {} if packed else {name: each.values_here(whole, local) for name, each in packed_of(runtime).items()}
    merged = _merged(runtime, own, values) if merge else {}
    computed = {**computed_values(runtime, "save_weights"), **(made_for_packed(runtime) if packed else {})}
    saving = WeightFiles(
        runtime, file_layout, Path(dest), kind, computed, values | merged, is_packed=packed, merges=bool(merged)
    )
    saving.run()
    if world.is_main:  # last: where warnings are errors, other ranks must not wait for this one
        for note in (*_notes_of(runtime, states), *saving.notes):
            warnings.warn(note, stacklevel=level_of_caller())
    return saving.dest / file_layout.entry


def _refuse_packed(runtime: Runtime, own: Sequence[str], merge: bool) -> None:
    if not packed_of(runtime):
        raise UsageError(
            "save_weights(packed=True) of a model without packed weights",
            why="its weights are plain",
            fix="leave packed out; or train with parallelize(..., quantize=)",
        )
    if own and merge:
        raise UsageError(
            "save_weights(packed=True) of a model with adapters, merged",
            why="packing the merged weights again gives others than those that were trained",
            fix="write plain values, save_weights(model, dest); or the packed base, save_weights(model, dest, merge=False, packed=True), and "
            "save_adapter(model, folder)",
        )
    refuse_own_methods(runtime, "save_weights(packed=True) of")


def weights_bytes(
    model: nn.Module, dtype: str | torch.dtype | None = None, *, form: Form = "plain", without: Collection[str] = ()
) -> int:
    """Size in bytes of the files that :func:`save_weights` would write; with ``form="stored"`` of a checkpoint's weights, with what
    techniques have added, but those of ``without``. No communication."""
    runtime = runtime_of(model)
    return file_layout_of(
        runtime,
        max_shard_bytes=SHARD_BYTES,
        dtype=_checked_dtype(dtype),
        of_main=False,
        without=without if form == "stored" else _left_out(runtime),
        form=form,
    ).num_bytes


def _left_out(runtime: Runtime) -> set[str]:
    """Names that no file of weights has: what techniques have added, and PEFT's copies."""
    return {*fold.own_names(runtime.recipe), *names_of_peft(runtime.module).copies(runtime.recipe.params)}


def check_dtypes(model: nn.Module) -> None:
    """Raises UnsupportedError, with the tensor's name, if :func:`save_weights` could not write ``model``, or merge its adapters; no
    communication, the same on every rank."""
    runtime = runtime_of(model)
    stored_dtypes(stored_tensors(runtime, unpacked=True))
    _merged(runtime, fold.own_names(runtime.recipe), {}, whole=lambda names, compute: None)


def check_packed(model: nn.Module) -> int:
    """Size in bytes of the files that ``save_weights(merge=False, packed=True)`` would write; raises UnsupportedError or UsageError if it
    could not. No communication, the same on every rank."""
    _refuse_packed(runtime_of(model), (), merge=False)
    return weights_bytes(model, form="packed")


def _checked_dtype(dtype: str | torch.dtype | None) -> str | None:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else DTYPE_WORDS.get(dtype or "", dtype)
    if name is not None and not is_rounded(name):
        raise ConfigError(
            f"dtype={dtype!r}",
            why="weights are written in a floating dtype of two bytes or more: one of a byte wants a scale beside each tensor",
            fix=f"use one of {', '.join(kind for kind in CODES if is_rounded(kind))}",
        )
    return name


def _notes_of(runtime: Runtime, states: dict[str, Any]) -> Iterator[str]:
    """What a directory of weights does not keep of a model."""
    if filled := [name for name, state in states.items() if state is not None]:
        yield (
            f"weights without {', '.join(filled)}: safetensors holds tensors only; what get_extra_state returned is in "
            "sw.full_state_dict(model), to be kept with torch.save"
        )
    own = runtime.own_state
    if own is not None and own.versions is not None:
        yield (
            f"{', '.join(json.loads(own.versions)) or 'a module'}: loads by its version, which is in the files' headers for "
            "sw.load_weights; safetensors.torch.load_file passes over it, as over that of any model, and the module would take them for "
            "its oldest version. torch.save(sw.full_state_dict(model), path) on rank 0 keeps it for torch"
        )


def _merged(
    runtime: Runtime, own: Sequence[str], unpacked: Mapping[str, Callable[[], Tensor]], whole: Any = None
) -> dict[str, Callable[[], Tensor]]:
    """Weight -> computes this rank's part of it with what techniques have added (``own``) merged into it. All ranks must call it.
    ``whole``: computes with full tensors; None: communicates for it."""
    found: dict[str, Merge] = {}
    for act in acts():
        found |= act.merged(runtime, whole or functools.partial(computed_of_full, runtime))
    for name, entry in stored_tensors(runtime).items() if found else ():
        if entry.made_of is not None and entry.made_of & {*own, *found}:
            raise UnsupportedError(
                "adapters merged into a weight that a module stores by a method of its own",
                why="the method is given the weight as it is",
                fix="write the base alone: save_weights(model, dest, merge=False), and save_adapter(model, folder)",
                name=name,
            )
    return {name: functools.partial(_with, runtime, name, merge, unpacked.get(name)) for name, merge in found.items()}


def _with(runtime: Runtime, name: str, merge: Merge, unpacked: Callable[[], Tensor] | None) -> Tensor:
    """What this rank has of a weight, in float32 or more, with what techniques have added merged into it."""
    local = runtime.local_tensor_of(name) if unpacked is None else unpacked()
    result = local.to("cpu", torch.promote_types(local.dtype, torch.float32), copy=True)
    if unpacked is None:
        parts = runtime.parts(name, result)
    else:
        parts = [(piece, result[piece.local_index]) for piece, _ in packed_of(runtime)[name].pieces(runtime.world.rank)]
    merge((piece.full_index, part) for piece, part in parts)
    return result
