"""Calls of torch on modules of a sharded model that would do something else to it than to a plain one: casts, moves, copies, pickles,
other parameters for one call, and wrappers that cut it or sum its gradients once more.

They are functions of ``nn.Module``, and of torch's wrappers, that look first whether a module is of a sharded model.
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise._torch.fully_shard import before_composable
from shardwise._torch.modules import before_functional_call, replace_apply
from shardwise._torch.patches import patch
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel.runtime import Runtime, wrapped_around
from shardwise.parallel.stale import other_dtype, refuse_copy, refuse_pickling

_LAYOUTS = {"fully_shard": "dp_shard=-1", "replicate": "dp_replicate=-1", "distribute_module": "tp=-1"}
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
# Each module of a sharded model: the model, the module's name, and whether it holds a parameter that is cut.
_known: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Runtime], str, bool]]" = weakref.WeakKeyDictionary()
_is_installed = False


def watch_modules(runtime: Runtime) -> None:
    """Refuses such calls on modules of ``runtime``."""
    global _is_installed
    cut: set[str] = set()  # names of modules
    for name, param in runtime.recipe.params.items():
        if param.cuts or runtime.recipe.is_cut:
            words = name.split(".")
            cut |= {".".join(words[:i]) for i in range(len(words))}
    for name, module in runtime.modules:
        if name and next(itertools.chain(module.parameters(), module.buffers()), None) is None:
            continue  # an activation, of which all models of a library may have the same one
        holds_cut = name in cut
        _known[module] = (weakref.ref(runtime), name, holds_cut)
        if holds_cut or not name:
            # FSDP2 puts one of its own on the class.
            module.__dict__["__deepcopy__"] = functools.partial(refuse_copy, "deepcopy", name)
    if not _is_installed:
        _is_installed = True
        replace_apply(_checked)
        patch(nn.Module, "__reduce_ex__", _reduce, "refuses pickles and copies of a sharded model")
        before_functional_call(_refuse_other_values)
        before_composable(_refuse_again)
        for wrapper in _WRAPPERS:
            patch(wrapper, "__init__", _wrapping(wrapper.__init__), "refuses to wrap a sharded model")  # type: ignore[misc]


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """``__reduce_ex__`` of modules, by which they are pickled and copied."""
    found = _known.get(module)
    if found is not None:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != "copy":
            refuse_pickling(found[1])  # its hooks cannot be, whole or not
        if found[2] or not found[1]:
            refuse_copy(f"copy.{caller.f_code.co_name}", found[1])
    return super(nn.Module, module).__reduce_ex__(protocol)


def _checked(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Raises UsageError for a function of tensors that ``module.half()``, ``.to()``, ``.share_memory()`` and the like are about to apply,
    if it changes a dtype or a device, or moves shards into shared memory. It is tried on a tensor of one element."""
    if module not in _known:
        return
    runtime, prefix, holds_cut = _known[module]
    owner = runtime()
    tried: set[tuple[torch.dtype, torch.device]] = set()
    for name, tensor in _tensors(module):
        kind = (tensor.dtype, tensor.device)
        if kind in tried or tensor.device.type == "meta":
            continue
        tried.add(kind)
        probe = torch.zeros((1,) * max(tensor.dim(), 1), dtype=tensor.dtype, device=tensor.device)
        was_shared = probe.is_shared()
        made = function(probe)
        name = f"{prefix}.{name}" if prefix else name
        if made.dtype != tensor.dtype:
            raise other_dtype(name, tensor.dtype, f"would be {made.dtype}")
        if made.device.type != tensor.device.type or (made.device != tensor.device and tensor.device.index is not None):
            raise UsageError(
                f"a tensor of a sharded model that would go from {tensor.device} to {made.device}",
                why="the ranks exchange its shards and gradients by a backend of the device that the world was made for",
                fix=f'say the device when the run starts: sw.init({str(owner.world.layout) if owner else ""!r}, device="{made.device.type}"); values on '
                "the CPU: sw.full_state_dict(model); parameters in host memory: Sharding(offload=True)",
                name=name,
            )
        if made.is_shared() and not was_shared and holds_cut:
            raise UnsupportedError(
                "share_memory() of a sharded model",
                why="of its parameters each rank has a part, of a type that torch cannot move into shared memory, and other processes could not "
                "use a part",
                fix="share the values: state = sw.full_state_dict(model) on every rank, then plain.load_state_dict(state) and plain.share_memory() of "
                "a model that is not sharded, on rank 0",
                name=name,
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _refuse_other_values(module: nn.Module, values: Any) -> None:
    """Raises UsageError for ``functional_call`` with values in place of a parameter that is cut."""
    if not _known:
        return
    parts = values if isinstance(values, tuple | list) else (values,)
    for name, value in [pair for part in parts if isinstance(part, Mapping) for pair in part.items()]:
        path, _, attr = str(name).rpartition(".")
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue  # torch's own error names it
        known = _known.get(owner)
        own = owner._parameters.get(attr)
        if known is None or not known[2] or own is None or own is value:
            continue
        raise UsageError(
            "functional_call of a sharded model, with other values for a parameter",
            why="the parameter is cut over the ranks, and its layers compute with this rank's parts, or with what they gather of them: other "
            "values would be passed by, or be used as parts",
            fix='keep parameters whole on every rank: sw.init("dp_replicate=-1"); or, where the values change seldom, load them into a second model '
            "that is parallelized in the same way: sw.load_full_state_dict(other, values), and call that",
            name=f"{known[1]}.{attr}" if known[1] else attr,
        )


def _wrapping(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if isinstance(module, nn.Module):
            _refuse_wrapper(type(self).__name__, module)
        init(self, *args, **kwargs)

    return call


def _refuse_wrapper(kind: str, module: nn.Module) -> None:
    if any(child in _known for child in module.modules()):
        raise wrapped_around(kind)


def _refuse_again(kind: str, module: nn.Module) -> None:
    """Raises UsageError for a function of torch that would shard or replicate modules of a sharded model once more."""
    found = next((_known[child] for child in module.modules() if child in _known), None)
    if found is None:
        return
    plan = " (which styles of parallelize_module call)" if kind == "distribute_module" else ""
    raise UsageError(
        f"torch's {kind}{plan} of a model that parallelize has made parallel",
        why="its parameters are cut already, or each rank has a copy whose gradients are summed: they would be cut, or summed, once more",
        fix=f'leave the call out: the layout says what is done, sw.init("{_LAYOUTS[kind]}") here, or both in one; for a module of your own '
        "around the model, build it first, with the plain model in it, and give the whole to parallelize",
        name=found[1] or None,
    )
