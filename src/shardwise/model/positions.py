"""The proof that a model may be run on some rows of its sequences: its own code is run once whole, and then once for each rank on that
rank's rows, on one process, without weights and without groups. The output of each module, and each key and value of attention, must be
the rows of those of the whole run; the first module whose inputs are right and whose output is not is named.

A linear layer is replaced by a cheap fixed function of each row, so that no weights are needed and no products are computed. An exchange
between ranks is "what the whole run had there", so that no rank waits for another.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointFunction

from shardwise._torch.autograd import is_of_operator
from shardwise.errors import UnsupportedError
from shardwise.model.attend import SDPA, Attention, now, of_sdpa
from shardwise.model.cheap_layers import cheap
from shardwise.model.compared_rows import ComparedRows
from shardwise.model.layers import Layer, bound
from shardwise.model.leaves import DEVICE, DRAWS, DROPOUT, DROPOUTS, DROPPING
from shardwise.model.lift import lifted
from shardwise.model.names import canonical_tensors
from shardwise.model.own_positions import CallPlaces, argument_of, kind_of, of_rows
from shardwise.model.products import dim_of, is_product, second_of, with_second
from shardwise.model.pytrees import keyed_leaves, map_keyed, with_own_containers
from shardwise.model.row_facts import Differs, Dims, Facts, Plan, Whole
from shardwise.model.row_gradients import Gradients, Place
from shardwise.model.run import Run
from shardwise.model.tensors import same_bytes, version_of
from shardwise.model.trial import Trial
from shardwise.model.unseen_calls import has_backward_hooks, is_users_hook

_OF_FEATURES = (functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.feature_alpha_dropout)
"""One number for all that lies behind the first two dims."""
_OF_BACKWARDS = (Tensor.register_hook, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
_CUTS_OFF = (Tensor.detach, Tensor.detach_, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_DRAWS = DRAWS | {"gumbel_softmax", "rrelu", "rrelu_"}
_BY_FREQUENCY = {functional.embedding: 5, functional.embedding_bag: 5, torch.embedding: 3}
"""Function -> the number of its argument ``scale_grad_by_freq``."""


@dataclasses.dataclass
class _Frame:
    name: str
    key: tuple[str, int]
    is_right: bool = True  # its inputs are
    places: CallPlaces = dataclasses.field(default_factory=CallPlaces)
    num_looked_up: int = 0
    num_drops: int = 0
    num_draws: int = 0
    given: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)  # and how often it was written


class Rows(ComparedRows):
    """Within: a model runs, whole (``rows`` None) or on some rows.

    Args:
        known: facts that are followed, and not looked for.
        heads_over: attention is computed in so many parts of its heads.
    """

    def __init__(
        self,
        trial: Trial,
        whole: Whole,
        plan: Plan,
        length: int,
        rows: Tensor | None,
        known: Facts | None = None,
        heads_over: int = 1,
    ):
        super().__init__(trial, length, rows)
        self._heads_over, self._whole, self._plan, self._known = heads_over, whole, plan, known
        self.facts = Facts()
        self.gradients: Gradients | None = None  # that are noted, or compared
        self._draws_all = True  # also what has no rows
        self._has_parts = True  # of its gradient, what every rank has whole
        self._thread, self.has_threads = threading.get_ident(), False
        self.frames: list[_Frame] = []
        self._calls: dict[str, int] = {}
        self._hooked: list[bool] = []  # for each module that is called: whether a hook on it runs, and not its own code
        self._inside = 0  # of modules of the cut
        self._is_busy = False  # a kernel, or a call that makes positions, computes
        self._is_noting = False  # what a module is given, or returns, is looked at: none of its functions is called
        self._buffers: dict[str, tuple[Tensor | None, int]] = {}

    @property
    def rows_of_masks(self) -> Tensor | None:
        """The positions for whose queries transformers makes its masks; None: all."""
        return self._rows if self._plan.masks_of_rows else None

    @property
    def is_whole(self) -> bool:
        return self._rows is None

    def keeps(self, name: str) -> bool:
        return self._whole.keeps(name)

    # ---- modules

    def is_elsewhere(self) -> bool:
        """Whether another thread runs; it is noted."""
        self.has_threads |= threading.get_ident() != self._thread
        return threading.get_ident() != self._thread

    def _noted(self, what: str, key: tuple[str, int], tree: Any) -> Any:
        """Arguments of a module, or what it returns, whose gradients are noted if those are looked at."""
        if self.gradients is None:
            return tree
        if what == "out":
            copies = self.gradients.copies_all or key in self.gradients.rewritten
        else:
            copies = key[0] not in self.gradients.writes or self._exchanges(key[0])
        return self.gradients.noted_in(what, key, tree, self.is_part, copies=copies)

    def _exchanges(self, name: str) -> bool:
        """Whether the arguments of a module are exchanged, and so copies."""
        return name in self._plan.cut or name in self._plan.islands

    def is_part(self, x: Tensor) -> bool | None:
        """Whether each rank has a part of the gradient of what they all have, and not the whole gradient; None: it is not known."""
        return True

    def is_part_of(self, name: str) -> bool | None:
        return True

    def before(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.gradients is not None and self.gradients.is_backward:
            raise Differs(name, "it runs in the backward, by code that is not torch's")
        self._hooked[-1] = False
        if not name:
            self._buffers = {n: (x, 0 if x is None else x._version) for n, x in self._all_buffers()}
        frame = _Frame(name, (name, self._calls.get(name, 0)))
        self._calls[name] = frame.key[1] + 1
        self.frames.append(frame)
        if self._rows is None:
            args, kwargs = self._noted("in", frame.key, (args, kwargs))
            frame.given = [(x, version_of(x)) for _, x in keyed_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if self._whole.keeps(name):
                self._whole.inputs[frame.key] = with_own_containers((args, kwargs))
            return args, kwargs
        if not self._whole.keeps(name):
            return args, kwargs
        full = self._whole.inputs.get(frame.key)
        if full is None:
            raise Differs(name, "it is called more often than on all positions")
        is_cut = name in self._plan.cut
        owner = self._owner()
        if is_cut and (not self._inside or owner is not None):
            args, kwargs = self._cut(name, (args, kwargs), dict(keyed_leaves(full)))
        self._inside += is_cut
        if name in self._plan.islands:
            dims = self.facts.islands.setdefault(name, [{}, {}])[0]
            known = None if self._known is None else self._known.islands.get(name, [{}, {}])[0]
            return self._joined("in", frame.key, (args, kwargs), full, dims, known)  # type: ignore[no-any-return]
        frame.is_right = self._is_same((args, kwargs), full)
        if name and name in self._plan.owners and self._inside == 1:
            owner = self.frames[-2].name
        if is_cut and owner is not None and self._known is None and not frame.is_right:
            raise Differs(owner, f"what it gives to {name} is not what these positions have")
        if not frame.is_right and self.gradients is not None:
            self.gradients.unlike.add(name)
        return self._noted("in", frame.key, (args, kwargs)) if frame.is_right else (args, kwargs)

    def _owner(self) -> str | None:
        """The module on rows of which a block is called, which is in no other block."""
        owners = (frame.name for frame in self.frames[:-1] if frame.name in self._plan.owners)
        return next(owners, None) if self._inside == 1 else None

    def in_hooks(self, *, begins: bool) -> None:
        """Called before the first hook on a module that is called, and behind its own code before the first hook there."""
        if begins:
            self._hooked.append(True)
        else:
            self._hooked[-1] = True

    def after(self, name: str, output: Any) -> Any:
        frame = self.frames.pop()
        self._hooked.pop()
        if not name:
            self._note_buffers()
        self._inside -= name in self._plan.cut
        if self._rows is None:
            if any(version_of(x) != version for x, version in frame.given):
                self._whole.writes.add(name)
            frame.given.clear()
            output = self._noted("out", frame.key, output)
            if self._whole.keeps(name):
                self._whole.outputs[frame.key] = with_own_containers(output)
                self._whole.versions[frame.key] = {
                    path: version_of(x) for path, x in keyed_leaves(output) if isinstance(x, Tensor)
                }
            return output
        if not self._whole.keeps(name):
            return output
        full = dict(keyed_leaves(self._whole.outputs[frame.key]))
        if name in self._plan.islands:
            dims = self.facts.islands[name][1]
            output = map_keyed(lambda path, x: self._part(Place("out", *frame.key, path), x, dims), output)
        if frame.is_right and name not in self._plan.unjudged:
            versions = self._whole.versions[frame.key]
            for path, x in keyed_leaves(output):
                if isinstance(x, Tensor) and (path not in versions or version_of(full[path]) == versions[path]):
                    self._compare(name, f"its output {path}".rstrip(), x, full.get(path))
                    if x.shape == full[path].shape and self._length in x.shape and self._gathers(name):
                        raise Differs(name, "what it returns is of all positions, and not of this rank's")
                    if not name and x.shape != full[path].shape:
                        sizes = zip(x.shape, full[path].shape, strict=True)
                        self.facts.outputs[path] = next(dim for dim, (mine, all_) in enumerate(sizes) if mine != all_)
            output = self._noted("out", frame.key, output)
        if name in self._plan.join or name in self._plan.keys:
            of_kind = "join" if name in self._plan.join else "keys"
            dims = getattr(self.facts, of_kind).setdefault(name, {})
            known = None if self._known is None else getattr(self._known, of_kind).get(name, {})
            output = self._joined("out", frame.key, output, self._whole.outputs[frame.key], dims, known)
        return output

    def run_backward(self, seen: Run) -> None:
        """Called at a run's end with what it has returned and kept."""
        if self.gradients is not None:
            ends = list({id(x): x for x in (*seen.output, *(x for _, x in seen.kept))}.values())
            params = dict(self._trial.module.named_parameters())
            with self.busy():
                self.gradients.run_backward(ends, params, self.is_part_of, self._calls)

    def _all_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, owner, attr in canonical_tensors(self._trial.module, "_buffers"):
            yield name, owner._buffers[attr]

    def _note_buffers(self) -> None:
        found: dict[str, Tensor] = {}
        for name, x in self._all_buffers():
            before, version = self._buffers.get(name, (None, 0))
            if x is None or x.is_meta or (x is before and x._version == version and name not in self._whole.buffers):
                continue
            if self._rows is None:
                self._whole.buffers[name] = x.detach().clone()
            elif not _is_equal(x, self._whole.buffers.get(name)):
                found[name] = x.detach().clone()
        if self._rows is not None:
            self.wrote(found)

    def wrote(self, found: dict[str, Tensor]) -> None:
        """Called at a run's end with the buffers that hold something else than after a run on all positions."""
        self._whole.on_rows.append(found)

    def _gathers(self, name: str) -> bool:
        """Whether a module's own code has all positions of keys: what it returns must be of this rank's."""
        return name in self._plan.products or any(key.rpartition(".")[0] == name for key in self._plan.keys)

    def _cut(self, name: str, given: Any, full: Mapping[str, Any]) -> Any:
        """The arguments of a module, of which what has the length becomes rows. ``full``: those of the whole run."""
        assert self._rows is not None
        dims: Dims = {}
        on_rows: Dims = {}
        calls = self.facts.cut.setdefault(name, [])
        known = None
        if self._known is not None:
            known = [*(of_call[0] for of_call in self._known.cut.get(name, [])), *[{}] * len(calls)][len(calls)]
        calls.append([dims, on_rows])

        def cut(path: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or path in self._plan.whole.get(name, ()):
                return x
            whole = full.get(path)
            at = [
                dim for dim, size in enumerate(whole.shape if isinstance(whole, Tensor) else ()) if size == self._length
            ]
            dim = at[0] if len(at) == 1 or (len(at) == 2 and self._plan.square) else None
            if known is not None:
                dim = known.get(path, dim)
            if dim is None or dim >= x.dim():
                return x
            if x.shape[dim] != self._length or (known is not None and path not in known):
                if x.shape[dim] == self._num_rows:
                    on_rows[path] = dim
                return x
            dims[path] = dim
            return self.parted(Place("in", *self.frames[-1].key, path), x, x.index_select(dim, self._rows))

        return map_keyed(cut, given)

    def parted(self, place: Place, x: Tensor, part: Tensor) -> Tensor:
        """This rank's part of what every rank has, with a part of its gradient."""
        return part

    def _joined(self, what: str, key: tuple[str, int], tree: Any, full: Any, dims: Dims, known: Dims | None) -> Any:
        """A tree in which what the whole run had takes the place of its rows, which are compared. Adds to ``dims`` where; ``known``: there
        alone."""
        of_all, name = dict(keyed_leaves(full)), key[0]

        def join(path: str, x: Any) -> Any:
            whole = of_all.get(path)
            if not isinstance(x, Tensor) or not isinstance(whole, Tensor) or x.shape == whole.shape:
                return x
            if known is not None and path not in known:
                return x
            self._compare(name, f"what is joined there, {path},", x, whole)
            dims[path] = self._dim_of(name, x, whole)
            if known is not None and known[path] != dims[path]:
                raise Differs(name, f"{path} of it has its positions along dim {dims[path]}")
            return self.exchanged(Place(what, *key, path), x, whole)

        return map_keyed(join, tree)

    def exchanged(self, place: Place, mine: Tensor, whole: Tensor) -> Tensor:
        """What the whole run had, in the place of this rank's rows; its gradient is a part on each rank."""
        return whole if self.gradients is None else self.gradients.joined(place, mine, whole)

    def _part(self, place: Place, x: Any, dims: Dims) -> Any:
        assert self._rows is not None
        if not isinstance(x, Tensor) or self._length not in x.shape:
            return x
        at = [dim for dim, size in enumerate(x.shape) if size == self._length]
        if len(at) != 1:  # such as weights of attention: it stays whole
            return x
        dims[str(place.path)] = at[0]
        return x.index_select(at[0], self._rows)

    # ---- functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_noting:
            return func(*args, **(kwargs or {}))
        func, args, kwargs = lifted(func, args, kwargs or {}, narrow=True)
        if is_product(func) and self._is_own_code() and self.frames:
            args, kwargs = self._product(self.frames[-1], func, args, kwargs)
        if func in _BY_FREQUENCY and not self._is_busy:
            self._look_up(args, kwargs, _BY_FREQUENCY[func])
        return super().__torch_function__(func, types, args, kwargs)

    def _look_up(self, args: Any, kwargs: Any, number: int) -> None:
        """Refuses an embedding that divides gradients by how often an index is there, where it is given some of them."""
        if not (kwargs.get("scale_grad_by_freq") or (len(args) > number and args[number])):
            return
        given = [x for x in (*args[:2], *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()]
        frame = self.frames[-1] if self.frames else _Frame("", ("", 0))
        key, frame.num_looked_up = (*frame.key, frame.num_looked_up), frame.num_looked_up + 1
        if self._rows is None:
            self._whole.looked_up[key] = given
        elif not all(map(_is_equal, given, self._whole.looked_up.get(key, ()))) or key not in self._whole.looked_up:
            raise Differs(frame.name, "an embedding with scale_grad_by_freq may depend on all positions")

    def _product(self, frame: _Frame, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a product in a module's own code: its second factor is that of the whole run where all positions are needed."""
        place, factor = self._placed(frame, "product"), second_of(func, args, kwargs)
        key = (*frame.key, place)
        if self._rows is None:
            if self._whole.keeps(frame.name) or frame.name in self._whole.products_of:
                self._whole.products[key] = factor
            if self.gradients is not None and isinstance(factor, Tensor) and self.weight_of(factor) is None:
                with self.busy():
                    return with_second(func, args, kwargs, self.gradients.noted(Place("factor", *key), factor))
            return args, kwargs
        full = self._whole.products.get(key)
        if (
            not isinstance(factor, Tensor)
            or not isinstance(full, Tensor)
            or any(each.name in self._plan.islands for each in self.frames)
        ):
            return args, kwargs
        if self._known is not None:
            dim = dim_of(self._known.products.get(frame.name, []), place)
        elif frame.name in self._plan.products and ("product", place) not in self._plan.products[frame.name]:
            sizes = enumerate(zip(factor.shape, full.shape, strict=False))
            at = [dim for dim, (mine, all_) in sizes if mine == self._num_rows and all_ == self._length]
            dim = at[0] if len(at) == 1 and factor.dim() == full.dim() else None
        else:
            dim = None
        if dim is None:
            return args, kwargs
        self._compare(frame.name, "what it multiplies with", factor, full)
        if factor.shape == full.shape or dim != self._dim_of(frame.name, factor, full):
            raise Differs(frame.name, f"what it multiplies with has {tuple(factor.shape)} for {tuple(full.shape)}")
        made = self.facts.products.setdefault(frame.name, [])
        if [place, dim] not in made:
            made.append([place, dim])
        with self.busy():
            full = self.exchanged(Place("factor", *key), factor, full)
        return with_second(func, args, kwargs, full)

    def applied(self, kind: type, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._is_busy or self.is_elsewhere():
            return plain(*args)
        if kind is CheckpointFunction:  # nothing is run again in the backward
            return args[0](*args[2:])
        self._note_function(kind.__name__, is_own=is_of_operator(kind) or is_users_hook(kind))
        return plain(*args)

    def replaced(self, before: Any, x: Any) -> None:
        """``x`` takes the place of ``before``."""

    def scripted(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of torch.jit.script gives."""
        return plain(*args, **kwargs)

    def keeps_by(self, hook: Callable[[Tensor], Any]) -> bool:
        """Whether tensors are kept for backwards by hooks of the model's code; those of torch, as of a checkpoint, keep them as they are."""
        is_own = is_users_hook(hook)
        if not self._is_busy and not self.is_elsewhere():
            self._note_function("saved_tensors_hooks", is_own=is_own)
        return is_own

    def _note_function(self, name: str, *, is_own: bool = False, cut_off: Sequence[Any] = ()) -> None:
        if self._rows is None:
            self._whole.functions.append(name)
            self._whole.has_own_backwards |= is_own
            cuts_off = self._trial.module.training and any(isinstance(x, Tensor) and x.requires_grad for x in cut_off)
            if is_own or cuts_off:  # in eval mode the whole model is run without gradients
                self._whole.hides.add(self.frames[-1].name if self.frames else "")

    def refuse_backward_hooks(self, name: str, given: Any, output: Any) -> None:
        """Refuses backward hooks of the user's own on a module, which may go by a threshold, but where each rank has all of its gradients."""
        if self._rows is None or not has_backward_hooks(self._trial.module.get_submodule(name)):
            return
        key = name, self._calls[name] - 1
        mine = _shapes_of(given), _shapes_of(output)
        if mine != (_shapes_of(self._whole.inputs.get(key)), _shapes_of(self._whole.outputs.get(key))):
            raise Differs(name, "its backward hook may depend on all positions")
        if self._has_parts:
            raise Differs(name, "its backward hook gets a part of a gradient on each rank", is_of_gradients=True)

    def called(self, layer: Layer, x: Tensor, compute: Any = None) -> Any:
        if not all(each.name for each in layer.further):
            return NotImplemented
        y = cheap(layer, x, self._trial.num_outputs(layer, x))
        if self.gradients is None:
            return y
        with self.busy():
            return self.gradients.weighted(layer.weight, y)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rows is None and not self._is_busy:
            given = args if func in _CUTS_OFF or not torch.is_grad_enabled() else ()
            self._note_function(getattr(func, "__name__", str(func)), is_own=func in _OF_BACKWARDS, cut_off=given)
        if func in DROPOUTS:
            x, chance, _ = bound(DROPOUT, args, kwargs)
            is_of_rows = not self._is_busy and self._note_drop(func, x)
            self.facts.draws |= chance != 0 and (is_of_rows or self._draws_all)
            return x
        if func is SDPA and self._is_busy:  # of a kernel
            args, kwargs = self._without_dropout(args, kwargs)
        if func == DEVICE and self._trial.name_of(args[0]) is not None:
            return torch.device("cpu")  # as of all others: a model makes tensors where its weights are
        if not self._is_own_code():
            return func(*args, **kwargs)
        if func is SDPA:
            return self.attend(of_sdpa(*self._without_dropout(args, kwargs)))
        if getattr(func, "__name__", "") in _DRAWS:
            return self._drawn(func(*args, **kwargs), func.__name__)
        if (kind := kind_of(func)) is not None and (frame := self._maker()) is not None:
            place = self._placed(frame, kind)
            argument = self._argument(frame.name, kind, place, func, args, kwargs)
            if self._rows is None:
                if argument is not None:
                    self._whole.made.setdefault(frame.name, {})[kind, place] = None
            elif argument is not None:
                made = self.facts.positions.setdefault(frame.name, [])
                if [kind, place, argument] not in made:
                    made.append([kind, place, argument])
                try:
                    with self.busy():
                        return of_rows(kind, argument, func, args, kwargs, self._rows, self._length)
                except UnsupportedError as error:
                    raise Differs(frame.name, error.given) from error
        return func(*args, **kwargs)

    def _is_own_code(self) -> bool:
        """Whether the own code of a module runs, and no hook, kernel, mask or call that makes positions."""
        return not self._is_busy and now.attends is self and not (self._hooked and self._hooked[-1])

    def _drawn(self, result: Any, what: str) -> Any:
        """Random numbers that a module's own code has drawn, by ``what``; raises Differs for those of some positions."""
        frame = self.frames[-1] if self.frames else _Frame("", ("", 0))
        key, frame.num_draws = (*frame.key, frame.num_draws), frame.num_draws + 1
        shape = result.shape if isinstance(result, Tensor) else None
        if self._rows is None:
            self._whole.drawn[key] = shape
        elif shape != self._whole.drawn.get(key, shape):
            raise Differs(frame.name, f"it draws random numbers by {what} for the positions it is given", is_drawn=True)
        return result

    def _note_drop(self, func: Any, x: Tensor) -> bool:
        """Notes where what is dropped has positions; returns whether these are rows."""
        get = self._trial.module.get_submodule
        frame = next((each for each in reversed(self.frames) if not isinstance(get(each.name), DROPPING)), None)
        if frame is None:
            return False
        number, frame.num_drops = frame.num_drops, frame.num_drops + 1
        if self._rows is None:
            self._whole.drops[*frame.key, number] = x.shape
            return False
        whole = self._whole.drops.get((*frame.key, number))
        if whole is None or len(whole) != x.dim():
            raise Differs(frame.name, "it drops something else than on all positions")
        most = 2 if func in _OF_FEATURES and x.dim() > 2 else 1 if func in _OF_FEATURES else x.dim()
        sizes = zip(x.shape, whole, strict=True)
        dim = next((dim for dim, (mine, all_) in enumerate(sizes) if mine != all_ and dim < most), -1)
        self.facts.note_drop(frame.name, number, dim)
        return dim >= 0

    def _maker(self) -> _Frame | None:
        """The forward whose own code runs, if its module makes positions."""
        if self._rows is None:
            return self.frames[-1] if self.frames else None
        if any(frame.name in self._plan.islands for frame in self.frames):
            return None
        return self.frames[-1] if self.frames and self.frames[-1].name in self._plan.positions else None

    def _placed(self, frame: _Frame, kind: str) -> str:
        """The place of a call that a module's own code makes now; it is noted."""
        place = frame.places.take(kind)
        if self._rows is not None:
            self.facts.note_seen(frame.name, kind, place)
        return place

    def _argument(
        self, name: str, kind: str, place: str, func: Any, args: Any, kwargs: Any
    ) -> int | list[int | None] | None:
        if self._known is not None:
            known = self._known.positions.get(name, [])
            return next((arg for of, at, arg in known if (of, at) == (kind, place)), None)
        argument = argument_of(kind, func, args, kwargs, self._num_rows, self._length)
        if kind == "view" and isinstance(argument, list) != bool(self._inside and self._gathers(name)):
            return None
        if isinstance(argument, int) and (kind, place) in self._plan.products.get(name, ()):
            return [None, argument]
        return argument

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Within: functions are not those of the model's code."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Within: functions are those of a comparison alone, which are most that are called in a run."""
        before, self._is_noting = self._is_noting, True
        try:
            with self.busy():
                yield
        finally:
            self._is_noting = before

    def attend(self, call: Attention) -> Any:
        """What a call of attention gives: with keys that are rows, over the keys of the whole run."""
        frame = self.frames[-1] if self.frames else _Frame("", ("", 0))
        place = self._placed(frame, "attention")
        key = (*frame.key, place)
        with self.busy():
            if self._rows is None:
                call = self._noted_call(key, call)
                result = call.kernel(call.q, call.k, call.v, None)
                of_shape = call.q.new_empty(*call.q.shape[:-1], 0)
                kept = (of_shape, None) if self._whole.is_of_some and self._heads_over == 1 else (call.q, result)
                self._whole.attention[key] = kept[0], call.k, call.v, kept[1]
                return call.finish(result)
            if key not in self._whole.attention:
                raise Differs(frame.name, "it attends more often than on all positions")
            queries, keys, values, whole = self._whole.attention[key]
            of_rows = self.facts.attention.setdefault(frame.name, [])
            is_rows = call.k.shape != keys.shape
            if call.q.shape[:-1] != queries.shape[:-1]:
                self.facts.queries.setdefault(frame.name, []).append(place)
            if self._known is not None:
                is_rows = place in self._known.attention.get(frame.name, ())
            if not is_rows:
                return call.finish(call.kernel(call.q, call.k, call.v, None))
            if place not in of_rows:
                of_rows.append(place)
            if call.mask is None:
                self.facts.note_seen(frame.name, "causal" if call.is_causal else "not causal", place)
            if call.v.shape == values.shape:
                raise Differs(
                    frame.name, "what its attention takes for values is of all positions, and its keys are not"
                )
            self._compare(frame.name, "what its attention takes for keys", call.k, keys)
            self._compare(frame.name, "what its attention takes for values", call.v, values)
            if call.mask is not None and not call.has_mask_of(keys.shape[-2]):
                why = f"a mask {tuple(call.mask.shape)} that is made from the length of this rank's rows, for {keys.shape[-2]} keys"
                raise Differs(frame.name, why, is_mask=True)
            keys = self.exchanged(Place("keys", *key), call.k, keys)
            values = self.exchanged(Place("values", *key), call.v, values)
            if self._heads_over > 1:
                self._compare(frame.name, "what its attention takes for queries", call.q, queries)
                queries = self.exchanged(Place("queries", *key), call.q, queries)
                result = self._by_heads(frame.name, call, queries, keys, values)
            else:
                result = call.kernel(call.q, keys, values, self._rows)
            if whole is not None:  # else what its block returns is compared
                self._compare(frame.name, "what its attention gives", result, whole)
            return call.finish(result)

    def _noted_call(self, key: tuple[str, int, str], call: Attention) -> Attention:
        if self.gradients is None:
            return call
        given = {"q": "queries", "k": "keys", "v": "values"}
        return call._replace(
            **{name: self.gradients.noted(Place(what, *key), getattr(call, name)) for name, what in given.items()}
        )

    def _without_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of torch's attention, without dropout."""
        chance = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self.facts.draws |= bool(chance)
        return (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {
            **kwargs,
            **({"dropout_p": 0.0} if len(args) < 5 else {}),
        }

    def _by_heads(self, name: str, call: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's rows of what parts of the heads give, each for all positions."""
        num = self._heads_over
        if q.dim() != 4 or any(x.shape[1] % num for x in (q, k, v)):
            heads = " and ".join(str(x.shape[1]) for x in (q, k))
            raise Differs(name, f"{heads} heads of queries and of keys, which {num} does not divide", is_of_heads=True)
        parts = zip(q.chunk(num, 1), k.chunk(num, 1), v.chunk(num, 1), strict=True)
        result = torch.cat([call.kernel(*part, None) for part in parts], 1)
        assert self._rows is not None
        return result.index_select(-2, self._rows)


def _is_equal(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and x.dtype == y.dtype and same_bytes(x.detach(), y)


def _shapes_of(tree: Any) -> list[tuple[str, torch.Size]]:
    return [(path, x.shape) for path, x in keyed_leaves(tree) if isinstance(x, Tensor)]
