"""FSDP2's units without FSDP2's own hooks: a unit gathers, frees and reduces its parameters when it is told to.

``fully_shard`` makes the groups of parameters (shards, buffers, streams, collectives), and puts hooks on modules that decide
when each of them works. Those hooks look at what a forward returns and at what ran most recently, which differs by rank where
ranks run other code; :mod:`shardwise.techniques.data.unit_order` decides instead, and calls the methods here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardwise._torch.fully_shard import take_reductions

__all__ = ["Unit", "in_backward", "take_over", "when_interrupted"]


def in_backward() -> bool:
    """Whether this thread runs a node of a backward now."""
    return torch._C._current_graph_task_id() != -1


def take_over(root: nn.Module) -> None:
    """Removes the hooks by which the units of ``root`` gather, free and reduce by themselves, and those by which ``state_dict()``
    frees what is gathered: one rank that looks would leave the others waiting for it in backward. Parameters have memory."""
    states = {id(state): state for module in root.modules() if (state := _state(module)) is not None}
    _state(root)._lazy_init()
    for state in states.values():
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            for name in ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"):
                for handle in getattr(group, name).values():
                    handle.remove()


def when_interrupted(module: nn.Module, call: Callable[[], None]) -> None:
    """From now on ``call`` is called when a call of ``module`` ends by what is no Exception (Ctrl-C): torch runs no hooks then."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return type(module)._call_impl(module, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            call()
            raise

    module.__dict__["_call_impl"] = run


class Unit:
    """What is gathered and reduced together: one or several modules, entered by their forwards.

    Attributes:
        name: of the unit in the recipe.
        modules: in the order of the recipe.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]):
        self.name, self.modules = name, tuple(modules)
        self._state = _state(self.modules[0])
        self.groups: list[Any] = list(self._state._fsdp_param_groups)
        self._hooked: set[int] = set()
        self._hooked_before: set[int] = set()

    @property
    def is_trained(self) -> bool:
        """Whether one of its parameters requires a gradient."""
        return any(param.sharded_param.requires_grad for group in self.groups for param in group.fsdp_params)

    @property
    def is_gathered(self) -> bool:
        return all(group.is_unsharded for group in self.groups)

    @property
    def is_free(self) -> bool:
        return all(group.is_sharded for group in self.groups)

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Of the root, before a forward: streams wait for what wrote the shards, and inputs go to the device."""
        args, kwargs = self._state._root_pre_forward(module, args, kwargs)
        self._state._state_ctx.iter_forward_root = None
        return args, kwargs

    # ---- parameters ------------------------------------------------------------------------------------------

    def gather(self, *, backward: bool = False) -> None:
        """Makes the parameters whole, unless they are, and shows them on the modules. All ranks of the unit's mesh call it."""
        with torch.inference_mode(False):  # what an evaluation gathers first, training uses again
            for group in self.groups:
                group._training_state = TrainingState.PRE_BACKWARD if backward else TrainingState.FORWARD
                group.unshard(group.unshard_async_op)
                group.wait_for_unshard()
        self.show_whole()

    def prefetch(self, *, backward: bool) -> None:
        """Starts gathering; :meth:`gather` waits for it. All ranks of the unit's mesh call it."""
        state = TrainingState.PRE_BACKWARD if backward else TrainingState.FORWARD
        with torch.inference_mode(False):
            for group in reversed(self.groups) if backward else self.groups:
                with group.use_training_state(state):
                    group.unshard(group.unshard_async_op)

    def drop_prefetched(self) -> None:
        """Forgets what was gathered ahead and not used: by the next forward the shards may have changed."""
        for group in self.groups:
            found, group._all_gather_result = group._all_gather_result, None
            if found is not None and found.all_gather_work is not None:
                found.all_gather_work.wait()

    def leave_forward(self) -> None:
        """Frees the parameters as ``reshard_after_forward`` says; the modules show their shards either way."""
        for group in self.groups:
            group._training_state = TrainingState.FORWARD
            group.reshard()
            group._training_state = TrainingState.IDLE
        self.show_shards()

    def free(self) -> None:
        for group in self.groups:
            group._training_state = TrainingState.IDLE
            group.reshard()
        self.show_shards()

    def show_whole(self) -> None:
        """The modules hold the gathered parameters."""
        for param in self._params():
            param._setattr_on_modules(param._unsharded_param)

    def show_shards(self) -> None:
        """The modules hold the parameters that the user knows; what is gathered stays."""
        for param in self._params():
            param._setattr_on_modules(param.sharded_param)

    def lend(self, module: nn.Module) -> None:
        """Shows the gathered parameters of one module until its forward has run, if they are still there."""
        mine = [param for param in self._params() if self.is_gathered and _holds(param, module)]
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
        """A number that grows with every write to the shards: an operation on a DTensor counts in its own version, one on what it
        holds in that tensor's. Lists of DTensors (``torch._foreach_mul_``) and ``.data`` count in neither."""
        shards = (param.sharded_param for param in self._params())
        both = (tensor for shard in shards for tensor in (shard, shard._local_tensor))
        return sum(tensor._version for tensor in both if not tensor.is_inference())

    def moved(self) -> Tensor | None:
        """The shard of a gathered parameter that no longer lies where it was gathered: a forward has given it other memory."""
        for param in self._params():
            outputs = param.all_gather_outputs
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None and len(outputs) == 1 and whole.data_ptr() != outputs[0].data_ptr():
                return param.sharded_param
        return None

    # ---- gradients -------------------------------------------------------------------------------------------

    def hook_gradients(self, make: Callable[[], Callable[[Tensor], None]]) -> None:
        """Puts a hook on each gathered parameter that is trained and has none, called after a gradient was added to it. The hook
        must keep nothing alive: it is held in C++, where a cycle is never freed."""
        for param in self._params():
            whole = param._unsharded_param
            if whole.requires_grad and id(whole) not in self._hooked:
                whole.register_post_accumulate_grad_hook(make())
                self._hooked.add(id(whole))

    def hook_before_gradients(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        """The same for a hook that is given each gradient before it is added, and may return another."""
        for param in self._params():
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and id(whole) not in self._hooked_before:
                whole.register_hook(hook)
                self._hooked_before.add(id(whole))

    def positions_with_gradient(self) -> list[int]:
        """Which parameters (numbers in the order of :meth:`shards`) have a gradient that was not reduced. After reduction FSDP2
        can no longer tell 'used, zero' from 'not used'."""
        return [i for i, param in enumerate(self._params()) if _whole_gradient(param) is not None]

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over the ranks now, and not accumulated."""
        return all(group.reduce_grads for group in self.groups)

    def reduce(self) -> None:
        """Sums gradients over the ranks, zeros where this one has none, or accumulates them; then frees the parameters."""
        for group in reversed(self.groups):
            if group.reduce_grads:
                _fill_unused(group)
                _agree_on_dtype(group)
            elif not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
                continue  # never gathered yet, so without gradients; where sums are of another dtype, FSDP2 would ask for them
            group.post_backward()
            group._training_state = TrainingState.IDLE
        if all(group.reshard_after_backward for group in self.groups):
            self.show_shards()

    def end_backward(self) -> None:
        """Waits for the sums of this backward."""
        for group in self.groups:
            group._training_state = TrainingState.IDLE
            group.finalize_backward()

    def keep_whole(self, keep: bool) -> None:
        """Whether a backward leaves the parameters gathered."""
        for group in self.groups:
            group.reshard_after_backward = not keep

    def release_buffers(self) -> None:
        """Of the root, at the end of a forward or a backward: buffers of collectives that have run."""
        shared = self._state._comm_ctx
        if (gathered := shared.all_gather_state) is not None:
            shared.all_gather_copy_in_stream.wait_event(gathered.event)
            shared.all_gather_stream.wait_event(gathered.event)
            shared.all_gather_state = None
        for state in take_reductions(shared):
            if state.event is not None:
                self._state._device_handle.current_stream().wait_event(state.event)

    def drop_gradients(self) -> None:
        """Forgets gradients that were accumulated and not summed."""
        for group in self.groups:
            group._partial_reduce_output = None
        for param in self._params():
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None

    def shards(self) -> list[tuple[Tensor, nn.Module, str]]:
        """``(sharded parameter, owning module, attribute)`` of each parameter."""
        infos = ((param.sharded_param, param._module_info) for param in self._params())
        return [(shard, info.module, info.param_name) for shard, info in infos]

    def _params(self) -> Iterator[Any]:
        for group in self.groups:
            yield from group.fsdp_params


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def _holds(param: Any, module: nn.Module) -> bool:
    info = param._module_info
    return info.module is module or any(other is module for other in info.shared_modules)


def _whole_gradient(param: Any) -> Tensor | None:
    whole = getattr(param, "_unsharded_param", None)
    return None if whole is None else whole.grad


def _agree_on_dtype(group: Any) -> None:
    """Gradients of earlier micro-batches are kept in the dtype they are reduced in, and FSDP2 refuses to reduce them beside
    those of the last one alone, or the zeros of a parameter that was not used, in the dtype of compute."""
    params = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if all(param.unsharded_accumulated_grad is None for param in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is not None or not param.unsharded_param.requires_grad:
            continue
        param.to_accumulated_grad_if_needed()


def _fill_unused(group: Any) -> None:
    """Zeros for a parameter that this rank did not use, so that ranks reduce the same tensors. FSDP2 can make them itself from torch
    2.13 on (``set_reduce_scatter_unused_params``)."""
    for param in group.fsdp_params:
        whole = getattr(param, "_unsharded_param", None)
        if (
            whole is not None
            and whole.requires_grad
            and whole.grad is None
            and param.unsharded_accumulated_grad is None
        ):
            whole.grad = torch.zeros_like(whole)
