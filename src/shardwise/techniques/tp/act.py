"""Cuts a module over the ranks along ``tp``, in place, as the recipe says; names, classes and hooks stay."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwise._torch.collectives import group_name
from shardwise.errors import UnsupportedError, UsageError
from shardwise.layout import Coord
from shardwise.model import canonical_modules, canonical_tensors
from shardwise.model.attention import write_out
from shardwise.model.calling import TARGETS, tensors_given
from shardwise.model.tensors import replace_tensors, tensors_of
from shardwise.recipe import Cut, Edit, Param, Part, Recipe, extents, local_shape
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
from shardwise.techniques.tp.rule import TensorParallelEntry
from shardwise.techniques.tp.same_inputs import refuse_other_inputs
from shardwise.techniques.tp.streams import PartStream
from shardwise.world import World
from shardwise.world.axis import Axis

__all__ = ["TensorParallelAct"]

_LAYERS = ("column", "row", "whole", "reader")
_TABLES = ("embedding", "head")


class TensorParallelAct(Act):
    """Cuts linear layers, and what lies between them."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        drops = [edit.module for edit in recipe.edits_of("tp") if edit.args.get("drops_part")]
        compiled = [edit.module for edit in recipe.edits if edit.action == "compile"]
        for name in drops:
            if any(name.startswith(f"{block}.") for block in compiled):
                raise UnsupportedError(
                    "Compile of a block with dropout between layers that are cut over tp",
                    why="ranks draw numbers of their own there, by switching torch's generator, which a graph cannot",
                    fix="set that dropout to 0, or leave the block out: Compile(targets=...)",
                    name=name,
                )

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        edits = recipe.edits_of("tp")
        if not edits:
            return
        axis, coord = world.axis("tp"), recipe.grid.coord(world.rank)
        _cut_parameters(module, recipe, coord)
        modules = dict(canonical_modules(module))
        draws = any(edit.args.get("drops_part") for edit in edits)
        shared = Shared(group_name(axis.group), PartStream(world.device, axis.rank) if draws else None)
        for edit in edits:
            if edit.action == "set":
                _set(modules[edit.module], edit.args)
            elif edit.action == "attention":
                write_out(modules[edit.module], is_cut=True)  # type: ignore[arg-type]
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
                    _call_computed(modules[edit.module], layer, edit.args["computed"], coord)  # type: ignore[arg-type]
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
                _norm_whole(modules[edit.module], shared, axis, coord, edit.args)
            elif edit.action == "part":
                _work_on_parts(modules[edit.module], shared, coord, edit.args, dict(modules))
        module.register_forward_hook(lambda *_: shared.end(), always_call=True)
        module.register_forward_pre_hook(_refusing_more(recipe), with_kwargs=True)

    def begin(self, runtime: Any) -> None:
        names = runtime.recipe.entry("tp", TensorParallelEntry).partial
        trained = [name for name in names if runtime.recipe.params[name].trainable]
        if trained:
            runtime.partial.setdefault("tp", []).extend(trained)
        if runtime.recipe.edits_of("tp"):
            refuse_other_inputs(runtime)


def _refusing_more(recipe: Recipe) -> Callable[..., None]:
    """A hook on the model that refuses tensors in training which the example did not have: they may take another way
    through the code than what was tried."""
    known = {*recipe.entry("tp", TensorParallelEntry).given, *TARGETS}

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


def _call_computed(module: nn.Linear, layer: LayerOfRank, given: Any, coord: Coord) -> None:
    """Makes ``module``, whose weight is computed, call ``layer`` with this rank's part of the weight.

    Args:
        module: whose forward is replaced.
        layer: of which this rank has a part.
        given: the dim along which the weight is cut, and its parts; no parts: evenly; None: it is not cut.
        coord: of this rank.
    """
    cut = None if given is None else _Cut((given[0], given[1] or [[module.in_features, 1]]), coord)

    def forward(input: Tensor) -> Tensor:
        weight = module.weight
        return layer(input, weight if cut is None else cut.of(weight, "a computed weight"), module.bias)

    module.forward = forward


def _norm_whole(module: nn.Module, shared: Shared, axis: Axis, coord: Coord, args: Mapping[str, Any]) -> None:
    """Makes a norm compute on all of its inputs, of which this rank has a part, and return this rank's part.

    Args:
        module: whose forward is replaced.
        shared: what the cut layers share.
        axis: the ranks.
        coord: of this rank.
        args: ``gathers``: whether its input is a part, one of as many equal ones; ``parts``: how its output is cut; None:
            it is not; ``drops_part``: whether dropout follows it that is applied to a rank's part.
    """
    inner, is_gathered, is_cut = module.forward, args["gathers"], args["parts"] is not None
    stream = shared.stream
    cut = _Cut((-1, args["parts"]), coord) if is_cut else None

    @functools.wraps(inner)
    def forward(x: Tensor) -> Tensor:
        if stream is not None:
            stream.leave()
        if is_gathered:
            x = shared.gather(x, axis.size, axis.rank, has_part=is_cut)
        elif is_cut:
            x = shared.sum_gradient(x)
        y = inner(x)
        y = y if cut is None else cut.of(y, "the outputs of a norm")
        if args["drops_part"] and stream is not None:
            stream.enter()
        return y

    module.forward = forward


# ---- what is not an output of a layer ------------------------------------------------------------------------------------


class _Cut:
    """How a dim of a tensor that is no parameter is cut.

    Args:
        given: the dim, and ``[size, replicas]`` of each part.
        coord: of this rank.
    """

    def __init__(self, given: Any, coord: Coord):
        self.dim, parts = given
        self._sizes = [size for size, _ in parts]
        self._here = _indices([Part(size=size, replicas=replicas) for size, replicas in parts], coord)
        # Several equal parts, as of heads in each sample of a batch, are as many as there are; one part may be of heads alone, or of
        # samples within heads.
        self._of_one = None
        if len(parts) > 1 and all(part == parts[0] for part in parts) and self.dim >= 0:
            self._of_one = _indices([Part(size=parts[0][0], replicas=parts[0][1])], coord)

    def of(self, whole: Tensor, what: str) -> Tensor:
        """This rank's part of ``whole``."""
        size, here = whole.shape[self.dim], self._here
        if self._of_one is not None and size % self._sizes[0] == 0:
            here = (torch.arange(0, size, self._sizes[0]).unsqueeze(1) + self._of_one).flatten()
        elif size != sum(self._sizes):
            raise UsageError(
                f"{what} of shape {tuple(whole.shape)}",
                why=f"its dim {self.dim} is cut over tp in parts of {self._sizes}, as the example had it",
                fix="give example= a batch of two samples or more, as training will give it",
            )
        return whole.index_select(self.dim, here.to(whole.device))


def _indices(parts: list[Part], coord: Coord) -> Tensor:
    """The indices of a rank in a dim of these parts that is cut over ``tp``."""
    none = {"dtype": "", "trainable": False, "aliases": (), "unit": "", "storage": "", "compute": "", "reduce": ""}
    cuts = (Cut(axis="tp", dim=0, parts=tuple(parts)),)
    line = Param(shape=(sum(part.size for part in parts),), cuts=cuts, **none)  # type: ignore[arg-type]
    pieces = extents(line, coord)
    return torch.cat([torch.arange(piece.starts[0], piece.starts[0] + piece.sizes[0]) for piece in pieces])


def _work_on_parts(
    module: nn.Module, shared: Shared, coord: Coord, args: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> None:
    """Gives the forward of ``module`` this rank's part of arguments and buffers.

    Args:
        module: whose forward is replaced.
        shared: what the cut layers share.
        coord: of this rank.
        args: ``arguments``: place and cut of each, None: whole, and its gradient is summed; ``narrowed``: places;
            ``buffers``: name and cut of each.
        modules: all modules by name.
    """
    inner, names = module.forward, list(inspect.signature(module.forward).parameters)
    given = {_normal(place, names): cut for place, cut in args["arguments"]}
    cuts = {place: cut and _Cut(cut, coord) for place, cut in given.items()}
    narrowed = {_normal(place, names) for place in args["narrowed"]}
    buffers = []
    for name, cut in args["buffers"].items():
        path, _, attr = name.rpartition(".")
        buffers.append((modules[path], attr, _Cut(cut, coord)))
    degree = coord.degree("tp")

    def change(value: Any, place: tuple[Any, ...], known: list[tuple[Tensor, Any, Tensor]]) -> Any:
        if type(value) in (tuple, list):
            return type(value)(change(item, (*place, i), known) for i, item in enumerate(value))
        if not isinstance(value, Tensor) or (place not in narrowed and place not in cuts):
            return value
        how = (place in narrowed, given.get(place))
        for other, its, changed in known:  # arguments that are one tensor stay one
            if other is value and its == how:
                return changed
        known.append((value, how, part(value, place)))
        return known[-1][2]

    def part(value: Tensor, place: tuple[Any, ...]) -> Tensor:
        if place in narrowed:
            return shared.narrow(value, value.shape[-1] // degree)
        value, cut = shared.sum_gradient(value), cuts[place]
        return value if cut is None else cut.of(value, f"argument {place[0]!r}")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        known: list[tuple[Tensor, Any, Tensor]] = []
        args = tuple(change(value, (names[i] if i < len(names) else i,), known) for i, value in enumerate(args))
        kwargs = {key: change(value, (key,), known) for key, value in kwargs.items()}
        if not buffers:
            return inner(*args, **kwargs)
        with _buffers_of_rank(buffers):
            return inner(*args, **kwargs)

    module.forward = forward


def _normal(place: list[Any], names: list[str]) -> tuple[Any, ...]:
    """A place whose argument is named, if it has a name: callers may give it either way."""
    first, *rest = place
    return (names[first] if isinstance(first, int) and first < len(names) else first, *rest)


@contextlib.contextmanager
def _buffers_of_rank(buffers: list[tuple[nn.Module, str, _Cut]]) -> Iterator[None]:
    """Within: modules have this rank's part of buffers, which are kept whole: they are saved and compared so."""
    whole = [owner._buffers[attr] for owner, attr, _ in buffers]
    for (owner, attr, cut), buffer in zip(buffers, whole, strict=True):
        owner._buffers[attr] = None if buffer is None else cut.of(buffer, attr)
    try:
        yield
    finally:
        for (owner, attr, _), buffer in zip(buffers, whole, strict=True):
            owner._buffers[attr] = buffer
