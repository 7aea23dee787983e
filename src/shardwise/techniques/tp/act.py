"""Cuts a module over the ranks along ``tp``, in place, as the recipe says; names, classes and hooks stay."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwise._torch.autograd import num_hooks
from shardwise._torch.collectives import group_name, sum_over
from shardwise.errors import UnsupportedError, UsageError
from shardwise.layout import Coord
from shardwise.model import canonical_modules, canonical_tensors
from shardwise.model.adapted import AdaptedLinear
from shardwise.model.attention import write_out
from shardwise.model.calling import FOR_LOSS, TARGETS, tensors_given
from shardwise.model.tensors import replace_tensors, tensors_of
from shardwise.recipe import Edit, Param, Recipe, extents, local_shape
from shardwise.techniques.cut_forward import check_blocks, cut_within
from shardwise.techniques.row_exchanges import Ranks
from shardwise.techniques.same_inputs import input_check
from shardwise.techniques.technique import Act
from shardwise.techniques.tp.layers import (
    CutEmbedding,
    CutHead,
    CutLayer,
    LayerOfRank,
    Shared,
    WholeReader,
    within_layers,
)
from shardwise.techniques.tp.parts import call_computed, norm_whole, work_on_parts
from shardwise.techniques.tp.rule import TensorParallelEntry
from shardwise.techniques.tp.sequence import JoinedStream, SequenceCuts
from shardwise.techniques.tp.whole_uses import WholeUses
from shardwise.world import World
from shardwise.world.axis import Axis
from shardwise.world.streams import PartStream

_LAYERS = ("column", "row", "whole", "reader")
_TABLES = ("embedding", "head")
_STATE = "_shardwise_sequence"  # of the root module


class TensorParallelAct(Act):
    """Cuts linear layers, and what lies between them."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        _check_sequence(module, recipe)
        drops = [
            edit.module for edit in recipe.edits_of("tp") if edit.args.get("drops_part") or edit.args.get("drops_input")
        ]
        compiled = [edit.module for edit in recipe.edits if edit.action == "compile"]
        for name in drops:
            if any(name.startswith(f"{block}.") for block in compiled):
                raise UnsupportedError(
                    "Compile of a block with dropout between layers that are cut over tp",
                    why="ranks draw numbers of their own there, by switching torch's generator, which a graph cannot",
                    fix="set that dropout to 0, or leave the block out: Compile(targets=...)",
                    name=name,
                )

        parameters = tensors_of(module, "_parameters")
        for name in recipe.entry("tp", TensorParallelEntry).partial if recipe.edits_of("tp") else ():
            if num_hooks(parameters[name])[0]:
                raise UnsupportedError(
                    "a hook on a parameter whose gradients on the ranks along tp are parts of a sum",
                    why="it would be given a part, before the sum at the end of the window",
                    fix="change gradients after the window, before optim.step(); or keep its layers whole: tensor_parallel=sw.TensorParallel(plan={...})",
                    name=name,
                )

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        edits = recipe.edits_of("tp")
        if not edits:
            return
        axis, coord = world.axis("tp"), recipe.grid.coord(world.rank)
        _cut_parameters(module, recipe, coord)
        modules = dict(canonical_modules(module))
        sequence = recipe.entry("tp", TensorParallelEntry).sequence
        draws = any(edit.args.get("drops_part") or edit.args.get("drops_input") for edit in edits)
        draws |= sequence is not None and sequence.draws
        shared = Shared(group_name(axis.group), PartStream(world.device, axis.rank, "tp", module) if draws else None)
        if sequence is not None:
            shared.joined = JoinedStream(Ranks(shared.group, axis.size, axis.rank, "contiguous"))
        for edit in edits:
            if edit.action == "set":
                _set(modules[edit.module], edit.args)
            elif edit.action == "attention":
                write_out(modules[edit.module], is_cut=True)  # type: ignore[arg-type]
            elif edit.action == "row":
                total = functools.partial(sum_over, group=shared.group)
                for name in {edit.module, *edit.args["callers"]}:  # PEFT's layer is around that of the weight
                    if isinstance(adapted := modules[name], AdaptedLinear):
                        adapted.adapter = dataclasses.replace(adapted.adapter, sum_over_inputs=total)
        held = {name: (owner, attr) for name, owner, attr in canonical_tensors(module, "_parameters")}
        called: dict[str, dict[str, LayerOfRank]] = {}
        for edit in edits:
            if edit.action in _LAYERS:
                layer: LayerOfRank = (
                    WholeReader(shared, **edit.args)
                    if edit.action == "reader"
                    else CutLayer(shared, edit.action, **edit.args)
                )
                if "computed" in edit.args:
                    call_computed(modules[edit.module], layer, edit.args["computed"], coord)  # type: ignore[arg-type]
                    continue
                for caller in edit.args["callers"] or [edit.module]:
                    called.setdefault(caller, {})[edit.args["weight"]] = layer
            elif edit.action in _TABLES:
                called.setdefault(edit.module, {})[edit.args["weight"]] = _of_table(shared, edit, recipe, axis)
        biases = {edit.args["weight"]: edit.args.get("bias") for edit in edits if "weight" in edit.args}
        for caller, layers in called.items():
            names = {name for weight in layers for name in (weight, biases[weight]) if name is not None}
            within_layers(modules[caller], shared, layers, {name: held[name] for name in names})
        for edit in edits:
            if edit.action == "norm":
                norm_whole(modules[edit.module], shared, axis, coord, edit.args)
            elif edit.action == "part":
                work_on_parts(modules[edit.module], shared, coord, edit.args, dict(modules))
        if sequence is not None and shared.joined is not None:
            stream = shared.stream if sequence.draws else None
            cut = functools.partial(_cut_sequences, module, recipe, sequence, shared.joined, stream)
            if recipe.layout["cp"] > 1:
                cut_within(module, cut)
            else:
                cut(None)
        module.register_forward_hook(lambda *_: shared.end(), always_call=True)
        module.register_forward_pre_hook(_refusing_more(recipe), with_kwargs=True)
        _refuse_uncalled(module, {weight: layer for layers in called.values() for weight, layer in layers.items()})

    def begin(self, runtime: Any) -> None:
        names = runtime.recipe.entry("tp", TensorParallelEntry).partial
        trained = [name for name in names if runtime.recipe.params[name].trainable]
        if trained:
            runtime.partial.setdefault("tp", []).extend(trained)
        if runtime.recipe.edits_of("tp"):
            axis = runtime.world.axis("tp")
            uses = WholeUses(runtime.recipe, trained, group_name(axis.group), axis.size)
            runtime.before_backward.append(lambda backward: uses.share(runtime, backward))
            if (cuts := runtime.module.__dict__.get(_STATE)) is not None:
                cuts.begin(runtime)
                runtime.compared["tp"] = "leave sequence_parallel out"
            check = input_check(runtime, "tp")
            runtime.module.register_forward_pre_hook(lambda _, args, kwargs: check(args, kwargs), with_kwargs=True)


def _cut_sequences(module: nn.Module, *given: Any) -> None:
    module.__dict__[_STATE] = SequenceCuts(module, *given)


def _check_sequence(module: nn.Module, recipe: Recipe) -> None:
    """Refuses what runs blocks whose sequences are cut in another way than by calling them."""
    cut = {edit.module for edit in recipe.edits_of("tp") if edit.action in ("sequence_cut", "sequence_join")}
    if not cut:
        return
    check_blocks(module, recipe, cut, "tp")
    sequence = recipe.entry("tp", TensorParallelEntry).sequence
    compiled = [edit.module for edit in recipe.edits if edit.action == "compile" and edit.module in cut]
    if compiled and sequence is not None and sequence.draws:
        raise UnsupportedError(
            "Compile of a block with dropout, with sequence_parallel=True",
            why="ranks draw numbers of their own for their positions, by switching torch's generator, which a graph cannot",
            fix="set dropout to 0, or leave the block out: Compile(targets=...); or leave sequence_parallel out",
            name=compiled[0],
        )


def _refuse_uncalled(module: nn.Module, layers: Mapping[str, LayerOfRank]) -> None:
    """Refuses, at the end of the first forward with gradients, a layer that it did not call although it called others beside it: its
    weight may have been used in another way than the one that was seen, and what this rank has of it would be taken for all of it."""
    beside: dict[str, list[tuple[str, CutLayer]]] = {}
    for weight, layer in layers.items():
        if isinstance(layer, CutLayer):
            beside.setdefault(".".join(weight.split(".")[:-2]), []).append((weight, layer))

    def check(*_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        for group in beside.values():
            uncalled = [weight for weight, layer in group if not layer.was_called]
            if uncalled and len(uncalled) < len(group):
                raise UnsupportedError(
                    "a layer that is cut over tp, and was not called where the layers beside it were",
                    why="it was called when the code was run to find what can be cut; if its weight is used in another way, this rank's part would be "
                    "taken for all of it",
                    fix="let the forward do the same in every dtype, mode and branch; or leave the layer whole: "
                    "tensor_parallel=sw.TensorParallel(plan={...})",
                    name=uncalled[0],
                )

    handle = module.register_forward_hook(check)


def _refusing_more(recipe: Recipe) -> Callable[..., None]:
    """A hook on the model that refuses tensors in training which the example did not have: they may take another way
    through the code than what was tried."""
    known = {*recipe.entry("tp", TensorParallelEntry).given, *TARGETS, *FOR_LOSS}

    def check(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and (more := sorted(tensors_given(module, args, kwargs) - known)):
            raise UsageError(
                f"a forward with {', '.join(more)}, which the example did not have",
                why="what can be cut was found by running the model on the example, and its code may treat these in another way",
                fix="parallelize(..., example=batch), with one micro-batch as training gives it",
            )

    return check


def _of_table(shared: Shared, edit: Edit, recipe: Recipe, axis: Axis) -> LayerOfRank:
    """The embedding, or the head, that a module is, for the tokens of this rank."""
    dim = edit.args["dim"]
    num_tokens = recipe.params[edit.args["weight"]].shape[dim]
    if edit.action == "embedding":
        first = -(-num_tokens // axis.size) * axis.rank
        padding_idx = edit.args["padding_idx"]
        return CutEmbedding(shared, first=first, num_tokens=num_tokens, padding_idx=padding_idx)
    return CutHead(shared, out_dim=dim, num_outputs=num_tokens, num_ranks=axis.size, rank=axis.rank)


def _cut_parameters(module: nn.Module, recipe: Recipe, coord: Coord) -> None:
    """Replaces parameters by this rank's part of them along ``tp``, in memory of its own."""
    found = tensors_of(module, "_parameters")
    cut = {id(tensor): recipe.params[name] for name, tensor in found.items() if _over_tp(recipe.params[name]).cuts}
    replace_tensors(module, lambda x: _part_of(x, _over_tp(cut[id(x)]), coord) if id(x) in cut else x)


def _over_tp(param: Param) -> Param:
    """A parameter that is cut over ``tp`` alone."""
    return msgspec.structs.replace(param, cuts=tuple(cut for cut in param.cuts if cut.axis == "tp"))


def _part_of(whole: Tensor, param: Param, coord: Coord) -> Tensor:
    part = torch.empty(local_shape(param, coord), dtype=whole.dtype, device=whole.device)
    for piece in extents(param, coord):
        part[piece.local_index] = whole.detach()[piece.full_index]
    return part


def _set(module: nn.Module, numbers: Mapping[str, int]) -> None:
    """Sets attributes of a module; those named ``config.KEY`` in a copy of its configuration, which others share."""
    config = {key.removeprefix("config."): value for key, value in numbers.items() if key.startswith("config.")}
    if config:
        module.config = copy.copy(module.config)  # type: ignore[assignment]
    for key, value in config.items():
        setattr(module.config, key, value)
    for key, value in numbers.items():
        if not key.startswith("config."):
            setattr(module, key, value)
