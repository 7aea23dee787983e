"""The proof for sequence parallelism, on top of :mod:`shardwise.model.positions`: between layers that are cut over ranks each rank has some
rows of the stream, and joins it before them.

Values are compared as there. Gradients follow from where each tensor stands. One on rows has the gradient of these rows. One that is
whole on every rank must have a whole gradient there: so no function may take one together with rows, which is seen by a label on
each tensor. A parameter that functions take with rows has a part of its gradient on each rank; one may not be used both ways.
"""

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import in_transform
from shardwise.model.attend import Attention
from shardwise.model.layers import Layer, flat
from shardwise.model.leaves import DROPOUTS
from shardwise.model.positions import Rows
from shardwise.model.pytrees import keyed_leaves, map_keyed
from shardwise.model.row_facts import Differs, Dims, Facts, Plan
from shardwise.model.row_gradients import Place


@dataclasses.dataclass(frozen=True)
class StreamPlan(Plan):
    """Where the stream is joined and cut besides.

    Attributes:
        sites: module at whose entry it is joined -> paths of arguments that stay on rows.
        gathers: weights of layers whose input is joined.
        scatters: weights of layers of which each rank has a part of the output, summed to rows.
        plain: of ``scatters``, module that is nothing but that layer -> its weight.
        parts: module of ``cut`` -> paths of arguments without positions, of whose gradient each rank has a part.
        needs_whole: weights of layers that are cut over ranks, which need all rows.
        parted: module -> paths of arguments of which each rank is given a part along another dim: they need all rows too.
    """

    sites: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    gathers: tuple[str, ...] = ()
    scatters: tuple[str, ...] = ()
    plain: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    needs_whole: frozenset[str] = frozenset()
    parted: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class StreamFacts(Facts):
    """What a run on rows has done besides.

    Attributes:
        sites: module -> what is joined at its entry.
        gathers, scatters: weight of a layer -> the dim of positions of its input, or output. ``-1 - dim``, here and elsewhere: samples and
            positions lie in it.
        direct: weight of a layer -> its input is what was joined, in all of its calls.
        on_rows: parameter -> the module whose code uses it with rows.
        with_whole: parameter -> a module whose code uses it with what every rank has.
        parts: module -> paths of arguments of whose gradient each rank has a part.
        ends: path of a tensor of the model's output -> its dim of positions.
        moved: numbers that all exchanges of a forward are about.
    """

    sites: dict[str, Dims] = dataclasses.field(default_factory=dict)
    gathers: Dims = dataclasses.field(default_factory=dict)
    scatters: Dims = dataclasses.field(default_factory=dict)
    direct: dict[str, bool] = dataclasses.field(default_factory=dict, compare=False)
    on_rows: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    with_whole: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    parts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ends: Dims = dataclasses.field(default_factory=dict)
    moved: int = dataclasses.field(default=0, compare=False)

    def add(self, other: Facts) -> None:
        super().add(other)
        assert isinstance(other, StreamFacts)
        self.direct |= {name: self.direct.get(name, True) and is_so for name, is_so in other.direct.items()}
        self.on_rows = {**other.on_rows, **self.on_rows}
        self.with_whole = {**other.with_whole, **self.with_whole}


class NeedsWhole(Differs):
    """A layer that is cut over ranks is given rows."""

    def __init__(self, name: str, layer: str):
        super().__init__(name, f"{layer} is cut over ranks, and is given some positions alone")
        self.layer = layer


class _Label(NamedTuple):
    """What a tensor is made of.

    Attributes:
        is_rows: of this rank's rows.
        is_whole: of what is computed on every rank, with a gradient.
        params: of these parameters, and of nothing else with a gradient.
    """

    is_rows: bool = False
    is_whole: bool = False
    params: frozenset[str] = frozenset()


_NONE, _ON_ROWS, _WHOLE = _Label(), _Label(is_rows=True), _Label(is_whole=True)
_CUTS_OFF = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_WRITES = (Tensor.__setitem__,)


class StreamRows(Rows):
    """A run whose exchanges are those of sequence parallelism."""

    _plan: Any  # a StreamPlan
    facts: Any  # StreamFacts

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.facts, self._draws_all = StreamFacts(), False
        self._has_parts = False  # gradients of what every rank has whole are whole
        if not isinstance(self._plan, StreamPlan):
            self._plan = StreamPlan()
        self._layer_calls: dict[str, int] = {}
        self._labels: dict[int, tuple[weakref.ref[Tensor], _Label]] = {}
        self._joined_data: dict[int, tuple[int, int]] = {}  # what was joined: address -> numbers, version
        self._is_within = False  # the forward that ends is in a block
        self._is_layer = False  # the call that runs is one, and has its label

    # ---- modules

    def before(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = super().before(name, args, kwargs)
        frame = self.frames[-1]
        if self._rows is None or not self._whole.keeps(name):
            return args, kwargs
        full = self._whole.inputs[frame.key]
        if name in self._plan.sites:
            stay = self._plan.sites[name]
            dims = self.facts.sites.setdefault(name, {})
            of_all = dict(keyed_leaves(full))
            args, kwargs = map_keyed(
                lambda path, x: (
                    x if path in stay else self._whole_for(Place("in", *frame.key, path), x, of_all.get(path), dims)
                ),
                (args, kwargs),
            )
            frame.is_right = self._is_same((args, kwargs), full)
        self._label_ends((args, kwargs), full)
        for path, x in keyed_leaves((args, kwargs)):
            if isinstance(x, Tensor) and path in self._plan.parted.get(name, ()) and self._label_of(x).is_rows:
                raise Differs(name, f"its argument {path} is cut over ranks, and has some positions alone")
        if name not in self._plan.parts:
            return args, kwargs
        return map_keyed(lambda path, x: self._summed(Place("in", *frame.key, path), x), (args, kwargs))  # type: ignore[no-any-return]

    def _summed(self, place: Place, x: Any) -> Any:
        """An argument of which each rank has all, and a part of its gradient, if it is one."""
        if not isinstance(x, Tensor) or place.path not in self._plan.parts[place.name]:
            return x
        self.facts.parts[place.name] = sorted({*self.facts.parts.get(place.name, ()), str(place.path)})
        x = x if self.gradients is None else self.gradients.joined(place, x, x)
        self._set(x, _ON_ROWS)
        return x

    def _exchanges(self, name: str) -> bool:
        return super()._exchanges(name) or name in self._plan.sites

    def is_part(self, x: Tensor) -> bool | None:
        label = self._label_of(x)
        return True if label.is_rows else False if label.is_whole else None

    def is_part_of(self, name: str) -> bool | None:
        is_on_rows, is_with_whole = name in self.facts.on_rows, name in self.facts.with_whole
        return None if is_on_rows == is_with_whole else is_on_rows

    def exchanged(self, place: Place, mine: Tensor, whole: Tensor) -> Tensor:
        return whole if self.gradients is None else self.gradients.joined(place, mine, whole, is_sum=False)

    def parted(self, place: Place, x: Tensor, part: Tensor) -> Tensor:
        return part if self.gradients is None else self.gradients.parted(place, x, part)

    def after(self, name: str, output: Any) -> Any:
        self._is_within, key = self._is_cut(), self.frames[-1].key
        if self._rows is not None and name in self._plan.plain and self._is_within:
            weight = self._plan.plain[name]
            output = map_keyed(lambda path, x: self._scattered(Place("out", *key, path), weight, x), output)
        output = super().after(name, output)
        if self._rows is not None and self._whole.keeps(name):
            self._label_ends(output, self._whole.outputs[key])
            for x in self._tensors(output):
                if not name:
                    self._note_use(self._label_of(x).params, self.facts.with_whole)
        if not name and self._rows is not None:
            self._note_ends(output)
        return output

    def _is_cut(self) -> bool:
        """Whether the code that runs is in a block, and in no island: what is around the innermost forward."""
        is_in_block = any(frame.name in self._plan.cut for frame in self.frames)
        return is_in_block and not any(frame.name in self._plan.islands for frame in self.frames[:-1])

    def _note_ends(self, output: Any) -> None:
        for path, x in keyed_leaves(output):
            at = [d for d, size in enumerate(x.shape) if size == self._length] if isinstance(x, Tensor) else []
            if at:
                self.facts.ends[path] = at[0]

    def wrote(self, found: dict[str, Tensor]) -> None:
        for name in found:
            home, _, attr = name.rpartition(".")
            raise Differs(home, f"its buffer {attr} is written from some positions")

    def _joined(self, what: str, key: tuple[str, int], tree: Any, full: Any, dims: Dims, known: Dims | None) -> Any:
        of_all = dict(keyed_leaves(full))
        return map_keyed(lambda path, x: self._whole_for(Place(what, *key, path), x, of_all.get(path), dims), tree)

    def _whole_for(self, place: Place, x: Any, whole: Any, dims: Dims) -> Any:
        """What the whole run had in the place of rows ``x``, which are compared."""
        name, path = place.name, str(place.path)
        if not isinstance(x, Tensor) or not isinstance(whole, Tensor) or x.shape == whole.shape:
            return x
        self._compare(name, f"what is joined there, {path},", x, whole)
        at = [dim for dim, (mine, all_) in enumerate(zip(x.shape, whole.shape, strict=True)) if mine != all_]
        if len(at) != 1:
            raise Differs(name, f"a tensor {tuple(whole.shape)} has positions along several dims")
        dims[path] = self._place(whole, at[0])
        whole = self.exchanged(place, x, whole)
        self._note_joined(whole)
        return whole

    def _part(self, place: Place, x: Any, dims: Dims) -> Any:
        if not isinstance(x, Tensor) or not self._is_within:
            return x
        at = [dim for dim, size in enumerate(x.shape) if size and size % self._length == 0]
        if len(at) != 1:  # such as weights of attention: it stays whole
            return x
        dims[str(place.path)] = self._place(x, at[0])
        return self.parted(place, x, self._cut_off(x, at[0]))

    def _cut_off(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows, also where samples and positions lie in one dim."""
        assert self._rows is not None
        times = x.shape[dim] // self._length
        return x.index_select(dim, (torch.arange(times)[:, None] * self._length + self._rows).flatten())

    def _place(self, whole: Tensor, dim: int) -> int:
        """The dim of positions; ``-1 - dim`` where samples lie in it too."""
        return dim if whole.shape[dim] == self._length else -1 - dim

    def _note_joined(self, whole: Tensor) -> None:
        self._joined_data[whole.data_ptr()] = whole.numel(), whole._version
        self._set(whole, _WHOLE if whole.is_floating_point() else _NONE)
        self.facts.moved += whole.numel() // self._length * whole.is_floating_point()

    # ---- layers

    def called(self, layer: Layer, x: Tensor, compute: Any = None) -> Any:
        if not all(each.name for each in layer.further):
            return NotImplemented
        key = layer.weight, self._layer_calls.get(layer.weight, 0)
        self._layer_calls[layer.weight] = key[1] + 1
        self._is_layer = True
        number = key[1]
        if self._rows is None:
            self._whole.layer_inputs[key] = x.shape, x if self._whole.keeps(layer.weight) else None
            return self._noted_layer(layer, number, x, compute)
        name, is_rows = self.frames[-1].name if self.frames else "", self._label_of(x).is_rows
        if layer.weight in self._plan.needs_whole:
            shape, full = self._whole.layer_inputs.get(key, (None, None))
            if layer.weight in self._plan.gathers and full is not None and x.shape != shape:
                x = self._whole_for(Place("into", name, number, layer.weight), x, full, self.facts.gathers)
            elif is_rows or x.shape != shape:
                raise NeedsWhole(name, layer.weight)
            is_rows = False
        known = self._joined_data.get(x.data_ptr()) if x.numel() else None
        is_direct = known == (x.numel(), x._version)
        self.facts.direct[layer.weight] = is_direct and self.facts.direct.get(layer.weight, True)
        y = super().called(layer, x, compute)
        self._set(y, _ON_ROWS if is_rows else _WHOLE)
        is_scattered = layer.weight in self._plan.scatters
        uses = self.facts.on_rows if is_rows else self.facts.with_whole
        bias = {layer.bias} if is_scattered and layer.bias is not None else set()
        self._note_use({name for name in layer.names if name} - bias, uses)
        self._note_use(bias, self.facts.on_rows)
        if is_scattered and layer.weight not in self._plan.plain.values() and self._is_cut():
            y = self._scattered(Place("from", name, number, layer.weight), layer.weight, y)
        return y

    def _noted_layer(self, layer: Layer, number: int, x: Tensor, compute: Any) -> Any:
        if self.gradients is None:
            return super().called(layer, x, compute)
        name = self.frames[-1].name if self.frames else ""
        with self.busy():
            x = self.gradients.noted(Place("into", name, number, layer.weight), x)
        y = super().called(layer, x, compute)
        with self.busy():
            return self.gradients.noted(Place("from", name, number, layer.weight), y)

    def _scattered(self, place: Place, weight: str, y: Any) -> Any:
        name = place.name
        if not isinstance(y, Tensor):
            return y
        at = [dim for dim, size in enumerate(y.shape[:-1]) if size and size % self._length == 0]
        if len(at) != 1:
            raise Differs(name, f"{weight} gives a tensor {tuple(y.shape)}, not one of {self._length} positions")
        self.facts.scatters[weight] = self._place(y, at[0])
        self.facts.moved += y.numel() // self._length
        with self.busy():
            y = self.parted(place, y, self._cut_off(y, at[0]))
        self._set(y, _ON_ROWS)
        return y

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = self.facts.draws
        result = super().other(func, args, kwargs)
        if func not in DROPOUTS:  # of attention: it is dropped alike on every rank, or is tp's
            self.facts.draws = draws
        return result

    def attend(self, call: Attention) -> Any:
        """As the model computes it: over all positions, or over this rank's alone, which is not the same."""
        return call.finish(call.kernel(call.q, call.k, call.v, None))

    # ---- labels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_noting:
            return func(*args, **(kwargs or {}))
        self._is_layer = False
        result = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__iter__:
            result = list(result)
        if self._rows is not None and not self._is_busy and not self._is_layer:
            self._label(func, [*args, *(kwargs or {}).values()], result)
        return iter(result) if func is Tensor.__iter__ else result

    def applied(self, kind: type, plain: Any, args: tuple[Any, ...]) -> Any:
        result = super().applied(kind, plain, args)
        if self._rows is not None and not self._is_busy:
            self._label(kind, args, result)
        return result

    def replaced(self, before: Any, x: Any) -> None:
        if x is not before and self._rows is not None:
            self._set(x, self._label_of(before))

    def scripted(self, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = plain(*args, **kwargs)
        if self._rows is not None and not self._is_busy:
            self._label(plain, [*args, *kwargs.values()], result)
        return result

    def _label(self, func: Any, given: Sequence[Any], result: Any) -> None:
        made = [x for x in flat([result]) if isinstance(x, Tensor)]
        if func in _WRITES:
            made = [given[0]]
        if not made:
            return
        name = self.frames[-1].name if self.frames else ""
        of_given = []
        for x in flat(given):
            if isinstance(x, Tensor):
                self._refuse_unknown(name, func, x)
                of_given.append((x, self._label_of(x)))
        params = frozenset().union(*(label.params for _, label in of_given))
        if params and in_transform() and self._may_be_of_rows():
            raise Differs(
                name,
                f"within torch.vmap, or a transform of torch.func, it uses {min(params)}: with which positions is not seen",
            )
        if any(label.is_rows for _, label in of_given):
            if any(label.is_whole and x.is_floating_point() for x, label in of_given):
                raise Differs(
                    name, f"{getattr(func, '__name__', func)} of what every rank has whole and of some positions"
                )
            self._note_use(params, self.facts.on_rows)
            label = _ON_ROWS
        elif any(label.is_whole for _, label in of_given):
            self._note_use(params, self.facts.with_whole)
            label = _WHOLE
        else:
            label = _Label(params=params)
        if func in _CUTS_OFF:
            label = _Label(is_rows=label.is_rows)
        for x in made:
            if x.is_floating_point() or x.is_complex() or label.is_rows:
                self._set(x, label)
            if x._base is not None and any(x is each for each, _ in of_given):  # a view was written
                before = self._label_of(x._base)
                if before.is_whole and label.is_rows:
                    raise Differs(name, "some positions are written into what every rank has whole")
                self._set(x._base, before if before.is_rows else label)

    def _may_be_of_rows(self) -> bool:
        """Whether the code that runs may have rows: that of blocks, and the root's behind the first of them."""
        is_island = any(frame.name in self._plan.islands for frame in self.frames)
        return not is_island and (self._inside > 0 or bool(self.facts.cut))

    def _refuse_unknown(self, name: str, func: Any, x: Tensor) -> None:
        """Raises Differs for a tensor with gradients that was made in a way that no mode sees, as within torch.vmap, where it may be of rows."""
        if not x.requires_grad or x.is_leaf or not x.is_floating_point():
            return
        ref, _ = self._labels.get(id(x), (None, _NONE))
        if ref is not None and ref() is x:
            return
        if self._may_be_of_rows() and (self._num_rows in x.shape or self._length not in x.shape):
            raise Differs(
                name,
                f"{getattr(func, '__name__', func)} is given a tensor that was made in a way that is not seen, such as torch.vmap: which "
                "parameters it is made of is not known",
            )

    def _label_of(self, x: Tensor) -> _Label:
        if isinstance(x, nn.Parameter) and (name := self._trial.name_of(x)) is not None:
            return _Label(params=frozenset([name]))
        ref, label = self._labels.get(id(x), (None, _NONE))
        return label if ref is not None and ref() is x else _NONE

    def _set(self, x: Tensor, label: _Label) -> None:
        if not isinstance(x, nn.Parameter):
            self._labels[id(x)] = weakref.ref(x), label

    def _label_ends(self, tree: Any, full: Any) -> None:
        """What has another shape than in the whole run is of rows, whatever has made it."""
        of_all = dict(keyed_leaves(full))
        for path, x in keyed_leaves(tree):
            other = of_all.get(path)
            if isinstance(x, Tensor) and isinstance(other, Tensor) and x.shape != other.shape:
                self._set(x, _ON_ROWS)

    def _note_use(self, names: Iterable[str], uses: dict[str, str]) -> None:
        for name in names:
            uses.setdefault(name, self.frames[-1].name if self.frames else "")

    @staticmethod
    def _tensors(tree: Any) -> list[Tensor]:
        return [x for _, x in keyed_leaves(tree) if isinstance(x, Tensor)]
