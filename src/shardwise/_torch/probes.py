"""Checks that the private names of torch that are used here exist. If one is missing, torch has changed, and
:mod:`shardwise.verify.torch_check` tries nothing with it.

A name is an attribute of a module or class. For attributes that only instances have, it is a word in the source of the
module that makes them.
"""

import importlib
import inspect
import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """Private names in one place of torch.

    Attributes:
        place: a module, ``module:Class`` or ``module:Class.Inner``.
        attributes: attributes that it must have.
        words: words in the source of the module: attributes of its instances.
        without: what is done where they are missing; "": there is no substitute.
    """

    place: str
    attributes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    without: str = ""

    def missing(self) -> list[str]:
        """The names that do not exist in this torch."""
        module, _, name = self.place.partition(":")
        try:
            found = importlib.import_module(module)
            home = operator.attrgetter(name)(found) if name else found
        except (ImportError, AttributeError):
            return [self.place]
        source = inspect.getsource(found) if self.words else ""
        return [f"{self.place}.{each}" for each in self.attributes if not hasattr(home, each)] + [
            f"{self.place}: {each}" for each in self.words if each not in source
        ]


_FSDP = "torch.distributed.fsdp._fully_shard"
PROBES = (
    Probe("torch._C", ("_current_graph_task_id", "_will_engine_execute_node")),
    Probe("torch._C", ("_dispatch_get_all_op_names", "_dispatch_has_kernel_for_dispatch_key")),
    Probe(
        "torch._C", ("_clear_DTensor_sharding_propagator_cache",), without="results are not forgotten between worlds"
    ),
    Probe("torch._C", ("DisableTorchFunctionSubclass",)),
    Probe("torch._C", ("_are_functorch_transforms_active",)),
    Probe("torch.cuda.memory", ("_record_memory_history", "_dump_snapshot")),
    Probe("torch._C._autograd", ("_top_saved_tensors_default_hooks",)),
    Probe("torch", ("_foreach_norm", "_foreach_mul_", "_foreach_add_", "_foreach_copy_")),
    Probe("torch.autograd", ("_unsafe_preserve_version_counter",)),
    Probe("torch.autograd", ("_engine_run_backward",)),
    Probe("torch.autograd", ("_profiler_enabled",)),
    Probe(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
        ("_shutdown_workers",),
        words=("_workers",),
        without="workers of a Loader end some seconds after an error",
    ),
    Probe(
        "torch.utils.data._utils.signal_handling",
        ("_SIGCHLD_handler_set",),
        without="the end of a worker of a Loader raises wherever its rank happens to be",
    ),
    Probe(
        "torch.optim.optimizer",
        ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        words=("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ),
    Probe("torch.storage", words=("_untyped_storage", "_internal=False")),
    Probe("torch.nn.parameter", words=("_is_param",)),
    Probe("torch:Tensor", ("_backward_hooks", "_post_accumulate_grad_hooks", "_version")),
    Probe("torch.autograd:Variable", ("_execution_engine",)),
    Probe("torch.overrides", ("_get_current_function_mode_stack",)),
    Probe("torch.utils._python_dispatch", ("TorchDispatchMode", "_disable_current_modes")),
    Probe("torch.utils._pytree", ("tree_flatten", "tree_map", "tree_unflatten")),
    Probe("torch.utils.checkpoint", ("_StopRecomputationError",), words=("recompute_fn",)),
    Probe("torch._functorch.partitioners", ("choose_saved_values_set",)),
    Probe("torch._functorch.config", ("activation_memory_budget",)),
    Probe("torch._dynamo.comptime", ("comptime",)),
    Probe("torch.nn.modules.batchnorm", ("_NormBase",)),
    Probe("torch._library.autograd", words=("Generated.apply",)),
    Probe("torch.nn.utils.stateless", ("_functional_call",)),
    Probe("torch.nn.utils.parametrizations", ("_SpectralNorm",)),
    Probe("torch.nn.init", ("_calculate_fan_in_and_fan_out",)),
    Probe("torch.nn.modules.module:Module", ("_apply", "_call_impl"), words=("_forward_pre_hooks", "_parameters")),
    Probe("torch.amp.grad_scaler:GradScaler", ("_check_scale_growth_tracker",), words=("_per_optimizer_states",)),
    Probe(
        "torch.distributed.distributed_c10d",
        ("_get_default_store", "_resolve_process_group", "_world", "ProcessGroupGloo"),
    ),
    Probe("torch.distributed:ProcessGroupGloo", ("_Options", "create_default_device", "create_device")),
    Probe("torch.distributed:ProcessGroupGloo._Options", ("_devices", "_threads", "_timeout")),
    Probe("torch.distributed:ProcessGroup", ("_get_backend",), without="how long a group waits is not read"),
    Probe("torch.distributed._composable.replicate", ("DDP",)),
    Probe("torch.distributed._functional_collectives", words=("_c10d_functional",)),
    Probe("torch.distributed.device_mesh:DeviceMesh", ("_get_root_mesh",)),
    Probe("torch.distributed.checkpoint.filesystem", ("_StorageInfo",)),
    Probe("torch.distributed.tensor:DTensor", ("_op_dispatcher", "_local_tensor")),
    Probe("torch.distributed.tensor._dispatch", words=("_custom_op_handlers", "sharding_propagator")),
    Probe("torch._ops", words=("_schema", "is_view")),
    Probe(
        "torch.distributed.tensor._dispatch:OpDispatcher",
        ("redistribute_local_args", "_propagate_op_sharding_dispatch_slow_path"),
    ),
    Probe("torch.distributed.tensor._dtensor_spec", ("DTensorSpec", "TensorMeta")),
    Probe(f"{_FSDP}._fsdp_common", ("DDPMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo", "TrainingState")),
    Probe(f"{_FSDP}._fully_shard", ("_init_param_group",)),
    Probe(
        "torch.distributed._composable.contract",
        ("RegistryItem",),
        words=("inp_module",),
        without="fully_shard of a sharded model is refused when its optimizer steps",
    ),
    Probe(
        "torch.distributed.tensor._api",
        words=("_distribute_module_applied",),
        without="distribute_module of a sharded model is not refused",
    ),
    Probe(f"{_FSDP}._fully_shard:FSDPModule", ("_get_fsdp_state",)),
    Probe(
        f"{_FSDP}._fsdp_state:FSDPState", ("_lazy_init", "_root_pre_forward"), words=("_is_root", "_fsdp_param_group")
    ),
    Probe(
        f"{_FSDP}._fsdp_state",
        words=("_pre_forward_hook_handle", "_post_forward_hook_handle", "_comm_ctx", "_state_ctx", "_device_handle"),
    ),
    Probe(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        (
            "unshard",
            "wait_for_unshard",
            "reshard",
            "_to_unsharded",
            "post_backward",
            "finalize_backward",
            "use_training_state",
        ),
        words=(
            "_training_state",
            "_all_gather_result",
            "_partial_reduce_output",
            "reshard_after_backward",
            "_reduce_dtype",
        ),
    ),
    Probe(
        f"{_FSDP}._fsdp_param",
        ("_chunk_with_empty", "alloc_storage"),
        words=(
            "_unsharded_param",
            "_module_info",
            "unsharded_accumulated_grad",
            "_sharded_param_data",
            "all_gather_outputs",
        ),
    ),
    Probe(
        f"{_FSDP}._fsdp_param:FSDPParam",
        (
            "_setattr_on_modules",
            "_sharded_local_tensor",
            "init_all_gather_outputs",
            "init_unsharded_param",
            "to_accumulated_grad_if_needed",
            "to_sharded_dtensor",
        ),
    ),
    Probe(f"{_FSDP}._fsdp_state", words=("_fsdp_param_groups",), without="groups of a unit lie beside the last one"),
    Probe(f"{_FSDP}._fsdp_param_group", words=("_module_fqn",)),
    # For a reset without reset_iter_state, before torch 2.13.
    Probe(f"{_FSDP}._fsdp_state", words=("_modules_to_run_forward",), without="FSDPModule.reset_iter_state"),
    Probe(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        ("_to_sharded", "_wait_all_gather_streams_on_event"),
        words=("_all_reduce_state", "_post_reduce_event", "_reshard_after_forward_event", "_post_forward_indices"),
        without="FSDPModule.reset_iter_state",
    ),
)


def missing() -> list[str]:
    """Names that do not exist in this torch and have no substitute, each with its place."""
    return [name for probe in PROBES if not probe.without for name in probe.missing()]
