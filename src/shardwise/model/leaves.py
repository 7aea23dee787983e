"""Runs a model's functions in float64, with random leaves in place of what its layers return, and notes what they use."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.model.layers import LOOKS, Layer, LayerCalls, bound, flat
from shardwise.model.lift import lifted
from shardwise.model.run import Call, Run
from shardwise.model.unseen_calls import applied_by

if TYPE_CHECKING:
    from shardwise.model.trial import Trial

_running = 0  # runs of trials


def is_trial_running() -> bool:
    """Whether a model is run to find what can be cut: on one rank, without the others."""
    return _running > 0


class Ended(BaseException):
    """Every call that was asked for has been made. Not an Exception, as user's code may catch those."""


class Leaves(LayerCalls):
    """Within: layers return leaves, and everything is computed in float64."""

    def __init__(
        self,
        trial: "Trial",
        seen: Run,
        draw: int,
        rows: Mapping[str, Tensor],
        missing: set[Call],
        note: Callable[[Layer], None],
        watch: Callable[[Call, Tensor], None] | None,
        outputs: Callable[[Call, Tensor], Tensor] | None,
    ):
        super().__init__(trial.name_of)
        self._trial, self._seen, self._draw, self._rows, self._missing = trial, seen, draw, rows, missing
        self._ends, self._numbers, self._note = bool(missing), dict[str, int](), note
        self._watch, self._outputs = watch, outputs
        self._last: Call | None = None

    def __enter__(self) -> "Leaves":
        global _running
        super().__enter__()
        _running += 1
        self._applying = applied_by(self._applied)
        self._applying.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        global _running
        self._applying.__exit__(exc_type, exc_val, exc_tb)
        _running -= 1
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = lifted(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def called(self, layer: Layer, x: Tensor, compute: Any = None) -> Any:
        name = layer.weight
        if not all(each.name for each in layer.further):
            return NotImplemented  # one that is computed: its gradient goes on
        self._trial.layers.setdefault(name, layer)
        self._trial.uses.setdefault(name, {})[layer] = None
        self._note(layer)
        num_outputs = self._trial.num_outputs(layer, x)
        if not (self._rows or layer.is_embedding or layer.is_norm):
            packing = None if layer.function is None else layer.function[1].packing
            num_inputs = self._trial.shape_of(name)[1 - layer.out_dim] if packing is None else packing.shape[1]
            if x.shape[-1:] != (num_inputs,):
                raise ValueError(f"{name} takes {num_inputs} inputs, and is given a tensor of shape {tuple(x.shape)}")
        call = Call(name, self._numbers.get(name, 0))
        self._numbers[name] = call.number + 1
        if self._watch is None:
            self._seen.inputs[call] = x
            self._seen.versions[call] = x._version
        else:
            self._watch(call, x)
        shape = (*(x.shape if layer.is_embedding else x.shape[:-1]), num_outputs)
        if self._watch is not None:
            value = _cheap_value(call, shape)
            self._last = call
            value = value[..., self._rows[name]] if name in self._rows else value.clone()
            return value if self._outputs is None else self._outputs(call, value)
        value = self._trial.value(call, shape, self._draw)
        if name in self._rows:
            value = value[..., self._rows[name]]
        leaf = self._seen.leaves[call] = value.detach().clone().requires_grad_()
        self._last = call
        self._missing.discard(call)
        if self._ends and not self._missing:
            raise Ended
        return leaf.clone()  # which the model may change in place

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _TREATED:
            if func in DROPOUTS:
                x, chance, is_training = bound(DROPOUT, args, kwargs)
                if chance != 0 and is_training is not False:
                    self._seen.dropped.append((self._last, x))
                return x
            if func is functional.batch_norm:
                given = bound(_BATCH_NORM, args, kwargs)
                names = [name for x in given[3:5] if (name := self._trial.name_of(x)) is not None]
                self._trial.read |= {name: {"batch_norm": None} for name in names}
                if given[5]:
                    self._trial._statistics |= {id(x): x for x in given[1:3] if x is not None}
                return _normalised(*given)
            if func is functional.scaled_dot_product_attention:
                query, *_, chance = bound(_ATTENTION, args, kwargs)
                if chance:
                    self._seen.dropped.append((self._last, query))
                is_causal = kwargs.get("is_causal", args[5:6] == (True,))
                args, kwargs = args[:4], {**kwargs, "is_causal": is_causal, "dropout_p": 0.0}
            elif not args[0].is_leaf:
                return args[0]  # asked for gradients, an input of a model, which here is computed and has them
        if self._watch is not None and self._rows:
            return func(*args, **kwargs)  # what is noted below, the whole model has shown
        what = getattr(func, "__name__", None) or str(func)
        self._seen.functions.append(what)
        if what in DRAWS:
            drawn = func(*args, **kwargs)
            if isinstance(drawn, Tensor):
                self._seen.dropped.append((self._last, drawn))
            return drawn
        if what in _SIZES or (what == "__get__" and func == _SHAPE):
            self._trial.measured |= {name for value in args if (name := self._trial.name_of(value)) is not None}
        if what == "__get__":
            if func == DEVICE and self._trial.name_of(args[0]) is not None:
                return torch.device("cpu")  # as of all others: a model makes tensors where its weights are
            if not isinstance(seen := func(*args, **kwargs), Tensor):
                return seen
        if what not in LOOKS:
            self._note_reads(what, (*args, *kwargs.values()) if kwargs else args)
        return func(*args, **kwargs)

    def _applied(self, kind: type, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """An autograd function: it is given the weight itself, and its own backward computes the gradient, of values."""
        self._note_reads(kind.__name__, args)
        return plain(*args)

    def _note_reads(self, what: str, values: tuple[Any, ...]) -> None:
        for value in flat(values):
            if isinstance(value, Tensor) and (name := self.weight_of(value)) is not None:
                self._trial.read.setdefault(name, {})[what] = None
                self._trial._on_read(name)
                if value.is_meta:
                    self._trial.foreign.setdefault(name, what)


DROPOUTS = frozenset({  # functions that drop numbers of their first argument
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
})  # fmt: skip
_ASKS_FOR_GRADIENTS = frozenset({Tensor.requires_grad_, Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_TREATED = frozenset({*DROPOUTS, functional.batch_norm, functional.scaled_dot_product_attention, *_ASKS_FOR_GRADIENTS})
DRAWS = frozenset({  # names of functions that draw random numbers
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like", "randn_like", "randint_like",
    "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
})  # fmt: skip
DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT = ("input", "p", "training")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")
_SIZES = frozenset({"size", "numel", "stride", "__len__", "nelement"})
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
"""As a mode sees it that a tensor is asked for its device."""
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _normalised(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> Tensor:
    """Batch norm, in operations that have gradients for the running statistics too; torch's own has none."""
    training, _, eps = rest
    if training or mean is None or var is None:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean, var = x.mean(dims), x.var(dims, correction=0)
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    x = (x - mean.view(shape)) / (var.view(shape) + (1e-5 if eps is None else eps)).sqrt()
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


@functools.cache
def _pool() -> Tensor:
    return torch.randn(1 << 22, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def _cheap_value(call: Call, shape: tuple[int, ...]) -> Tensor:
    """Random numbers out of a pool, from a place that depends on the call: drawing them takes longer than all else."""
    pool, numel = _pool(), math.prod(shape)
    start = zlib.crc32(f"{call.weight} {call.number}".encode()) % (max(len(pool) - numel, 0) + 1)
    return (pool if numel <= len(pool) else pool.repeat(-(-numel // len(pool))))[start : start + numel].view(shape)
