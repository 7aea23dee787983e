"""What ``fully_shard`` makes of a unit: its parameter groups, and the options it was called with."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor, distribute_module

from shardwise._torch.dtensor import cut_like, local_tensor
from shardwise._torch.patches import patch

_GROUPS = "_shardwise_groups"  # of an FSDPState before torch 2.12, which has room for one


class _Chunks:
    """A lazy ``torch.chunk``: a sequence of its pieces followed by empty ones, each made when it is indexed."""

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


def before_composable(check: Callable[[str, nn.Module], None]) -> None:
    """Calls ``check`` with the name of the function and each module that torch's ``fully_shard``, ``replicate``, or
    ``distribute_module`` (which styles of ``parallelize_module`` call too) is about to change. Scripts import these
    functions before, so that what they look up when they are called is replaced."""
    contract = importlib.import_module("torch.distributed._composable.contract")
    whole = getattr(contract, "RegistryItem", None)

    def checked() -> Any:
        called = _caller().f_locals
        given, name = called["inp_module"], called["func"].__name__
        for each in given if isinstance(given, list | tuple) else (given,):
            if name != "checkpoint":
                check(name, each)
        return whole()  # type: ignore[misc]

    if whole is not None:
        patch(contract, "RegistryItem", checked, "refuses fully_shard and replicate of a sharded model")
    patch(nn.Module, "_distribute_module_applied", _Asked(check), "refuses distribute_module of a sharded model")


def _caller() -> Any:
    frame = inspect.currentframe()
    return frame and frame.f_back and frame.f_back.f_back


class _Asked:
    """An attribute that ``distribute_module`` asks a module for before it changes it, and then sets on it."""

    def __init__(self, check: Callable[[str, nn.Module], None]):
        self._check = check

    def __get__(self, module: nn.Module | None, _: type) -> bool:
        if module is not None and _caller().f_code is distribute_module.__code__:
            self._check("distribute_module", module)
        return False


@contextlib.contextmanager
def lazy_chunks() -> Iterator[None]:
    """Context manager: ``fully_shard`` makes only the two chunks of a parameter that it reads, not one per rank (at
    8192 ranks and 127 units that took four minutes)."""
    whole = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = whole


@contextlib.contextmanager
def parameter_groups(
    groups: list[tuple[list[Tensor], DeviceMesh, Any]], after_forward: DeviceMesh | None
) -> Iterator[None]:
    """Context manager: ``fully_shard`` puts the parameters of one unit into these groups, each with its own mesh and mixed
    precision policy. FSDP2 makes several groups by itself for parameters on several meshes, but a group has one dtype
    of trained parameters. Groups reshard after forward over the last dim of ``after_forward``; None: as ``fully_shard``
    was called."""
    whole, owner = _fully_shard._init_param_group, _fsdp_param.nn

    def each(state: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        modules, usual, usual_after, device, placement, _, offload = args
        for members, over, policy in groups:
            mesh = usual if over == usual.mesh else _mesh_info(over)
            after = usual_after if usual_after is None or mesh is usual else mesh
            if after_forward is not None and mesh is usual:
                after = HSDPMeshInfo(after_forward, shard_mesh_dim=1, replicate_mesh_dim=0)
            ids = {id(param) for param in members}
            mine = [param for param in params if id(param) in ids]
            whole(state, mine, modules, mesh, after, device, placement, policy, offload, **kwargs)  # type: ignore[arg-type]
            if not hasattr(state, "_fsdp_param_groups"):  # before torch 2.12: the last one only
                state.__dict__.setdefault(_GROUPS, []).append(state._fsdp_param_group)

    _fully_shard._init_param_group = each  # type: ignore[assignment]
    _fsdp_param.nn = _Shards  # type: ignore[assignment]
    try:
        yield
    finally:
        _fully_shard._init_param_group, _fsdp_param.nn = whole, owner


class _Shards:
    """Stands for ``torch.nn`` while shards are made: before torch 2.12 those of whole numbers would require a gradient first, and
    ``nn.Parameter`` detaches a DTensor by its dispatch, which takes a millisecond for each new shape."""

    Module = nn.Module

    @staticmethod
    def Parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:  # noqa: N802 - torch's name
        if requires_grad is None:
            requires_grad = data.is_floating_point() or data.is_complex()
        if not isinstance(data, DTensor):
            return nn.Parameter(data, requires_grad)
        made = cut_like(local_tensor(data), data).requires_grad_(requires_grad)
        made._is_param = True  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    return FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def unit_groups(module: nn.Module) -> list[Any]:
    """The ``FSDPParamGroup`` objects of one unit, which all-gather and reduce-scatter."""
    if not isinstance(module, FSDPModule):
        return []
    return groups_of(module._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    known: list[Any] = getattr(state, _GROUPS, [])
    return known or ([] if state._fsdp_param_group is None else [state._fsdp_param_group])


def init_groups(root: Any, states: Iterable[Any]) -> None:
    """Initialises a tree of units, of which ``root`` is the state of the root. Before torch 2.12 that reaches the last group of each unit."""
    root._lazy_init()
    for state in states:
        for group in groups_of(state)[:-1] if hasattr(state, _GROUPS) else ():
            last = state._fsdp_param_group
            group.comm_ctx, group._module_fqn = last.comm_ctx, last._module_fqn
            if last.post_forward_mesh_info is None:
                group.post_forward_mesh_info = None
            group.lazy_init()


def sum_gradients(module: nn.Module) -> None:
    """Makes a unit sum gradients over its ranks; FSDP2 would divide by their number."""
    for group in unit_groups(module):
        group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True


def unit_reshard(module: nn.Module) -> bool | int:
    """``reshard_after_forward`` of one unit, as it was passed to ``fully_shard``."""
    group = unit_groups(module)[0]
    if group.post_forward_mesh_info is None:
        return False
    size = group.post_forward_mesh_info.shard_mesh_size
    return True if size == group.mesh_info.shard_mesh_size else size


def unit_policies(module: nn.Module) -> tuple[Any, Any]:
    """The ``mp_policy`` and the ``offload_policy`` of one unit, as they were passed to ``fully_shard``."""
    group = unit_groups(module)[0]
    return group.mp_policy, group.offload_policy


def reset_iteration(module: nn.Module) -> None:
    """Resets a tree of units after an unfinished forward or backward. Before the first forward there is nothing to
    reset, and torch's own ``reset_iter_state`` (new in 2.13) fails."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    if state is None or not state._is_root:
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()  # type: ignore[operator]
        return
    shared, wait = state._comm_ctx, state._device_handle.current_stream().wait_event
    for kept in (shared.all_gather_state, *take_reductions(shared)):
        if kept is not None and kept.event is not None:
            wait(kept.event)
    shared.all_gather_state = None
    shared.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in groups_of(each):
            _reset_group(group, wait)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def take_reductions(shared: Any) -> list[Any]:
    """The reductions whose buffers a root still holds; removes them from the root."""
    if not hasattr(shared, "reduce_scatter_states"):  # before torch 2.12 there was one at most
        found, shared.reduce_scatter_state = [shared.reduce_scatter_state], None
    else:
        found, shared.reduce_scatter_states = shared.reduce_scatter_states, []
    return [state for state in found if state is not None]


def _reset_group(group: Any, wait: Callable[[Any], None]) -> None:
    found, group._all_gather_result = group._all_gather_result, None
    if found is not None:
        if found.all_gather_event is not None:
            wait(found.all_gather_event)
        if isinstance(found.all_gather_work, dist.Work):
            found.all_gather_work.wait()
    reduced, group._all_reduce_state = group._all_reduce_state, None
    for event in (group._post_reduce_event, None if reduced is None else reduced.event):
        if event is not None:
            wait(event)
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._post_reduce_event = group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def gathered_parameters(module: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """``(gathered, sharded)`` of each parameter of a unit's module: while the unit is gathered, FSDP2 has put the first
    in the place of the second."""
    for group in unit_groups(module):
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                yield whole, param.sharded_param
