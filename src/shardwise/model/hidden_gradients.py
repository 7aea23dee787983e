"""What only gradients show, as values: a proof that compares values sees a backward of the user's own (``torch.autograd.Function``), a
hook on a tensor, a module or a node of the graph, and a loss that such a function hides, no other way."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise._torch.autograd import is_of_operator
from shardwise.model.layers import flat

_SHARE = 1e-3  # of a gradient, added to a value: a logarithm of it can be taken still
_LARGEST = 1 << 20  # numbers of a weight that is drawn for a backward
_OWNER = torch.autograd.Function.__mro__[1]  # what Function.apply calls, also where the user's code has kept it


class Sees(Protocol):
    """Gets the calls of functions that no mode sees."""

    def applied(self, kind: type, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...

    def scripted(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def keeps_by(self, hook: Callable[[Tensor], Any]) -> None: ...


@contextlib.contextmanager
def seen_by(mode: Sees) -> Iterator[None]:
    """Within: ``mode`` computes each autograd function, and each function of torch.jit.script, and sees who packs what is kept for backwards."""
    script = torch.jit.ScriptFunction
    before, enter = script.__call__, saved_tensors_hooks.__enter__

    def apply(cls: type, *args: Any) -> Any:
        return mode.applied(cls, super(_OWNER, cls).apply, args)  # type: ignore[misc]

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return mode.scripted(lambda *a, **k: before(function, *a, **k), args, kwargs)

    def entered(hooks: saved_tensors_hooks) -> None:
        mode.keeps_by(hooks.pack_hook)
        return enter(hooks)

    try:
        saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
        _OWNER.apply = classmethod(apply)  # type: ignore[attr-defined]
        script.__call__ = call
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        script.__call__ = before
        del _OWNER.apply  # type: ignore[attr-defined]


def is_users(kind: type) -> bool:
    """Whether a function is not torch's own, whose backwards are those of what they compute."""
    return is_of_operator(kind) or is_users_hook(kind)


def is_users_hook(hook: Any) -> bool:
    """Whether a function is neither torch's nor Shardwise's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in ("torch", "shardwise")


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the user has added backward hooks to a module."""
    return any(
        is_users_hook(hook) for hooks in (module._backward_hooks, module._backward_pre_hooks) for hook in hooks.values()
    )


class Node:
    """A node of the graph, whose hooks are seen.

    Args:
        node: is one.
        hooked: is called before each hook of the user's own is added.
    """

    def __init__(self, node: Any, hooked: Callable[[], None]):
        self._node, self._hooked = node, hooked

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node and Node(node, self._hooked), number) for node, number in value)
        return self._hooking(value) if name in ("register_hook", "register_prehook") else value

    def _hooking(self, register: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(hook: Any) -> Any:
            if is_users_hook(hook):
                self._hooked()
            return register(hook)

        return call

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, Node) else other)

    def __hash__(self) -> int:
        return hash(self._node)


class Shown:
    """A call of a function with a backward of its own, whose backward was run once.

    Args:
        plain: calls it.
        args: of the call.

    Attributes:
        args: with a share of their gradients, for fixed gradients of the result.
        of_weights: number of each argument that is a parameter -> its gradient then.
        failed: its backward does not run, such as one of a device.
        is_linear: what its backward gives for two gradients is, added, what it gives for their sum.
    """

    def __init__(self, plain: Callable[..., Any], args: Sequence[Any]):
        self._hidden: list[Tensor] = []
        self.of_weights: dict[int, Tensor] = {}
        self.args, self.failed, self.is_linear = tuple(args), False, True
        try:
            self._run(plain, args)
        except Exception:  # whatever the user's code raises
            self.failed = True

    def result(self, made: Any) -> Any:
        """What the call has made, with a share of the arguments that it only gives a gradient to."""
        if not self._hidden:
            return made
        items = list(made) if isinstance(made, tuple) else [made]
        at = next(i for i, x in enumerate(items) if isinstance(x, Tensor) and x.is_floating_point())
        for x in self._hidden:
            items[at] = items[at] + _SHARE * _like(x, items[at])
        return tuple(items) if isinstance(made, tuple) else items[0]

    def _run(self, plain: Callable[..., Any], args: Sequence[Any]) -> None:
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
        leaves = {i: _leaf(args[i]) for i in places}
        with torch.enable_grad():
            given, made = _called(plain, args, leaves)
            if not made:
                return
            of = [*leaves.values()]
            whole = [x.detach().cos() for x in made]
            some = [x * (torch.arange(x.numel()) % 3 == 0).view(x.shape) for x in whole]
            rest = [x - y for x, y in zip(whole, some, strict=True)]
            one, other = (
                torch.autograd.grad(made, of, each, retain_graph=True, allow_unused=True) for each in (some, rest)
            )
            grads = torch.autograd.grad(made, of, whole, allow_unused=True)
            self.is_linear = all(_is_sum(*each) for each in zip(grads, one, other, strict=True))
        found = list(args)
        for i, grad in zip(places, grads, strict=True):
            if grad is None or isinstance(args[i], nn.Parameter):
                self.of_weights |= {} if grad is None else {i: grad.detach()}
                continue
            share = _SHARE * torch.nan_to_num(grad.detach(), 0.0, 0.0, 0.0).to(args[i].dtype)
            if given[i]._version:  # the function writes it
                with torch.no_grad():
                    args[i].add_(share)
            else:
                found[i] = args[i] + share
            if self._is_hidden(plain, args, leaves, i, made):
                self._hidden.append(args[i].detach())
        self.args = tuple(found)

    @staticmethod
    def _is_hidden(
        plain: Callable[..., Any], args: Sequence[Any], leaves: dict[int, Tensor], i: int, made: list[Tensor]
    ) -> bool:
        """Whether the result is the same with another value of an argument."""
        other = leaves[i].detach() * 1.37 + 0.11
        _, again = _called(plain, args, {**leaves, i: other.requires_grad_()})
        return len(again) == len(made) and all(torch.equal(x, y) for x, y in zip(again, made, strict=True))


def _called(
    plain: Callable[..., Any], args: Sequence[Any], leaves: dict[int, Tensor]
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The arguments that were given, and what the function made of them that has gradients."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        given = {i: leaf.clone() for i, leaf in leaves.items()}
        made = plain(*(given.get(i, x) for i, x in enumerate(args)))
        return given, [x for x in flat([made]) if isinstance(x, Tensor) and x.requires_grad]


def is_linear(hook: Callable[[Tensor], Any], grad: Tensor) -> bool:
    """Whether what a hook makes of two gradients is, added, what it makes of their sum."""
    some = grad * (torch.arange(grad.numel()) % 3 == 0).view(grad.shape)
    made = [hook(x.clone()) for x in (grad, some, grad - some)]
    return all(x is None for x in made) or _is_sum(*made)


def _is_sum(whole: Tensor | None, one: Tensor | None, other: Tensor | None) -> bool:
    if whole is None or one is None or other is None:
        return whole is None
    return torch.allclose(whole, one + other, rtol=1e-9, atol=1e-12)


def _leaf(x: Tensor) -> Tensor:
    if not x.is_meta:
        return x.detach().clone().requires_grad_()
    if x.numel() > _LARGEST:
        raise ValueError("a large weight has no values")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype) / max(x.shape[-1], 1) ** 0.5
    return drawn.requires_grad_()


def _like(x: Tensor, out: Tensor) -> Tensor:
    """``x`` for each place of ``out``: as it is along the first dims that both have, and its sum over the others."""
    if x.dim() and out.dim() > 1 and x.shape[0] == out.shape[0] * out.shape[1]:
        x = x.unflatten(0, (out.shape[0], out.shape[1]))
    elif x.dim() > 1 and out.dim() and out.shape[0] == x.shape[0] * x.shape[1]:
        x = x.flatten(0, 1)
    same = 0
    while same < min(x.dim(), out.dim()) and x.shape[same] == out.shape[same]:
        same += 1
    x = x.reshape(*x.shape[:same], -1).sum(-1)
    return x.reshape(*x.shape, *[1] * (out.dim() - same))
