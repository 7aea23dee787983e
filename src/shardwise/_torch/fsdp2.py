"""FSDP2's parameter groups without FSDP2's module hooks: units all-gather, free and reduce-scatter when called.

``fully_shard`` makes the parameter groups (shards, buffers, streams, collectives) and registers module hooks that
decide when each group works. Those hooks depend on what a forward returns and on what ran most recently, which differs
by rank where ranks run different code. :mod:`shardwise.techniques.data.unit_order` decides instead, and calls the
methods here.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage
from torch.utils.hooks import RemovableHandle

from shardwise._torch.fully_shard import groups_of, init_groups, take_reductions
from shardwise._torch.modules import PausableHooks, around_calls
from shardwise._torch.spans import span
from shardwise._torch.stand_ins import StandIn

_SHARDED, _WHOLE = map(attrgetter, ("sharded_param", "_unsharded_param"))
_VERSION, _LOCAL_VERSION = map(attrgetter, ("_version", "_local_tensor._version"))


def _users(param: Tensor) -> dict[str, Any]:
    """The attributes that the user has set on a parameter."""
    return {key: value for key, value in vars(param).items() if key != "_is_param" and not key.startswith("_shardwise")}


def take_over(root: nn.Module) -> None:
    """Removes the FSDP2 hooks by which the units of ``root`` gather, free and reduce by themselves.

    Also removes the hooks by which ``state_dict()`` frees gathered parameters: if one rank called it, the others would
    wait for that rank in backward. The parameters must have memory already.
    """
    states = {id(state): state for module in root.modules() if (state := _state(module)) is not None}
    init_groups(_state(root), states.values())
    for state in states.values():
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in groups_of(state):
            for name in ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"):
                for handle in getattr(group, name).values():
                    handle.remove()


def when_interrupted(module: nn.Module, call: Callable[[], None]) -> None:
    """Makes ``call`` run when a call of ``module`` ends by something that is not an Exception (Ctrl-C): torch runs no
    hooks then."""

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except Exception:
                raise
            except BaseException:
                call()
                raise

        return run

    around_calls(module, around)


class Unit:
    """An FSDP2 unit: one or several modules whose parameters are all-gathered and reduce-scattered together.

    Where ``dp_shard`` is 1, shards are whole: they are cast to the compute dtype and not gathered, and without replicas
    gradients are cast to the reduce dtype and not sent. FSDP2 would copy both twice, through the buffers of its
    collectives.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]):
        self.name, self.modules = name, tuple(modules)
        self._state = _state(self.modules[0])
        self.groups: list[Any] = groups_of(self._state)
        self._params = [param for group in self.groups for param in group.fsdp_params]
        own = ((param, _users(param.sharded_param)) for param in self._params)
        self._attributes = [(param, users) for param, users in own if users]
        self._stand_ins: list[StandIn] | None = None  # None: not made yet; empty: nothing is computed in another dtype
        self._runs = False  # a forward of the model runs
        self._guards = PausableHooks([])
        self._hooked: set[int] = set()
        self._hooked_before: set[int] = set()
        self._is_whole = all(map(_is_whole, self.groups))
        self._is_alone = self._is_whole and not any(map(_has_replicas, self.groups))
        self._keeps_whole = self._reuses = self._ends = False
        self._version = -1  # of the shards when they were cast or gathered, if that is used again
        self._lost: list[Tensor] = []  # shards whose gathered parameter a forward has written or replaced
        self._compare: Callable[[Sequence[Tensor]], Tensor] | None = None  # makes marks of values, in the next forward
        self._before: Tensor | None = None  # marks of the gathered parameters

    def guard(self, handles: Sequence[RemovableHandle]) -> None:
        """Pauses these forward pre-hooks while the modules hold whole parameters."""
        self._guards = PausableHooks(handles, first=True)

    @property
    def is_trained(self) -> bool:
        """Whether one of its parameters requires a gradient."""
        return any(param.sharded_param.requires_grad for param in self._params)

    @property
    def is_gathered(self) -> bool:
        return all(group.is_unsharded for group in self.groups)

    @property
    def is_free(self) -> bool:
        return all(group.is_sharded for group in self.groups)

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called on the root before a forward: streams wait for writes to the shards, inputs move to the device."""
        args, kwargs = self._state._root_pre_forward(module, args, kwargs)
        self._state._state_ctx.iter_forward_root = None
        return args, kwargs

    # ---- parameters ------------------------------------------------------------------------------------------

    def gather(self, *, backward: bool = False) -> None:
        """All-gathers the parameters unless they are gathered, and sets them on the modules. All ranks of the unit's
        mesh call it."""
        # Training later uses what an evaluation gathered.
        with torch.inference_mode(False), span("gather", self.name or "(root)"):
            for group in self.groups:
                group._training_state = TrainingState.PRE_BACKWARD if backward else TrainingState.FORWARD
                if self._is_whole:
                    self._cast(group)
                    continue
                if self._reuses and not group.is_unsharded:
                    self._version = self.version()
                group.unshard(group.unshard_async_op)
                group.wait_for_unshard()
        self.show_whole()
        if self._compare is not None and not backward:
            self._before = self._compare([param._unsharded_param.detach() for param in self._params])

    def _cast(self, group: Any) -> None:
        """Does what an all-gather over one rank does, by one copy of each parameter."""
        if group.is_unsharded:
            return
        self._version = self.version()
        shards = [param._sharded_param_data for param in group.fsdp_params]
        for param, shard in zip(group.fsdp_params, shards, strict=True):
            param.init_all_gather_outputs([shard.numel()], [param.param_dtype or shard.dtype], 1, group.device)
        outputs = [param.all_gather_outputs[0] for param in group.fsdp_params]
        for output in outputs:
            alloc_storage(output)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(outputs)):
            torch._foreach_copy_(outputs, shards)
        for param in group.fsdp_params:
            param.init_unsharded_param()
        group._to_unsharded()

    def prefetch(self, *, backward: bool) -> None:
        """Starts the all-gather; :meth:`gather` waits for it. All ranks of the unit's mesh call it."""
        if self._is_whole:
            return
        state = TrainingState.PRE_BACKWARD if backward else TrainingState.FORWARD
        with torch.inference_mode(False), span("prefetch", self.name or "(root)"):
            for group in reversed(self.groups) if backward else self.groups:
                with group.use_training_state(state):
                    group.unshard(group.unshard_async_op)

    def drop_prefetched(self) -> None:
        """Discards an all-gather that was started and not used: by the next forward the shards may have changed."""
        for group in self.groups:
            found, group._all_gather_result = group._all_gather_result, None
            if found is not None and found.all_gather_work is not None:
                found.all_gather_work.wait()

    def leave_forward(self) -> None:
        """Frees the gathered parameters as ``reshard_after_forward`` says; the modules hold their shards either way."""
        with span("leave the forward of", self.name or "(root)"):
            self._note_writes()
            for group in self.groups:
                group._training_state = TrainingState.FORWARD
                group.reshard()
                group._training_state = TrainingState.IDLE
            self.show_shards()

    def watch_writes(self, compare: Callable[[Sequence[Tensor]], Tensor] | None) -> None:
        """Forgets what forwards have written so far. ``compare``: makes a mark of the values of each tensor, which are compared in the next
        one too: versions do not show writes through ``.data``."""
        self._lost, self._compare, self._before = [], compare, None

    def lost_writes(self) -> list[Tensor]:
        """The shards whose gathered parameter a forward has written or replaced since, as far as that was seen."""
        return self._lost

    def _note_writes(self) -> None:
        for i, param in enumerate(self._params):
            held = param._module_info.module._parameters.get(param._module_info.param_name)
            known = (param._unsharded_param, param.sharded_param, *(self._stand_ins or ())[i : i + 1])
            if not any(held is each for each in known):
                self._lost.append(param.sharded_param)
        if self._before is not None and self._compare is not None:
            changed = self._compare([param._unsharded_param.detach() for param in self._params]) != self._before
            self._lost += [
                param.sharded_param for param, is_so in zip(self._params, changed.tolist(), strict=True) if is_so
            ]
            self._compare = self._before = None

    def free(self) -> None:
        for group in self.groups:
            group._training_state = TrainingState.IDLE
            group.reshard()
        self.show_shards()

    def release(self) -> None:
        """Frees the gathered parameters, unless :meth:`reuse` keeps them and the shards were not written since."""
        if self._reuses and self.version() == self._version:
            self.show_shards()
        else:
            self.free()

    def reuse(self, keep: bool, *, gathered: bool) -> None:
        """Sets whether what is computed with is used again by several forwards and backwards, until the argument is False:
        casts of shards that are whole and, with ``gathered``, gathered parameters that a forward leaves gathered."""
        if not (self._is_whole or gathered):
            return
        self.free()
        self._reuses, self._ends = keep, False
        self._set_resharding()

    def end_reuse(self, ends: bool) -> None:
        """Sets whether the next backward is the last one before parameters change: gathered ones are freed by it."""
        if self._reuses and not self._is_whole and ends != self._ends:
            self._ends = ends
            self._set_resharding()

    def show_whole(self) -> None:
        """Sets the gathered parameters on the modules."""
        _show(self._params, map(_WHOLE, self._params))
        for param, users in self._attributes:
            vars(param._unsharded_param).update(users)
        self._guards.pause()

    def show_shards(self) -> None:
        """Sets the sharded parameters, which the user knows, on the modules, or what stands for them while a forward runs;
        gathered memory is kept."""
        _show(self._params, (self._stand_ins if self._runs else None) or map(_SHARDED, self._params))
        self._guards.resume()

    def run(self, runs: bool) -> None:
        """Sets whether a forward of the model runs: what is not gathered then has the dtype that it is computed in. Called while
        the modules hold shards, or when they are to hold them."""
        if self._stand_ins is None:
            dtypes = [param.param_dtype or param.orig_dtype for param in self._params]
            differ = any(param.param_dtype is not None for param in self._params)
            self._stand_ins = list(map(StandIn, map(_SHARDED, self._params), dtypes)) if differ else []
        if self._stand_ins and runs != self._runs:
            self._runs = runs
            self.show_shards()

    def lend(self, module: nn.Module) -> None:
        """Sets the gathered parameters on one module until its forward has run, if they are still gathered."""
        mine = [param for param in self._params if self.is_gathered and _holds(param, module)]
        if not mine:
            return
        for param in mine:
            param._setattr_on_modules(param._unsharded_param)

        def take_back(*_: Any) -> None:
            handle.remove()
            for param in mine:
                param._setattr_on_modules(param.sharded_param)

        handle = module.register_forward_hook(take_back, always_call=True)

    def version(self) -> int:
        """A number that grows with every in-place write to the shards.

        An operation on a DTensor counts in the DTensor's version, one on its local tensor in that tensor's. Operations
        on lists of DTensors (``torch._foreach_mul_``) and writes through ``.data`` count in neither.
        """
        shards = list(map(_SHARDED, self._params))
        try:
            return sum(map(_VERSION, shards)) + sum(map(_LOCAL_VERSION, shards))
        except RuntimeError:  # made in inference mode: such tensors have no version
            both = (tensor for shard in shards for tensor in (shard, shard._local_tensor))
            return sum(tensor._version for tensor in both if not tensor.is_inference())

    def moved(self) -> Tensor | None:
        """The shard of a gathered parameter that is no longer in the all-gather output: a forward gave it other
        memory."""
        for param in self._params:
            outputs = param.all_gather_outputs
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None and len(outputs) == 1 and whole.data_ptr() != outputs[0].data_ptr():
                return param.sharded_param
        return None

    # ---- gradients -------------------------------------------------------------------------------------------

    def hook_gradients(self, make: Callable[[], Callable[[Tensor], None]]) -> None:
        """Registers a post-accumulate-grad hook on each gathered, trained parameter that has none yet. The hook must
        keep nothing alive: it is held in C++, where a reference cycle is never freed."""
        for param in self._params:
            whole = param._unsharded_param
            if whole.requires_grad and id(whole) not in self._hooked:
                whole.register_post_accumulate_grad_hook(make())
                self._hooked.add(id(whole))

    def hook_before_gradients(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Registers a hook that receives each gradient before it is accumulated, and may return another one."""
        for param in self._params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and id(whole) not in self._hooked_before:
                whole.register_hook(hook)
                self._hooked_before.add(id(whole))

    def positions_with_gradient(self) -> list[int]:
        """Indices (in the order of :meth:`shards`) of the parameters that have an unreduced gradient. After the
        reduce-scatter FSDP2 can no longer distinguish 'used, zero' from 'not used'."""
        return [i for i, grad in enumerate(map(_whole_gradient, self._params)) if grad is not None]

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients over the ranks, rather than accumulating them locally."""
        return all(group.reduce_grads for group in self.groups)

    def reduce(self) -> None:
        """Reduce-scatters gradients (zeros where this rank has none) or accumulates them; then frees the parameters."""
        with span("reduce" if self.reduces else "accumulate", self.name or "(root)"):
            for group in reversed(self.groups):
                if group.reduce_grads and self._is_alone:
                    _keep_gradients(group)
                    continue
                if group.reduce_grads:
                    _fill_unused(group)
                    _agree_on_dtype(group)
                elif not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
                    continue  # never gathered, so without gradients; with another reduce dtype FSDP2 would look for them
                group.post_backward()
                group._training_state = TrainingState.IDLE
        if not self._keeps_whole:
            self.show_shards()

    def end_backward(self) -> None:
        """Waits for the reduce-scatters of this backward."""
        for group in self.groups:
            group._training_state = TrainingState.IDLE
            group.finalize_backward()

    def sum_gradients(self, sums: bool, over_replicas: bool) -> None:
        """Sets whether backwards reduce gradients, and also over replicas."""
        for group in self.groups:
            group.reduce_grads, group.all_reduce_grads = sums, over_replicas

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        """``(gathered parameter, shard)`` of each parameter that was gathered before."""
        found = [(getattr(param, "_unsharded_param", None), param.sharded_param) for param in self._params]
        return [(whole, shard) for whole, shard in found if whole is not None]

    def keep_whole(self, keep: bool) -> None:
        """Sets whether a backward leaves the parameters gathered, and on the modules."""
        self._keeps_whole = keep
        self._set_resharding()

    def _set_resharding(self) -> None:
        for group in self.groups:
            group.reshard_after_backward = not (self._keeps_whole or (self._reuses and not self._ends))

    def release_buffers(self) -> None:
        """Called on the root at the end of a forward or a backward: releases buffers of finished collectives."""
        shared = self._state._comm_ctx
        if (gathered := shared.all_gather_state) is not None:
            shared.all_gather_copy_in_stream.wait_event(gathered.event)
            shared.all_gather_stream.wait_event(gathered.event)
            shared.all_gather_state = None
        for state in take_reductions(shared):
            if state.event is not None:
                self._state._device_handle.current_stream().wait_event(state.event)

    def drop_gradients(self) -> None:
        """Discards gradients that were accumulated and not reduced."""
        for group in self.groups:
            group._partial_reduce_output = None
        for param in self._params:
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None

    def shards(self) -> list[tuple[Tensor, nn.Module, str]]:
        """``(sharded parameter, owning module, attribute)`` of each parameter."""
        infos = ((param.sharded_param, param._module_info) for param in self._params)
        return [(shard, info.module, info.param_name) for shard, info in infos]


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def _holds(param: Any, module: nn.Module) -> bool:
    info = param._module_info
    return info.module is module or any(other is module for other in info.shared_modules)


def _is_whole(group: Any) -> bool:
    """Whether this rank's shards are the parameters themselves, in the memory that forward computes in."""
    info = group.mesh_info
    if (isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1) or isinstance(
        group.offload_policy, CPUOffloadPolicy
    ):
        return False
    return not any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params)


def _has_replicas(group: Any) -> bool:
    return isinstance(group.mesh_info, DDPMeshInfo) and group.mesh_info.replicate_mesh_size > 1


def _keep_gradients(group: Any) -> None:
    """Does what a reduction over one rank does, without its buffers: gradients become those of the shards."""
    group._training_state = TrainingState.POST_BACKWARD
    params = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    both = [(p.unsharded_accumulated_grad, p._unsharded_param.grad) for p in params]
    added = [(total, grad) for total, grad in both if total is not None and grad is not None]
    if added:
        torch._foreach_add_([total for total, _ in added], [grad for _, grad in added])
    found = []
    for param, (total, grad) in zip(params, both, strict=True):
        param.unsharded_accumulated_grad = param._unsharded_param.grad = None
        whole = grad if total is None else total
        if whole is not None:
            found.append((param, whole.detach().to(group._reduce_dtype or whole.dtype)))
    if group.reshard_after_backward:
        group.reshard()
    for param, grad in found:
        grad = grad.to(param.orig_dtype).contiguous()
        shard = param.sharded_param
        if shard.grad is None:
            shard.grad = param.to_sharded_dtensor(grad)
        else:
            shard.grad._local_tensor += grad
        for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(shard)
    group._training_state = TrainingState.IDLE


def _show(params: Sequence[Any], tensors: Iterable[Tensor]) -> None:
    """Sets ``tensors`` on the modules that do not hold them yet, as these parameters."""
    for param, tensor in zip(params, tensors, strict=True):
        info = param._module_info
        held = info.module._parameters
        if held.get(info.param_name) is not tensor:
            held[info.param_name] = tensor  # as `_setattr_on_modules` does, without its questions: it is done often
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                module._parameters[name] = tensor


def _whole_gradient(param: Any) -> Tensor | None:
    whole = getattr(param, "_unsharded_param", None)
    return None if whole is None else whole.grad


def _agree_on_dtype(group: Any) -> None:
    """Converts accumulated gradients of a group to one dtype before the reduction.

    Gradients of earlier micro-batches are kept in the reduce dtype. FSDP2 refuses to reduce them together with
    gradients of only the last micro-batch, or zeros of an unused parameter, which are in the compute dtype.
    """
    params = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if all(param.unsharded_accumulated_grad is None for param in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is not None or not param.unsharded_param.requires_grad:
            continue
        param.to_accumulated_grad_if_needed()


def _fill_unused(group: Any) -> None:
    """Sets zero gradients for parameters that this rank did not use, so that all ranks reduce the same tensors. From
    torch 2.13 on FSDP2 can do this itself (``set_reduce_scatter_unused_params``)."""
    for param in group.fsdp_params:
        whole = getattr(param, "_unsharded_param", None)
        if (
            whole is not None
            and whole.requires_grad
            and whole.grad is None
            and param.unsharded_accumulated_grad is None
        ):
            whole.grad = torch.zeros_like(whole)
