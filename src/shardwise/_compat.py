"""The only file that touches private names of torch; each with what it is for, checked against torch 2.13."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed._composable.replicate import DDP as DDPModule  # noqa: N811 - a class: replicate() puts it over a module's own
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils._pytree import tree_any, tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "BatchNormBase",
    "DDPModule",
    "StopRecomputation",
    "TorchDispatchMode",
    "at_end_of_backward",
    "cast_floating",
    "changed_in_graphs",
    "checkpointed",
    "connection_to",
    "default_store",
    "foreach_norms",
    "foreach_scale",
    "forget_failed_group",
    "function_modes",
    "gathered_parameters",
    "group_timeout_s",
    "is_accumulated",
    "is_spectral_norm",
    "is_taken_apart",
    "is_unscaled",
    "lazy_chunks",
    "local_tensor",
    "look_in_graph",
    "looked_at_on_meta",
    "mark_in_graph",
    "materialise",
    "memory_budget",
    "num_hooks",
    "on_scalar_read",
    "operator_names",
    "parameter_groups",
    "reset_iteration",
    "share_hooks",
    "tell_scaler",
    "tree_any",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "unit_groups",
    "unit_policies",
    "unit_reshard",
    "unseen",
]


def default_store() -> dist.Store:
    """The store of the default process group: a peer can leave word there while its main thread is blocked."""
    return dist.distributed_c10d._get_default_store()


def group_timeout_s(device: torch.device) -> float | None:
    """Seconds that collectives of the default group wait; None where this torch, or the backend, does not say."""
    try:
        return float(dist.group.WORLD._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def connection_to(store: dist.Store) -> dist.Store:
    """A connection of its own to the same store: a read waits for its answer, and others would wait behind it."""
    return store.clone()  # type: ignore[attr-defined] - missing in torch's type stubs


def forget_failed_group() -> None:
    """After an ``init_process_group`` that failed: torch has counted the group that never was, and its next one would look
    for its peers under another name than theirs."""
    dist.distributed_c10d._world.group_count = 0


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` when the backward that is running ends. Only from within one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_accumulated(param: Tensor) -> bool:
    """Whether the backward that is running adds to ``param.grad``; ``torch.autograd.grad`` does not. Only from within one."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node)
    except RuntimeError as error:  # how torch answers for a leaf that autograd.grad was asked for
        if "autograd.grad()" not in str(error):
            raise
        return False


def checkpointed(error: BaseException) -> Any:
    """The function that ``torch.utils.checkpoint`` ran again when ``error`` was found; None: it was not found there."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        again = getattr(frame.f_locals.get("frame"), "recompute_fn", None)
        if again is not None:
            return again.__closure__[again.__code__.co_freevars.index("fn")].cell_contents
    return None


changed_in_graphs: set[type] = set()
"""Classes of modules that :func:`look_in_graph` was told of."""

_made_in_graphs = WeakIdKeyDictionary()  # what stands for a tensor while a graph is made -> its version


def mark_in_graph(tensor: Tensor) -> None:
    """In code that is being compiled: :func:`look_in_graph` will tell whether ``tensor`` was changed in place since. Neither leaves
    anything in the graph."""
    from torch._dynamo.comptime import comptime  # takes a second to import

    comptime(_note_made)


def look_in_graph(module: nn.Module, tensor: Tensor) -> None:
    """Remembers the class of ``module`` if ``tensor``, marked before, was changed; without a guard on ``module``: blocks that are
    alike go on sharing one graph."""
    from torch._dynamo.comptime import comptime

    comptime(_note_change)


def _note_made(context: Any) -> None:
    """Reads the local variables of its caller; a function with variables of its own is not taken."""
    made = context.get_local("tensor").as_fake()
    _made_in_graphs[made] = made._version


def _note_change(context: Any) -> None:
    found = context.get_local("tensor").as_fake()
    if found._version != _made_in_graphs.get(found, found._version):
        changed_in_graphs.add(context.get_local("module").python_type())


class _Chunks:
    """The pieces that ``torch.chunk`` cuts a tensor into, and empty ones after them, each made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim, self._num = tensor, dim, num_chunks
        self._size = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, i: int) -> Tensor:
        if not 0 <= i < self._num:
            raise IndexError(i)
        start, total = i * self._size, self._tensor.size(self._dim)
        if start >= total:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, total - start))


@contextlib.contextmanager
def lazy_chunks() -> Iterator[None]:
    """Within: ``fully_shard`` makes the two pieces of a parameter that it looks at, and not one for every rank (on 8192
    ranks and 127 units they took four minutes)."""
    whole = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = whole


@contextlib.contextmanager
def parameter_groups(groups: list[tuple[list[Tensor], Any]], after_forward: DeviceMesh | None) -> Iterator[None]:
    """Within: ``fully_shard`` puts the parameters of one unit into these groups, each with a precision policy of its own.
    FSDP2 makes several by itself, for parameters on several meshes, but a group has one dtype of what is trained. They are
    resharded over the last dim of ``after_forward``; None: as ``fully_shard`` was asked."""
    whole = _fully_shard._init_param_group

    def each(state: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        modules, mesh, after, device, placement, _, offload = args
        if after_forward is not None:
            after = HSDPMeshInfo(after_forward, shard_mesh_dim=1, replicate_mesh_dim=0)
        for members, policy in groups:
            ids = {id(param) for param in members}
            mine = [param for param in params if id(param) in ids]
            whole(state, mine, modules, mesh, after, device, placement, policy, offload, **kwargs)  # type: ignore[arg-type]

    _fully_shard._init_param_group = each  # type: ignore[assignment]
    try:
        yield
    finally:
        _fully_shard._init_param_group = whole


def unit_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of one unit: the objects that gather and reduce."""
    if not isinstance(module, FSDPModule):
        return []
    return list(module._get_fsdp_state()._fsdp_param_groups)


def unit_reshard(module: nn.Module) -> bool | int:
    """``reshard_after_forward`` of one unit, as ``fully_shard`` was given it."""
    group = unit_groups(module)[0]
    if group.post_forward_mesh_info is None:
        return False
    size = group.post_forward_mesh_info.shard_mesh_size
    return True if size == group.mesh_info.shard_mesh_size else size


def unit_policies(module: nn.Module) -> tuple[Any, Any]:
    """The ``mp_policy`` and the ``offload_policy`` of one unit, as ``fully_shard`` was given them."""
    group = unit_groups(module)[0]
    return group.mp_policy, group.offload_policy


def reset_iteration(module: nn.Module) -> None:
    """Forgets what a forward or backward of a unit tree left half done; before the first forward there is nothing, and
    torch's own ``reset_iter_state`` fails."""
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        module.reset_iter_state()


def gathered_parameters(module: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """``(whole, sharded)`` of the parameters of a unit's module: while the unit is gathered, FSDP2 has put the first in
    the place of the second."""
    for group in unit_groups(module):
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                yield whole, param.sharded_param


def looked_at_on_meta(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor on meta whose values ``op`` is about to take away (``.item()``, ``bool()``, ``.tolist()``, ``.cpu()``), if any."""
    leaves = op is torch.ops.aten._local_scalar_dense.default or (
        op is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
    )
    return args[0] if leaves and args[0].device.type == "meta" else None


def materialise(module: nn.Module, device: torch.device, *, cut: torch.device) -> None:
    """Gives memory to what is still on meta of a sharded module: on ``cut`` to shards, on ``device`` to the rest. Unlike
    ``to_empty`` it leaves real tensors alone, so that tied buffers stay tied."""

    def make(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        return torch.empty_like(tensor, device=cut if isinstance(tensor, DTensor) else device)

    module._apply(make)


def cast_floating(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module.to(dtype)`` that keeps imaginary parts: complex tensors get the complex dtype of that precision."""
    if not any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
        return module.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(cast)


def foreach_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The p-norm of each tensor, stacked, computed in ``dtype``."""
    return torch.stack(list(torch._foreach_norm(tensors, norm_type, dtype=dtype)))


def foreach_scale(tensors: list[Tensor], factor: float) -> None:
    """Multiplies each tensor by ``factor``, in place."""
    torch._foreach_mul_(tensors, factor)


def tell_scaler(scaler: torch.amp.GradScaler, optim: torch.optim.Optimizer, *, found_inf: bool) -> None:
    """Leaves ``scaler`` as its ``unscale_(optim)`` would: for gradients that were divided, and looked at, by other means."""
    scale, _ = scaler._check_scale_growth_tracker("unscale_")
    state = scaler._per_optimizer_states[id(optim)]
    state["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(found_inf))}
    state["stage"] = OptState.UNSCALED


def is_unscaled(scaler: torch.amp.GradScaler, optim: torch.optim.Optimizer) -> bool:
    """Whether the gradients of ``optim`` were divided by the scale since the last ``scaler.update()``."""
    return scaler._per_optimizer_states[id(optim)]["stage"] is not OptState.READY


def num_hooks(tensor: Tensor) -> tuple[int, int]:
    """How many hooks ``register_hook`` and ``register_post_accumulate_grad_hook`` have put on ``tensor``."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Puts the hooks of ``tensor`` on ``other`` as well. They are one collection: handles remove them from both."""
    on_tensor, after = num_hooks(tensor)
    if on_tensor:
        other._backward_hooks = tensor._backward_hooks
    if after:
        other._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def is_spectral_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a spectral norm, as a parametrization or as a hook on the layer."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, without the autograd work of ``to_local``; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def function_modes() -> list[Any]:
    """The modes that see every call of torch now, outermost first."""
    return torch.overrides._get_current_function_mode_stack()


def operator_names() -> list[str]:
    """The names of torch's own operators, without overloads."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return sorted(name.removeprefix("aten::") for name in names)


def is_taken_apart(operator: Any) -> bool:
    """Whether autograd and what stands below it see other operators in the place of this one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


@contextlib.contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Within: graphs that are compiled keep this part of their activations for backward, and every random number.

    torch counts ``bernoulli``, of which dropout is made, among what may be run again, where it draws anew: with a budget below
    1 gradients belonged to other dropout masks, without an error. A budget of exactly 0 keeps nothing whatever is banned.
    """
    from torch._functorch import config, partitioners

    choose = partitioners.choose_saved_values_set

    def keeping_random(joint_graph: Any, *args: Any, **kwargs: Any) -> Any:
        for node in joint_graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return choose(joint_graph, *args, **kwargs)

    partitioners.choose_saved_values_set = keeping_random  # type: ignore[assignment]
    try:
        with config.patch(activation_memory_budget=budget + 1e-9 if budget < 1 else budget):
            yield
    finally:
        partitioners.choose_saved_values_set = choose


_on_scalar_read = WeakIdKeyDictionary()  # root of a mesh -> what is called


def on_scalar_read(mesh: DeviceMesh, call: Callable[[DTensor], None]) -> None:
    """Before a Python number is taken from a DTensor over ``mesh``, or a part of that mesh, calls ``call`` with the DTensor:
    ``item()``, ``float()``, ``bool()``, a scalar argument of an operator, which torch takes from this rank's piece; a format,
    ``tolist()``, ``numpy()``, of which its errors do not say what to do. DTensors over other meshes are read as before."""
    handlers, read = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default
    if not _on_scalar_read:
        handlers[read] = _scalar_reader(handlers.get(read))
        for name in ("__format__", "tolist", "numpy"):
            _call_before(name)
    _on_scalar_read[mesh._get_root_mesh()] = call


def _scalar_reader(before: Callable[..., Any] | None) -> Callable[..., Any]:
    if getattr(before, "is_ours", False):
        return before  # type: ignore[return-value]

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None:
            call(tensor)
        if before is not None:
            return before(op, args, kwargs)
        return op(tensor._local_tensor) if tensor.device_mesh.get_coordinate() is not None else None

    read.is_ours = True  # type: ignore[attr-defined]
    return read


def _call_before(name: str) -> None:
    method = getattr(DTensor, name)

    @functools.wraps(method)
    def read(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        call = _on_scalar_read.get(tensor.device_mesh._get_root_mesh())
        if call is not None and args != ("",):  # f"{x}" is printing
            call(tensor)
        return method(tensor, *args, **kwargs)

    read.is_ours = True  # type: ignore[attr-defined]
    if not getattr(method, "is_ours", False):
        setattr(DTensor, name, read)
