"""Forwards of linear layers of which a rank has a part, as the recipe says: parameters are plain local tensors.

A column-parallel layer has some of the outputs. Its input is whole on every rank, and the gradient of that input is the
sum over the ranks. A row-parallel layer has some of the inputs. Its outputs are summed over the ranks before the bias
is added, once. That makes four sums for an attention and an MLP block: two forward, two backward. (Megatron-LM,
https://arxiv.org/abs/1909.08053, figure 3)
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import UnsupportedError
from shardwise.model.adapted import AdaptedLinear
from shardwise.model.adopted import AdoptedLinear
from shardwise.model.layers import LOOKS, Compute, Layer, LayerCalls, flat
from shardwise.model.packed import PackedLinear
from shardwise.techniques.tp.exchanges import Gather, SumGradient, SumParts
from shardwise.techniques.tp.sequence import JoinedStream
from shardwise.world.streams import PartStream


class Shared:
    """What the cut layers of one model share on a rank.

    Args:
        group: name of the group of ranks along the axis.
        stream: random numbers for a rank's part; None: nothing is drawn there.
    """

    def __init__(self, group: str, stream: PartStream | None):
        self.group, self.stream = group, stream
        self.joined: JoinedStream | None = None  # None: all positions are on every rank
        self.is_calling = False  # a cut layer computes: what it calls is not another one
        self._kept: tuple[Tensor, int, Tensor] | None = None  # the last input that the next layer gets too
        self._narrowed: list[tuple[Tensor, Tensor]] = []  # what modules were given of an argument, and all of it

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Within: a cut layer computes."""
        self.is_calling = True
        try:
            yield
        finally:
            self.is_calling = False

    def sum_gradient(self, x: Tensor, *, again: bool = False, is_joined: bool = False) -> Tensor:
        """``x``, whose gradient is summed over the ranks. ``again``: the next layer gets it too, so that one sum serves
        both. ``is_joined``: it is what a site of sequence parallelism has joined."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if is_joined and self.joined is not None and (way := self.joined.for_columns(x)) is not None:
            return way
        kept, self._kept = self._kept, None
        # A graph has no versions; the search has seen that nothing changes the input between two layers that share it.
        version = 0 if torch.compiler.is_compiling() else x._version
        result = kept[2] if kept is not None and kept[0] is x and kept[1] == version else None
        if result is None:
            result = SumGradient.apply(x, self.group)
        if again:
            self._kept = (x, version, result)
        return result

    def sum_parts(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks."""
        return SumParts.apply(x, self.group)

    def gather(self, x: Tensor, size: int, rank: int, *, has_part: bool) -> Tensor:
        """The parts of all ``size`` ranks along the last dim; ``has_part``: the gradient of each rank is a part of a sum."""
        return Gather.apply(x, self.group, size, rank, -1, has_part)

    def narrow(self, whole: Tensor, size: int) -> Tensor:
        """The first ``size`` of the last dim of an argument; layers get all of it."""
        part = whole.narrow(-1, 0, size)
        self._narrowed.append((part, whole))
        return part

    def whole(self, x: Tensor) -> Tensor:
        return next((whole for part, whole in self._narrowed if part is x), x)

    def end(self) -> None:
        """The forward of the model has ended."""
        self._kept = None
        self._narrowed.clear()
        if self.joined is not None:
            self.joined.forget()
        if self.stream is not None:
            self.stream.leave()


class CutLayer:
    """One layer of which this rank has a part.

    Args:
        shared: what it shares with the others.
        action: ``column``: it has some of the outputs; ``row``: some of the inputs; ``whole``: all, and the gradient of
            its outputs is a part of a sum.
        out_dim: the dim of its weight along which the outputs lie.
        embedding: its input is indices.
        sums_input: whether the gradient of its input is summed over the ranks.
        shares_input: whether the next layer gets the same input.
        sums_output: whether the gradient of its outputs is.
        drops_part: whether dropout follows it that is applied to a rank's part.
        drops_input: whether it applies dropout to its inputs itself, of which this rank has a part.
        gathers: the dim of positions of its input, of which this rank has some; None: it has all of them.
        scatters: that of its outputs, of which this rank gets some; None: it gets all.
        is_joined: its input is what a site of sequence parallelism has joined.
        names: ``weight``, ``bias``, ``callers``: not read here.
    """

    def __init__(
        self,
        shared: Shared,
        action: str,
        *,
        out_dim: int,
        embedding: bool,
        sums_input: bool,
        shares_input: bool,
        sums_output: bool,
        drops_part: bool,
        drops_input: bool = False,
        gathers: int | None = None,
        scatters: int | None = None,
        is_joined: bool = False,
        **names: Any,
    ):
        self._gathers, self._scatters, self._is_joined = gathers, scatters, is_joined or gathers is not None
        self._shared, self._is_row = shared, action == "row"
        self._out_dim, self._is_embedding = out_dim, embedding
        self._sums_input, self._shares_input = sums_input and not embedding, shares_input
        self._sums_output, self._drops_part, self._drops_input = sums_output, drops_part, drops_input
        self.was_called = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute | None = None) -> Tensor:
        """Its outputs for the inputs ``x``. ``compute``: of a layer with further parameters."""
        with self._shared.calling():
            return self._outputs(x, weight, bias, compute)

    def _outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute | None) -> Tensor:
        shared, self.was_called = self._shared, True
        if shared.stream is not None:
            shared.stream.leave()
        x, joined = shared.whole(x), shared.joined
        if self._gathers is not None and joined is not None:
            x = joined.join(x, self._gathers)
        elif joined is not None and x.is_floating_point():
            joined.refuse_rows()  # tokens, and distances of positions, are none
        if self._sums_input:
            x = shared.sum_gradient(x, again=self._shares_input, is_joined=self._is_joined)
        if compute is not None:
            if self._drops_input and shared.stream is not None:
                shared.stream.enter()
            y = compute(x, None if self._is_row else bias)
            if self._drops_input and shared.stream is not None:
                shared.stream.leave()
        elif self._is_embedding:
            y = functional.embedding(x, weight if self._out_dim else weight.t())
        else:
            turned = weight if self._out_dim == 0 else weight.t()
            y = functional.linear(x, turned, None if self._is_row else bias)
        if self._is_row:
            at = None if joined is None or self._scatters is None else joined.at
            y = shared.sum_parts(y) if at is None else joined.scatter(y, at, self._scatters)  # type: ignore
            y = y if bias is None else y + bias
            y = shared.sum_gradient(y) if self._sums_output else y
        if self._drops_part and shared.stream is not None:
            shared.stream.enter()
        return y


class WholeReader:
    """A layer that is not cut, and whose input is an argument of which the code around it has a part: it gets all of it.

    Args:
        shared: what it shares with the layers that are cut.
        out_dim: the dim of its weight along which the outputs lie.
        names: ``weight``, ``bias``, ``callers``: not read here.
    """

    def __init__(self, shared: Shared, *, out_dim: int, **names: Any):
        self._shared, self._out_dim = shared, out_dim

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute | None = None) -> Tensor:
        """Its outputs. ``compute``: of a layer with further parameters."""
        with self._shared.calling():
            if compute is not None:
                return compute(self._shared.whole(x), bias)
            return functional.linear(self._shared.whole(x), weight if self._out_dim == 0 else weight.t(), bias)


class CutEmbedding:
    """An embedding of which this rank has the rows of some tokens: those of the others are zeros in a sum over the ranks.

    Args:
        shared: what it shares with the layers.
        first: number of this rank's first row.
        num_tokens: of all ranks.
        padding_idx: the row that gets no gradient; None: there is none.
    """

    def __init__(self, shared: Shared, *, first: int, num_tokens: int, padding_idx: int | None):
        self._shared, self._first, self._num_tokens, self._padding = shared, first, num_tokens, padding_idx

    def __call__(self, ids: Tensor, weight: Tensor, bias: None) -> Tensor:
        """The rows of ``ids``, on every rank. A number that is no token raises IndexError on the CPU; on a GPU, where reading it
        would wait for the device, its row is NaN."""
        with self._shared.calling():
            is_token = (ids >= 0) & (ids < self._num_tokens)
            if ids.device.type == "cpu" and not bool(is_token.all()):
                raise IndexError(f"token {int(ids[~is_token][0])} of a vocabulary of {self._num_tokens}")
            ids, num_rows = ids - self._first, weight.shape[0]
            is_here = (ids >= 0) & (ids < num_rows)
            padding = None if self._padding is None else self._padding - self._first
            padding = padding if padding is not None and 0 <= padding < num_rows else None
            rows = functional.embedding(torch.where(is_here, ids, 0), weight, padding)
            rows = torch.where(is_token.unsqueeze(-1), torch.where(is_here.unsqueeze(-1), rows, 0), torch.nan)
            return self._shared.sum_parts(rows)


class CutHead:
    """A linear layer that makes a number for each token, of which this rank has some tokens: all are gathered.

    Args:
        shared: what it shares with the layers.
        out_dim: the dim of its weight along which the outputs lie.
        num_outputs: of all ranks.
        num_ranks, rank: along the axis.
    """

    def __init__(self, shared: Shared, *, out_dim: int, num_outputs: int, num_ranks: int, rank: int):
        self._shared, self._out_dim, self._num_outputs = shared, out_dim, num_outputs
        self._num_ranks, self._rank = num_ranks, rank

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute | None = None) -> Tensor:
        """All outputs, on every rank. ``compute``: of a layer with further parameters."""
        if self._shared.joined is not None:
            self._shared.joined.refuse_rows()
        with self._shared.calling():
            x = self._shared.sum_gradient(x)
            if compute is not None:
                if self._shared.stream is not None:
                    self._shared.stream.leave()  # its input is whole: all ranks drop the same
                y = compute(x, bias)
            else:
                y = functional.linear(x, weight if self._out_dim == 0 else weight.t(), bias)
            # The last ranks may have fewer.
            y = functional.pad(y, (0, -(-self._num_outputs // self._num_ranks) - y.shape[-1]))
            y = self._shared.gather(y, self._num_ranks, self._rank, has_part=False)
            return y.narrow(-1, 0, self._num_outputs)


def _used_otherwise(name: str, function: str) -> UnsupportedError:
    return UnsupportedError(
        f"{function} of a weight that is cut over tp",
        why="this rank has a part of it, and only the linear layer that it is of used it when the code was run to find what can be cut",
        fix="use it through its layer in every dtype, mode and branch; or leave it whole: tensor_parallel=sw.TensorParallel(plan={...})",
        name=name,
    )


LayerOfRank = Callable[..., Tensor]
"""The outputs of a layer for its input, this rank's part of its weight, and of its bias; for one with further parameters, how it computes."""


class _Calls(LayerCalls):
    """Within: calls of layers are made by their :class:`CutLayer`. ``held``: name of a parameter -> the module that has it,
    and its attribute there: units make the tensors anew when they are gathered."""

    def __init__(self, shared: Shared, layers: Mapping[str, LayerOfRank], held: Mapping[str, tuple[nn.Module, str]]):
        super().__init__(self._name)
        self._shared, self._layers, self._held = shared, layers, held

    def _name(self, tensor: Any) -> str | None:
        return next((name for name, (owner, attr) in self._held.items() if owner._parameters.get(attr) is tensor), None)

    def _tensor(self, name: str | None) -> Any:
        return None if name is None else getattr(*self._held[name])

    def called(self, layer: Layer, x: Tensor, compute: Compute | None) -> Any:
        if layer.weight not in self._layers or self._shared.is_calling:
            return NotImplemented
        given = x, self._tensor(layer.weight), self._tensor(layer.bias)
        return self._layers[layer.weight](*given, *(() if compute is None else (compute,)))

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = getattr(func, "__name__", "")
        if self._shared.is_calling or what in LOOKS:
            return func(*args, **kwargs)
        if what == "__get__" and not isinstance(seen := func(*args, **kwargs), Tensor):
            return seen
        for value in flat((*args, *kwargs.values())):
            if isinstance(value, Tensor) and (name := self.weight_of(value)) in self._layers:
                raise _used_otherwise(name, what)
        return func(*args, **kwargs)


def within_layers(
    module: nn.Module, shared: Shared, layers: Mapping[str, LayerOfRank], held: Mapping[str, tuple[nn.Module, str]]
) -> None:
    """Makes ``module`` call ``layers``, by the names of their weights, where its forward calls linear layers. ``held``: where
    their weights and biases are."""
    inner = module.forward
    own = (AdaptedLinear.forward, AdoptedLinear.forward, PackedLinear.forward)
    computes = type(module).forward in own and "forward" not in vars(module)
    if (computes or is_plain(module)) and len(layers) == 1:
        (layer,) = layers.values()

        def forward(input: Tensor) -> Tensor:
            if isinstance(
                module, PackedLinear | AdoptedLinear
            ):  # they compute what they have, with an adapter or without
                return layer(input, None, module.bias, module.compute)  # type: ignore[arg-type]
            given = (module.compute,) if computes and not module.adapter_is_off else ()
            return layer(input, module.weight, getattr(module, "bias", None), *given)  # type: ignore[arg-type]

        forward.is_layer_of_rank = True  # type: ignore[attr-defined]
        module.forward = forward
        return

    @functools.wraps(inner)
    def calling(*args: Any, **kwargs: Any) -> Any:
        with _Calls(shared, layers, held):
            return inner(*args, **kwargs)

    module.forward = calling


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a layer and nothing else: ``nn.Linear``, ``nn.Embedding``, or GPT-2's ``Conv1D``."""
    if "forward" in vars(module):
        return False
    return type(module).forward in (nn.Linear.forward, nn.Embedding.forward) or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )
