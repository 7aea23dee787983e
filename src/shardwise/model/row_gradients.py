"""The backward half of the proof on rows: code may compute the same values on rows and give other gradients, by ``detach``, a hook or a
backward of its own. So the backward is run too, whole and on each rank's rows: where ranks exchange, it goes on with what the whole
run had there, as the forward does; where every rank has a part of a gradient, the parts of all ranks must add up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.model.pytrees import map_keyed
from shardwise.model.row_facts import Differs

_ALLOWED = 1e-9  # relative to the largest number of a gradient, along its last dim
_NOTHING = 1e-12  # relative to what a gradient is made of: what is 0 but for rounding


class Place(NamedTuple):
    """Where a gradient is looked at.

    Attributes:
        what: ``in`` or ``out`` of a module, or what else of it.
        name: of the module.
        call: of it; or of what else.
        path: in its arguments, or in what it returns.
    """

    what: str
    name: str
    call: int
    path: str | int = ""


class BackwardDiffers(Differs):
    """A module's backward does on rows what it does not on all."""


class Runs(Protocol):
    @property
    def is_whole(self) -> bool: ...

    def keeps(self, name: str) -> bool: ...

    def rows_of(self, full: Tensor, shape: Any) -> Tensor | None: ...

    def replaced(self, before: Any, x: Any) -> None: ...


@dataclasses.dataclass
class Gradients:
    """The gradients of one run on all positions, and what is left of them when those of each rank are taken off.

    Args:
        num_ranks: what every rank returns gets such a share of the gradient on each; 1: all of it.
        writes: modules that write what they are called with.
        rewritten: modules, and the numbers of their calls, whose output is written later.
        copies_all: code of the model has backwards of its own, which may write the gradients that they are given; outputs, also of layers, are copies
            too.
        scale: of the gradients that the output gets. 0: none may arise where a rank has a part, as one without positions would add it too.
    """

    num_ranks: int
    scale: float = 1.0
    writes: Collection[str] = ()
    rewritten: Collection[tuple[str, int]] = ()
    copies_all: bool = True
    mode: Any = None
    is_backward: bool = False

    def __post_init__(self) -> None:
        self._full: dict[Place, Tensor] = {}
        self._left: dict[Place, Tensor] = {}
        self._wrong: set[Place] = set()
        self._ended: list[tuple[str, int]] = []
        self.unlike: set[str] = set()
        """Modules that ranks call with something else, such as an expert with its tokens: which of their calls are the same is not known."""
        self._calls: dict[str, int] = {}
        self._weights: dict[tuple[str, int], Tensor] = {}  # of layers, which have none: factors of their outputs
        self._sizes: dict[Place, float] = {}
        self._unkept: dict[Place, float] = {}  # how large those are of modules that are not compared
        self._middle = 0.0
        self._last = ""  # module whose output has got a gradient
        self._joined: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def begin(self, mode: Runs) -> None:
        self.mode = mode

    def end(self) -> None:
        """A run has ended. What is kept in its graph has hooks that refer to this object: nothing here may refer to the run, as Python's garbage
        collector does not see through graphs."""
        self.mode = None
        self._joined.clear()
        self._weights.clear()

    def weighted(self, weight: str, y: Tensor) -> Tensor:
        """The outputs of a layer, times a factor that has its weight's place: its gradient depends on those of all outputs."""
        if not torch.is_grad_enabled():
            return y
        key = weight, y.shape[-1]
        if key not in self._weights:
            self._weights[key] = torch.ones(y.shape[-1], dtype=y.dtype, requires_grad=True)
        return (torch.mul if self.copies_all else _Weighted.apply)(y, self._weights[key])  # type: ignore[no-any-return]

    def noted(self, place: Place, x: Any, *, is_part: bool | None = True, copies: bool = False) -> Any:
        """``x``, whose gradient by this use is noted, or compared: one that every rank has whole gets a part of it on each (``is_part``), or all
        of it, or it is not known (None). ``copies``: what may be written in place: of a view that is, the graph leaves the hook out."""
        if not _has_gradient(x) or isinstance(x, nn.Parameter):
            return x
        y = x.clone() if copies else x.view_as(x)
        y.register_hook(lambda grad: self._arrived(place, grad, is_part))
        given = y.clone() if copies else y.view_as(y)  # which the model's code may put hooks on: they are called first
        self.mode.replaced(x, given)
        return given

    def noted_in(
        self, what: str, key: tuple[str, int], tree: Any, is_part: Callable[[Tensor], bool | None], *, copies: bool
    ) -> Any:
        """Arguments of a module, or what it returns, as :meth:`noted`; a tensor that is there twice stays one."""
        made: dict[int, Any] = {}

        def note(path: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in made:
                made[id(x)] = self.noted(Place(what, *key, path), x, is_part=is_part(x), copies=copies)
            return made[id(x)]

        if what == "out" and self.mode.is_whole:
            self._ended.append(key)
        return map_keyed(note, tree)

    def joined(self, place: Place, mine: Any, whole: Tensor, *, is_sum: bool = True) -> Tensor:
        """What the whole run had, in the place of a rank's rows. ``is_sum``: its gradient is a part on each rank; else it is whole. A tensor
        that is there twice stays one."""
        if not _has_gradient(mine) or not whole.is_floating_point():
            return whole
        key = place[:3], id(mine), id(whole)
        if key not in self._joined:
            back = functools.partial(self._exchanged, place, mine.shape, is_sum)
            self._joined[key] = mine, _Exchanged.apply(mine, whole.detach(), back)
        return self._joined[key][1]

    def parted(self, place: Place, x: Tensor, part: Tensor) -> Tensor:
        """A rank's part of a tensor, whose gradient is whole on every rank."""
        if not _has_gradient(x):
            return part
        return _Exchanged.apply(x, part.detach(), functools.partial(self._exchanged, place, x.shape, False))  # type: ignore[no-any-return]

    def run_backward(
        self,
        ends: Sequence[Tensor],
        params: Mapping[str, Tensor],
        kind_of: Callable[[str], bool | None],
        calls: Mapping[str, int],
    ) -> None:
        """Runs the backward of a run from gradients that are the same for all runs, and compares those of parameters: each rank has a part
        (``kind_of`` True), or the whole; None: that is not known. ``calls``: how often each module was called.

        Raises:
            UnsupportedError: it does not run.
        """
        if self.mode.is_whole:
            self._calls = dict(calls)
        self.unlike |= {name for name in self._calls if self._calls[name] != calls.get(name)}
        found = [(i, x) for i, x in enumerate(ends) if _has_gradient(x)]
        given = [self._given(i, x) for i, x in found]
        self.is_backward = True
        try:
            if found:
                torch.autograd.backward([x for _, x in found], given)
        except (Differs, ShardwiseError):
            raise
        except Exception as error:
            raise UnsupportedError(
                "a backward that does not run on the CPU, where sequences are cut over ranks",
                why=f"that it gives each position the gradient of the whole sequence is proved by running it: {type(error).__name__}: "
                f"{first_line(error)[:120]}",
                fix="give the function a plain form for the CPU; or leave cp, or sequence_parallel, out for this model",
                name=self._last or None,
            ) from error
        finally:
            self.is_backward = False
            leaves = {(name, 0): param for name, param in params.items()} | self._weights
            grads = {key: leaf.grad for key, leaf in leaves.items()}
            for param in params.values():
                param.grad = None
        for (name, number), grad in grads.items():
            home, _, attr = name.rpartition(".")
            place = Place("parameter", home, number, attr)
            if grad is None and place in self._full:
                grad = torch.zeros_like(self._full[place])
            if grad is not None:
                self._arrived(place, grad, kind_of(name), is_end=True)

    def refuse_wrong(self) -> None:
        """Raises BackwardDiffers, once all ranks have run, with the module whose backward is given the right gradients and gives others."""
        wrong = {*self._wrong, *(place for place, x in self._left.items() if self._is_off(place, x, self._full[place]))}
        wrong = {place for place in wrong if place.what not in ("in", "out") or place.name not in self.unlike}
        if not wrong:
            return
        into = {(place.name, place.call) for place in wrong if place.what == "out"}
        calls = [key for key in self._ended if key not in into and key[0] not in self.unlike]
        mixes = {(place.name, place.call) for place in wrong if place.what == "in"}
        of_params = {place.name: place.path for place in wrong if place.what == "parameter"}
        inner = next((key for key in calls if key in mixes), None)
        own = next((key for key in calls if key[0] in of_params), None)
        if own is not None and (inner is None or self._ended.index(own) < self._ended.index(inner)):
            raise BackwardDiffers(own[0], f"its backward gives {of_params[own[0]]} another gradient")
        raise BackwardDiffers("" if inner is None else inner[0], "its backward gives other gradients")

    # ---- what arrives

    def _given(self, number: int, x: Tensor) -> Tensor:
        place = Place("end", "", number)
        if self.mode.is_whole:
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            self._full[place] = drawn
            return drawn * self.scale if self.copies_all or self.scale != 1 else drawn
        full = self._full[place]
        share = self.num_ranks if full.shape == x.shape else 1
        rows = self.mode.rows_of(full, x.shape)
        return rows * (self.scale / share)  # type: ignore[no-any-return]

    def _arrived(self, place: Place, grad: Tensor, is_part: bool | None, is_end: bool = False) -> None:
        if not (self.is_backward or is_end) or grad.is_meta:
            return
        grad = grad.detach()
        self._last = place.name if place.what == "out" else self._last
        if self.mode.is_whole and place.what in ("in", "out") and not self.mode.keeps(place.name):
            size = _largest(grad)
            size = size if math.isfinite(size) else _largest(_of_numbers(grad))
            self._unkept[place] = max(self._unkept.get(place, 0.0), size)
            return
        if self.mode.is_whole:
            mine = grad.clone() if self.copies_all else grad  # torch's backwards write none that is kept
            self._full[place] = self._full[place] + grad if place in self._full else mine
            return
        full = self._full.get(place)
        if not self.scale:
            is_wrong = (is_part or (full is not None and grad.shape != full.shape)) and not _largest(grad) <= 0
        elif full is None:  # of an argument or output: written in place, which hides it
            is_wrong = place.what not in ("in", "out") and self._is_off(place, grad, grad.new_zeros(grad.shape))
        elif grad.shape == full.shape and is_part:
            self._left[place] = self._left.get(place, full) - grad
            return
        elif grad.shape == full.shape:
            is_wrong = is_part is not None and self._is_off(place, grad - full, full)
        else:
            rows = self.mode.rows_of(full, grad.shape)
            is_wrong = rows is None or self._is_off(place, grad - rows, rows)
        if is_wrong:
            self._wrong.add(place)

    def _is_off(self, place: Place, off: Tensor, full: Tensor) -> bool:
        """Whether a difference is more than rounding, along the last dim; of numbers, where ``full`` has some."""
        if place.what == "parameter" and not bool(torch.isfinite(full).all()):
            return True
        if not full.numel():
            return False
        sizes = _of_numbers(full).abs()
        allowed = _ALLOWED * (sizes.amax(-1, keepdim=True) if full.dim() else sizes)
        given = self._scale_of(place)
        off = off.masked_fill(~torch.isfinite(full), 0.0)
        return bool((~(off.abs() <= allowed + _NOTHING * given)).any())

    def _scale_of(self, place: Place) -> float:
        """How large the gradients are that one is made of: what is given to a parameter's module, or what gradients are like in the middle."""
        if not self._sizes:
            self._sizes = self._unkept | {at: _largest(_of_numbers(x)) for at, x in self._full.items()}
            self._middle = sorted(self._sizes.values())[len(self._sizes) // 2]
        if place.what != "parameter":
            return self._middle
        of_home = [size for at, size in self._sizes.items() if at.what == "out" and at.name == place.name]
        return max(self._middle, *of_home, self._sizes.get(place, 0.0))

    def _exchanged(self, place: Place, shape: Any, is_sum: bool, grad: Tensor) -> Tensor:
        """What goes on behind an exchange: what the whole run had."""
        if not self.is_backward:
            raise BackwardDiffers(place.name, "its forward takes gradients of what other ranks have")
        self._arrived(place, grad, is_sum)
        full = self._full.get(place) if self.scale else None
        rows = None if full is None else self.mode.rows_of(full, shape)
        return grad.new_zeros(shape) if rows is None else rows


class _Exchanged(torch.autograd.Function):
    """Another tensor in the place of one, and another gradient in the place of its."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, other: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return other.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.back(grad), None, None


class _Weighted(torch.autograd.Function):
    """The product with a factor that is 1, without a copy."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad, torch.einsum("...i,...i->i", grad, y)


def _has_gradient(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.requires_grad
        and torch.is_grad_enabled()
        and (x.is_floating_point() or x.is_complex())
    )


def _of_numbers(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0  # without a copy of it
