"""Detects what no longer fits a sharded module: an optimizer built before sharding, a module changed after it."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._torch.autograd import has_users_hook, hook_counts, num_hooks, without_subclasses
from shardwise._torch.fully_shard import gathered_parameters
from shardwise._torch.pytrees import tree_flatten
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import canonical_modules, canonical_tensors

_MARK = "_shardwise_replaced"
_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_REQUIRES_GRAD, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
_installed = False
_IN_A_RUN = (
    "set requires_grad before parallelize. In the middle of a run: `with sw.CheckpointManager(directory, step) as saved: saved.save()`; build the "
    "model anew with the other requires_grad, parallelize it, and build the optimizer of the same parameters as before (model.parameters(), the "
    "frozen among them, if it was built so) and a new TrainStep; `with sw.CheckpointManager(directory, step) as saved: saved.load()`; then "
    "optim.add_param_group({...}) for what the optimizer did not have"
)


def mark_stale(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Marks the parameter objects that sharding replaced. What computes with one, a backward that comes to one by way of a view made
    before, and an optimizer that steps one, raise UsageError from then on."""
    global _installed
    kept = set(map(id, after.values()))
    for name, tensor in before.items():
        if id(tensor) in kept or hasattr(tensor, _MARK):
            continue
        setattr(tensor, _MARK, name)
        if tensor.requires_grad and tensor.is_leaf:
            tensor._backward_hooks = None  # the new parameter shares them
            tensor.register_hook(functools.partial(_refuse_gradient, name))
        if type(tensor) is nn.Parameter:
            tensor.__class__ = _Replaced
    if not _installed:
        register_optimizer_step_pre_hook(refuse_stale)
        _installed = True


class _Replaced(nn.Parameter):
    """A parameter that sharding has replaced, and that something still holds: what it is can be asked, and nothing is computed with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        held = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, _Replaced)), None)
        is_asked = attribute not in _TENSORS if name == "__get__" else attribute == "grad" or name in _ASKED
        if held is None or is_asked:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        raise _is_replaced(f"{attribute or name}() of a parameter", getattr(held, _MARK))


_TENSORS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
_ASKED = frozenset(
    [
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "get_device",
        "data_ptr",
        "untyped_storage",
        "__len__",
        "__repr__",
        "__hash__",
        "__format__",
        "__dir__",
    ]
)


def _refuse_gradient(name: str, _gradient: Tensor) -> NoReturn:
    raise _is_replaced("a backward that comes to a parameter", name)


def _is_replaced(what: str, name: str) -> UsageError:
    return UsageError(
        f"{what} that parallelize has replaced",
        why="what still holds it (a functools.partial, a class attribute, a global, a view made before) computes with values that are never "
        "updated, and its gradient would be lost",
        fix="take the parameter from its module each time it is used: self.linear.weight; make what holds it, or views of it, after parallelize",
        name=name,
    )


def replaced_name(param: Tensor) -> str | None:
    """The name of a parameter that sharding has replaced; None: it has not."""
    return getattr(param, _MARK, None)


def refuse_no_optimizer(optim: Any, call: str) -> None:
    """Raises UsageError for what is not one optimizer, given to ``call``."""
    if isinstance(optim, torch.optim.Optimizer):
        return
    is_many = isinstance(optim, list | tuple | Mapping)
    raise UsageError(
        f"{call} with {'several optimizers' if is_many else f'{optim!r:.40}'} in place of an optimizer",
        why="it takes one torch.optim.Optimizer",
        fix="call it for each; a second one is saved and resumed by CheckpointManager(root, step, extra={'second': second})"
        if is_many
        else "pass one built from the sharded model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
    )


def refuse_stale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises UsageError for an optimizer that holds a parameter object which sharding has replaced."""
    for group in optimizer.param_groups:
        names = [name for param in group["params"] if (name := getattr(param, _MARK, None)) is not None]
        if names:
            raise UsageError(
                f"{type(optimizer).__name__} was built before the module was sharded",
                why="it holds the old parameter objects: its steps would change nothing",
                fix="build the optimizer from model.parameters() after parallelize",
                name=names[0],
            )


def refuse_copy(call: str, name: str, _memo: Any = None) -> NoReturn:
    """Raises UnsupportedError for a copy, by ``call``, of the module ``name`` of a sharded model ("": of the model)."""
    raise UnsupportedError(
        f"{call} of {'a part of ' if name else ''}a sharded module",
        why="hooks, shards and process groups belong to the one module, so a copy would train wrongly without an error",
        fix="for an average of weights (EMA) keep averages = [p.detach().clone() for p in model.parameters()], and after each step, "
        "within torch.no_grad(), average.lerp_(p, 0.001) for each of them; for a second network (a target) parallelize a second "
        "model in the same way, and target.load_state_dict(model.state_dict()), or, where layers are cut, sw.load_full_state_dict(target, "
        "sw.full_state_dict(model)); whole values: sw.full_state_dict(model)",
        name=name or None,
    )


def refuse_pickling(name: str) -> NoReturn:
    """Raises UnsupportedError for a pickle of the module ``name`` of a sharded model ("": of the model)."""
    values = (
        f'{{n: v for n, v in sw.full_state_dict(model).items() if n.startswith("{name}.")}} for the values of this part'
    )
    raise UnsupportedError(
        f"torch.save or pickle of {'a part of ' if name else ''}a sharded module",
        why="hooks and process groups belong to this process, and where parameters are cut it has a part of them",
        fix=f"on every rank: {values if name else 'sw.save_weights(model, directory) for its values'}, sw.CheckpointManager to go on with the run later",
        name=name or None,
    )


def other_dtype(name: str, was: torch.dtype, now: str) -> UsageError:
    """The error for a tensor of a sharded model that got, or would get, another dtype."""
    return UsageError(
        f"a tensor was {was} when the module was sharded, and {now}",
        why="the recipe says in which dtype each tensor is stored, computed with and reduced; .to(), .half() and the "
        "like bypass it",
        fix='give it to parallelize: precision="bf16", or Precision(storage=..., compute=...); for files only: sw.save_weights(model, '
        'directory, dtype="bfloat16")',
        name=name,
    )


class ModuleSnapshot:
    """The modules and parameters that a sharded module consisted of, to check that they have not changed.

    The check usually compares only ids, some tens of microseconds for hundreds of modules. Only if they differ are
    names looked up, and the full parameters that FSDP2 puts in place of its shards distinguished from foreign ones.
    """

    def __init__(self, root: nn.Module, *, num_ranks: int):
        self._root, self._num_ranks = root, num_ranks
        self._modules = [child for _, child in canonical_modules(root)]
        self._children, self._params = self._now()  # kept alive, so that no id is used twice
        self._child_ids, self._param_ids = list(map(id, self._children)), list(map(id, self._params))
        self._real = [param for param in self._params if param is not None]
        self._trained = list(map(_REQUIRES_GRAD, self._real))
        self._dtypes = list(map(_DTYPE, self._real))
        self._hooks = self._accepted_hooks = hook_counts(self._real)
        self._named = {name: (param, param.requires_grad) for name, param in _named_parameters(root)}

    def check(self, parts: Callable[[], Collection[str]]) -> None:
        """Raises UsageError if a module or parameter was added, removed, replaced, frozen, unfrozen, or cast to another
        dtype since: FSDP2 and DDP would continue without it, and the replicas would drift apart. Also if a hook was
        registered on a parameter where it is not called, or sees only a part of the gradient.

        Args:
            parts: returns the names of parameters of whose gradients this rank has a part, of the elements or of a sum.
        """
        if list(map(_DTYPE, self._real)) != self._dtypes:
            raise self._other_dtype()
        if (hooks := hook_counts(self._real)) != self._accepted_hooks:
            self._refuse_new_hooks(parts())
            self._accepted_hooks = hooks
        children, params = self._now()
        same = list(map(id, children)) == self._child_ids and list(map(id, params)) == self._param_ids
        if same and list(map(_REQUIRES_GRAD, self._real)) == self._trained:
            return
        what, name = self._difference(children)
        if what:
            raise UsageError(
                f"the module changed after it was sharded: {what}",
                why="what is added, replaced, frozen or unfrozen later is not reduced over the ranks as the recipe says",
                fix=_IN_A_RUN
                if what.endswith(("frozen", "unfrozen"))
                else "change the module first, then call parallelize on it, then build the optimizer",
                name=name,
            )

    def _other_dtype(self) -> UsageError:
        was = {id(param): dtype for param, dtype in zip(self._real, self._dtypes, strict=True)}
        name, param = next((n, p) for n, (p, _) in self._named.items() if p.dtype != was[id(p)])
        return other_dtype(name, was[id(param)], f"is {param.dtype} now")

    def _refuse_new_hooks(self, parts: Collection[str]) -> None:
        before = {id(param): hooks for param, *hooks in zip(self._real, *self._hooks, strict=True)}
        for name, (param, _) in self._named.items():
            (on_tensor, after), (had_on_tensor, had_after) = num_hooks(param), before[id(param)]
            is_cut = isinstance(param, DTensor)
            is_wrong = is_cut or (name in parts and has_users_hook(param))
            if (is_wrong and on_tensor > had_on_tensor) or (after > had_after and (is_cut or self._num_ranks > 1)):
                raise UsageError(
                    "a hook was put on a parameter after the module was sharded",
                    why="gradients come to the gathered parameter, so it is never called"
                    if is_cut
                    else "it sees this rank's part of the gradient, before the sum over the ranks",
                    fix="put it on an activation, or change gradients after the window, before optim.step()",
                    name=name,
                )

    def _now(self) -> tuple[list[Any], list[Any]]:
        children = chain.from_iterable(map(dict.values, map(_CHILDREN, self._modules)))
        return list(children), list(chain.from_iterable(map(dict.values, map(_PARAMETERS, self._modules))))

    def _difference(self, children: list[Any]) -> tuple[str, str | None]:
        known = {id(child) for child in (self._root, *self._children)}
        for name, child in canonical_modules(self._root):
            if id(child) not in known:
                return f"a {type(child).__name__} was added or replaced", name
        shards = {id(whole): shard for child in self._modules for whole, shard in gathered_parameters(child)}
        now = dict(_named_parameters(self._root))
        for name, param in now.items():
            before, was_trained = self._named.get(name, (None, False))
            if shards.get(id(param), param) is not before:
                return f"a parameter was {'added' if before is None else 'replaced'}", name
            if param.requires_grad != was_trained:
                return f"a parameter was {'frozen' if was_trained else 'unfrozen'}", name
        gone = next((name for name in self._named if name not in now), None)
        if gone is not None:
            return "a parameter was removed", gone
        return ("modules were removed or moved", None) if list(map(id, children)) != self._child_ids else ("", None)


def _named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, owner, attr in canonical_tensors(root, "_parameters"):
        yield name, owner._parameters[attr]  # type: ignore[misc]
