"""Loads weights: each rank reads the bytes of its own pieces, directly into its shards.

First, names, shapes and dtypes are matched on every rank; only if everything fits on all ranks, values are copied. A
read that fails after that leaves a model that refuses to be used until it is loaded completely.
"""

import functools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.keywords import public_call
from shardwise.errors import CheckpointError, ConfigError, errors_about
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.copies import Sums, sums_of_copies, unequal
from shardwise.parallel.init.values import scatter_values
from shardwise.recipe import Slice
from shardwise.state.extra_state import set_extra_states
from shardwise.state.files import OpenFiles
from shardwise.state.integrity.reading import VerifiedFiles
from shardwise.state.load_transaction import load_transaction, refuse_left_half
from shardwise.state.match import LoadPlan, Rules, all_of, own_boxes, plan_of
from shardwise.state.match_names import Rename
from shardwise.state.misfits import Cast
from shardwise.state.origin import note_load
from shardwise.state.own_load import give_attributes
from shardwise.state.packed import loaded_names, pack_weights, packed_of, parts_of_packed
from shardwise.state.report import LoadReport
from shardwise.state.stored import compare_sums
from shardwise.state.to_rank0 import computed_of_full
from shardwise.techniques.fold import acts
from shardwise.world.collectively import collectively


@public_call({"map_location": "leave it out: each rank reads its part onto its device"})
def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Rename = (),
    cast: Cast = False,
    shared_files: bool = True,
    check_finite: bool = False,
) -> LoadReport:
    """Loads parameters and persistent buffers of a sharded model, from any layout into any layout. All ranks must call
    it.

    Each rank reads only its own pieces, from files that every rank can see: no full tensor is in memory, and nothing is
    sent. Either everything fits and is loaded, or nothing of the model has changed.

    Weights that the model stores packed (``quantize=``) are packed from plain values of any floating dtype, each rank its part, with the
    bytes of the whole tensor under every layout; a directory that transformers has written with bitsandbytes (NF4, double quantisation) keeps
    its bytes. Into a model with plain weights it is unpacked, which the report says.

    Args:
        model: from ``parallelize``.
        source: a Hugging Face model directory, a checkpoint (every block that is read is compared with its checksum), a
            safetensors file, a torch file, a DCP directory, or a state dict of full tensors.
        strict: False: names that are missing, and names that are not the model's, are left out and reported.
        rename: ``(regex, replacement)`` pairs, applied in order to the names of the source; a replacement of None
            leaves the tensor out. Prefixes of wrappers (``_orig_mod.``, ``module.``) and a prefix that all names share
            or lack (``model.``) are handled without it.
        cast: False: values of another dtype than the model stores are refused. "lossless": they are converted where nothing
            is rounded (bfloat16 to float32), as ``shardwise train`` does. True: they are converted.
        shared_files: False: only rank 0 sees the source, and sends every rank its pieces.
        check_finite: True: values that are NaN or infinite are refused; everything is read twice.

    Raises:
        CheckpointError: on every rank; something is missing, does not fit, or cannot be read; with name and file.
        ConfigError: a ``rename`` matches nothing, or ``cast`` is none of these.
        UsageError: ``source`` is neither a path nor a mapping.
        RankError: a rank does not take part.

    Example:
        >>> report = load_weights(model, "checkpoints/llama")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        148 tensors from checkpoints/llama: 402.00 MiB on this rank, 0.21 s
    """
    if cast not in (True, False, "lossless"):
        raise ConfigError(f"cast={cast!r}", why="there is no such choice", fix='use True, False or "lossless"')
    rules = Rules(strict=strict, rename=rename, cast=cast, check_finite=check_finite)
    return load_by(model, source, rules, shared_files=shared_files)


def load_by(
    model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Any], rules: Rules, *, shared_files: bool = True
) -> LoadReport:
    """As :func:`load_weights`, by rules that may also say that a vocabulary has grown."""
    start, runtime = time.perf_counter(), runtime_of(model)
    with VerifiedFiles() as files:
        if shared_files:
            report = _load_own_pieces(runtime, source, rules, files)
        else:
            report = _load_from_rank0(runtime, source, rules, files)
    return replace(report, seconds=time.perf_counter() - start)


def _load_own_pieces(runtime: Runtime, source: Any, rules: Rules, files: VerifiedFiles) -> LoadReport:
    world = runtime.world
    plan = collectively(
        world,
        "load_weights, matching names",
        lambda: plan_of(runtime, source, rules, files, lambda name, tensor: own_boxes(runtime, name, tensor)),
        same=lambda plan: plan.digest,
        differ=CheckpointError(
            "ranks that see different weights",
            why=f"rank {world.rank} finds others at {source if not isinstance(source, Mapping) else 'its state dict'}",
            fix="put the same files on every node, or pass shared_files=False where rank 0 alone has them",
        ),
    )
    names = [*plan.tensors, *_parts_of(runtime, plan.to_pack)]
    refuse_left_half(runtime, plan.report.place, names)
    local = runtime.local_tensors()

    def read() -> Sums:
        with ThreadPoolExecutor(1) as aside, OpenFiles() as others:
            every = {**plan.tensors, **plan.to_pack}
            compared = aside.submit(compare_sums, every, others, world.rank, world.size)
            for name, stored in plan.tensors.items():
                with errors_about(name):
                    for piece, part in runtime.parts(name, local[name]):
                        stored.read(piece.box, part, files)
            attributes.update(plan.own.attributes(files) if plan.own is not None else {})
            compared.result()
        plan.refuse_changed_files()  # all ranks made their plan before this: all have read one version
        return sums_of_copies(runtime, {name: local[name] for name in names})

    before, attributes = files.num_bytes, dict[str, Any]()
    with load_transaction(runtime, local, names):
        pack_weights(runtime, plan.to_pack, local, plan.report.place, files)
        if ranks := unequal(runtime, collectively(world, "load_weights, reading", read)):
            raise CheckpointError(  # files with one name may differ from node to node
                f"ranks {', '.join(map(str, ranks))}, which hold the same tensors",
                why="they have read different values under the same names",
                fix="put the same files on every node, or pass shared_files=False where rank 0's are meant",
            )
    _after(runtime, names, plan.extra, _places(source, plan), attributes)
    return replace(plan.report, num_bytes=files.num_bytes - before)


def _load_from_rank0(runtime: Runtime, source: Any, rules: Rules, files: VerifiedFiles) -> LoadReport:
    world = runtime.world
    plan = collectively(
        world,
        "load_weights, matching names on rank 0",
        lambda: plan_of(runtime, source, rules, files, all_of),
        on_main=True,
    )
    told = (
        (plan.report, [*plan.tensors], [*plan.to_pack], plan.extra, _places(source, plan)) if plan is not None else None
    )
    report, as_they_are, to_pack, extra, places = world.broadcast(told)
    names = [*as_they_are, *_parts_of(runtime, to_pack)]
    refuse_left_half(runtime, report.place, names)
    local = runtime.local_tensors()
    pieces = _SentPieces(runtime, plan, files, local)
    with load_transaction(runtime, local, names):
        scatter_values(runtime, pieces.plain, {name: local[name] for name in as_they_are})
        for weight in to_pack:
            pieces.parts.clear()
            scatter_values(runtime, pieces.packed, {name: local[name] for name in _parts_of(runtime, [weight])})
        attributes = collectively(world, "load_weights, after rank 0 has sent", pieces.finish, on_main=True)
    if runtime.own_state is not None:
        attributes = world.broadcast(attributes)
    _after(runtime, names, extra, places, attributes or {})
    return replace(report, num_bytes=sum(local[name].numel() * local[name].itemsize for name in names))


@dataclass
class _SentPieces:
    """Reads on rank 0 the pieces that it sends. The other ranks wait for each of them: after an error, zeros are sent, and
    :meth:`finish` raises it.

    Attributes:
        plan: of rank 0; None elsewhere.
        local: canonical name -> tensor of this rank; for their dtypes.
        parts: of the packed weight that is being sent.
    """

    runtime: Runtime
    plan: LoadPlan | None
    files: VerifiedFiles
    local: Mapping[str, Tensor]
    parts: dict[str, Tensor] = field(default_factory=dict)
    problem: Exception | None = None

    def plain(self, name: str, piece: Slice) -> Tensor:
        """A piece of a tensor that is stored as it is."""
        assert self.plan is not None  # on rank 0
        values = torch.zeros(piece.sizes, dtype=self.local[name].dtype)
        if self.problem is None:
            try:
                with errors_about(name):
                    self.plan.tensors[name].read(piece.box, values, self.files)
            except Exception as error:
                self.problem = error
        return values

    def packed(self, name: str, piece: Slice) -> Tensor:
        """A piece of a part of a packed weight, of which all parts are made with the first."""
        assert self.plan is not None  # on rank 0
        weight = parts_of_packed(self.runtime)[name]
        if not self.parts and self.problem is None:
            try:
                with errors_about(weight):
                    stored, codec = self.plan.to_pack[weight], packed_of(self.runtime)[weight]
                    self.parts |= codec.encode_whole(lambda box: stored.load(self.files, box), self.plan.report.place)
            except Exception as error:
                self.problem = error
        return (
            self.parts[name][piece.full_index] if self.parts else torch.zeros(piece.sizes, dtype=self.local[name].dtype)
        )

    def finish(self) -> Mapping[str, Any]:
        """Raises the error of a read, compares checksums, and gives what the modules' own methods make of what is stored."""
        if self.problem is not None:
            raise self.problem
        if self.plan is None:
            return {}
        attributes = {} if self.plan.own is None else self.plan.own.attributes(self.files)
        compare_sums({**self.plan.tensors, **self.plan.to_pack}, self.files)
        self.plan.refuse_changed_files()
        return attributes


def _after(
    runtime: Runtime,
    names: Collection[str],
    extra: Mapping[str, Any],
    places: tuple[Path, Path | None] | None,
    attributes: Mapping[str, Any],
) -> None:
    """Sets what follows from the loaded tensors, and restores what comes with the weights and is not a tensor: their directory's path,
    extra state, and what the modules' own methods keep beside tensors."""
    loaded = loaded_names(runtime, names)
    for act in acts():
        act.loaded(runtime, loaded, functools.partial(computed_of_full, runtime))
    give_attributes(runtime.module, attributes, runtime.world.device)
    if places is not None:  # values from no file are still of the model that was loaded from one
        note_load(runtime, names, *places)
    if extra:
        set_extra_states(runtime.module, extra)


def _places(source: Any, plan: LoadPlan) -> tuple[Path, Path | None] | None:
    """What was loaded, a directory or a file, and the model directory that it is; None: a state dict."""
    return None if isinstance(source, Mapping) else (plan.folder or Path(source), plan.folder)


def _parts_of(runtime: Runtime, weights: Iterable[str]) -> list[str]:
    """The parameters and buffers that packed weights are stored in."""
    return [part for name in weights for part in packed_of(runtime)[name].parts.values()]
