"""What runs in a module whose sequences are cut: attention exchanges, positions that it makes are those of the rank, and what mixes
positions itself runs on all of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch.modules import around_calls
from shardwise.errors import UnsupportedError
from shardwise.model.attend import SDPA, Attention, now, of_sdpa
from shardwise.model.own_positions import CallPlaces, Made, argument_of, kind_of, of_rows, other_way
from shardwise.model.products import Products, dim_of, is_product, second_of, with_second
from shardwise.model.pytrees import map_keyed
from shardwise.techniques.cut_forward import Current
from shardwise.techniques.row_drops import RowDrops
from shardwise.techniques.row_exchanges import At, Ranks, attend_over_heads, gathered, with_gathered
from shardwise.world.streams import PartStream


class Cuts(Protocol):
    """The cut sequences of a model: the positions of the forward that runs, its ranks, and how attention exchanges."""

    at: At | None
    current: Current
    ranks: Ranks
    stream: PartStream
    drops: RowDrops | None
    is_running: bool
    exchange: Callable[[Attention, At, Ranks], Tensor]

    def positions_now(self) -> At | None:
        """Those of this rank in the code that runs; None: all."""

    def refuse_again(self, module: nn.Module) -> None:
        """Raises UnsupportedError for a module that runs in backward, without its positions."""


class _Calls(TorchFunctionMode):
    """Within the forward of a module: attention exchanges, and positions that its code makes are those of this rank, by the places
    of the calls; the second factor of products is gathered. Calls at places where the example had none are refused if they look like these."""

    def __init__(self, cuts: Cuts, at: At, watched: "Watched"):
        super().__init__()
        self._cuts, self._at, self._watched = cuts, at, watched
        self._places, self.depth = CallPlaces(watched.seen), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if now.attends is not self or self.depth:
            return func(*args, **kwargs)
        if func is SDPA:
            return self.attend(of_sdpa(args, kwargs))
        if self._watched.products and is_product(func):
            place = self._places.take("product")
            dim = dim_of(self._watched.products, place)
            if dim is None and self._is_new("product", place):
                factor = second_of(func, args, kwargs)
                self._refuse_rows(isinstance(factor, Tensor) and self._num_rows in factor.shape, "a product")
            return func(*args, **kwargs) if dim is None else self._busy(self._multiplied, func, args, kwargs, dim)
        if self._watched.positions and (kind := kind_of(func)) is not None:
            place = self._places.take(kind)
            for of, at, argument in self._watched.positions:
                if of == kind and at == place:
                    return self._busy(of_rows, kind, argument, func, args, kwargs, self._at.rows, self._at.length)
            if self._is_new(kind, place):
                argument = argument_of(kind, func, args, kwargs, self._num_rows, self._at.length)
                self._refuse_rows(argument is not None, f"a call of {getattr(func, '__name__', func)}")
        return func(*args, **kwargs)

    @property
    def _num_rows(self) -> int:
        return self._at.rows.shape[0]

    def _is_new(self, kind: str, place: str) -> bool:
        """Whether the example made no call at this place of the code, and this rank has some of the positions."""
        return place not in self._watched.seen.get(kind, ()) and self._num_rows != self._at.length

    def _refuse_rows(self, is_of_rows: bool, what: str) -> None:
        if is_of_rows:
            raise other_way(
                f"{what} of {self._num_rows} positions, which the example did not make at this place of the code"
            )

    def refuse_moved(self) -> None:
        """Raises UnsupportedError where code is compiled and made other calls than on the example, whose numbers told their places."""
        kinds = {kind for kind, *_ in self._watched.positions} | ({"product"} if self._watched.products else set())
        if not self._places.are_as_many(kinds | ({"attention"} if self._watched.attention else set())):
            raise other_way(
                "a compiled block that makes more, or fewer, calls than on the example: a table that the first forward alone makes"
            )

    def attend(self, call: Attention) -> Any:
        place = self._places.take("attention")
        if self._is_new("attention", place):
            self._refuse_rows(call.k.shape[-2] == self._num_rows, "attention")
        # It drops of this rank's queries, or heads: queries that are no positions every rank has whole.
        is_of_rank = place in self._watched.queries or self._cuts.exchange is attend_over_heads
        draws = is_of_rank and call.chance != 0 and self._cuts.drops is not None and not self._cuts.stream.is_entered
        with self._cuts.stream.entered(is_used=call.chance is not None) if draws else contextlib.nullcontext():
            return call.finish(self._computed(call, place))

    def _computed(self, call: Attention, place: str) -> Tensor:
        if place not in self._watched.attention:
            return self._busy(call.kernel, call.q, call.k, call.v, None)  # type: ignore[no-any-return]
        if call.mask is not None and not call.has_mask_of(self._at.length):
            raise UnsupportedError(
                f"attention with a mask {tuple(call.mask.shape)}, for {self._at.length} keys",
                why="it gets the keys of all positions",
                fix="make the mask where the model has all of its tokens",
            )
        of_example = {kind for kind in ("causal", "not causal") if place in self._watched.seen.get(kind, ())}
        if call.mask is None and not call.is_causal and of_example == {"causal"} and self._at.length > 1:
            raise UnsupportedError(
                f"attention that is not causal on {self._num_rows} of {self._at.length} positions, and was on the example",
                why="its code asks for the length (is_causal=x.shape[1] > 1), which is that of this rank's positions",
                fix="is_causal=True is right for one position too; or leave sequences as short as this one out",
            )
        return self._busy(self._cuts.exchange, call, self._at, self._cuts.ranks)  # type: ignore[no-any-return]

    def _multiplied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> Any:
        """A product with all positions of its second factor."""
        factor = second_of(func, args, kwargs)
        if not isinstance(factor, Tensor) or factor.dim() <= dim or factor.shape[dim] != self._num_rows:
            shown = f"a tensor {tuple(factor.shape)}" if isinstance(factor, Tensor) else "other things"
            raise other_way(f"a product with {shown}, for {self._num_rows} positions")

        def compute(whole: Tensor) -> Any:
            more, named = with_second(func, args, kwargs, whole)
            return func(*more, **named)

        return with_gathered(compute, (factor,), (dim,), self._at, self._cuts.ranks)

    def _busy(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call of ours, whose functions are not those of the model's code."""
        before, now.attends = now.attends, None
        try:
            return call(*args) if self._cuts.drops is None else self._cuts.drops.without(call, *args)
        finally:
            now.attends = before


@dataclasses.dataclass
class Watched:
    """What is known of the calls in a module's own code, by their places.

    Attributes:
        attention, queries: calls of attention whose keys are rows, and whose queries are.
        positions: calls that make positions.
        products: products whose second factor is gathered.
        seen: kind -> all places at which the example made calls.
    """

    attention: list[str] = dataclasses.field(default_factory=list)
    queries: list[str] = dataclasses.field(default_factory=list)
    positions: Made = dataclasses.field(default_factory=list)
    products: Products = dataclasses.field(default_factory=list)
    seen: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def watch(module: nn.Module, cuts: Cuts, watched: Watched) -> None:
    """Lets attention in a module's own code exchange, also where it is written out in products, and positions that it makes be those of this
    rank. What other modules do within it is none of its own code: :func:`set_apart`."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        at = cuts.positions_now()
        if at is None:
            cuts.refuse_again(module)
            return inner(*args, **kwargs)
        calls = _Calls(cuts, at, watched)
        before, now.attends = now.attends, calls
        try:
            with calls:
                output = inner(*args, **kwargs)
            if torch.compiler.is_compiling():
                calls.refuse_moved()
            return output
        finally:
            now.attends = before

    module.forward = forward


def set_apart(module: nn.Module) -> None:
    """Lets what a module does, and the hooks on it, not be taken for the own code of the one that calls it."""

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls = now.attends
            if not isinstance(calls, _Calls):
                return inner(*args, **kwargs)
            calls.depth += 1
            try:
                return inner(*args, **kwargs)
            finally:
                calls.depth -= 1

        return call

    around_calls(module, around)


def join_keys(module: nn.Module, cuts: Cuts, dims: Mapping[str, int]) -> None:
    """Lets what a module returns be of all positions."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        at = cuts.positions_now()
        output = inner(*args, **kwargs)
        if at is None:
            return output
        return map_keyed(lambda path, x: gathered(x, at, cuts.ranks, dims[path]) if path in dims else x, output)

    module.forward = forward


def make_island(module: nn.Module, cuts: Cuts, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> None:
    """Lets a module run on the whole sequence on every rank."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        at, current = cuts.positions_now(), cuts.current
        if at is None:
            return inner(*args, **kwargs)
        before = now.attends, current.at, cuts.at
        now.attends, current.at, cuts.at = None, None, None
        try:
            args, kwargs = map_keyed(
                lambda path, x: gathered(x, at, cuts.ranks, inputs[path]) if path in inputs else x, (args, kwargs)
            )
            output = inner(*args, **kwargs)
        finally:
            now.attends, current.at, cuts.at = before
        return map_keyed(lambda path, x: x.index_select(outputs[path], at.rows) if path in outputs else x, output)

    module.forward = forward
