"""Shardwise trains any PyTorch module on many processes: DDP, FSDP2, HSDP and tensor parallelism.

    import torch, shardwise as sw

    world = sw.init("dp_shard=2")
    model = sw.parallelize(build_model, world)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = sw.TrainStep(model, optim, loss=sw.next_token_loss, max_grad_norm=1.0)
    for window in sw.Loader(dataset, world, global_batch=64, micro_batch=4):
        out = step(window)

Names are imported when first used, so that importing the package takes milliseconds.
"""

from importlib import import_module
from sys import modules

# For type checkers. Importing typing takes longer than everything else here, and Ctrl-C during it prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shardwise.config.record import Options
    from shardwise.data.batch import MicroBatch, default_collate
    from shardwise.data.labels import make_labels, shift_labels
    from shardwise.data.loader import Loader
    from shardwise.data.padding import pad_collate
    from shardwise.data.sft.dataset import SFTDataset
    from shardwise.dialects.fsdp1 import from_fsdp1
    from shardwise.errors import (
        CheckpointError,
        ConfigError,
        LayoutError,
        NonFiniteError,
        PlanError,
        RankError,
        ShardwiseError,
        Stopped,
        UnsupportedError,
        UsageError,
        VerifyError,
    )
    from shardwise.layout import Layout
    from shardwise.parallel import describe, parallelize, recipe_of, world_of
    from shardwise.parallel.part_values import full_tensor
    from shardwise.parallel.start import init
    from shardwise.recipe import Recipe
    from shardwise.state import (
        LoadReport,
        StateDictType,
        full_optimizer_state_dict,
        full_state_dict,
        gathered,
        load_full_optimizer_state_dict,
        load_full_state_dict,
        load_state_dict,
        load_weights,
        save_weights,
        state_dict,
    )
    from shardwise.state.checkpoint import CheckpointManager
    from shardwise.step.clip import clip_grad_norm_, clip_grad_value_
    from shardwise.step.evaluate import evaluate
    from shardwise.step.linear_loss import linear_cross_entropy
    from shardwise.step.local_optimizer import local_optimizer
    from shardwise.step.loss import TaskModel, next_token_loss
    from shardwise.step.model_loss import model_loss
    from shardwise.step.own_loop import accumulate, count_tokens
    from shardwise.step.parameter_groups import parameter_groups
    from shardwise.step.parameter_norms import parameter_norms
    from shardwise.step.penalty import parameter_penalty
    from shardwise.step.scale import unscale_gradients_
    from shardwise.step.step import StepOutput, TrainStep
    from shardwise.step.step_state import StepState
    from shardwise.step.window import window
    from shardwise.techniques import Parallel
    from shardwise.techniques.compile.options import Compile
    from shardwise.techniques.data.options import DDP, Prefetch, Sharding
    from shardwise.techniques.precision.options import Precision
    from shardwise.techniques.remat.options import Remat
    from shardwise.techniques.tp.by_hand import (
        column_parallel_linear,
        parallel_embedding,
        row_parallel_linear,
        tp_copy,
        tp_gather,
        tp_reduce,
        tp_scatter,
    )
    from shardwise.techniques.tp.options import TensorParallel, register_tp_plan
    from shardwise.techniques.transforms.options import transform
    from shardwise.verify import verify
    from shardwise.world import Axis, World

_HOME = {
    "shardwise.config.record": ("Options",),
    "shardwise.dialects.fsdp1": ("from_fsdp1",),
    "shardwise.errors": (
        "CheckpointError", "ConfigError", "LayoutError", "NonFiniteError", "PlanError", "RankError", "ShardwiseError",
        "Stopped", "UnsupportedError", "UsageError", "VerifyError",
    ),
    "shardwise.layout": ("Layout",),
    "shardwise.parallel": ("describe", "parallelize", "recipe_of", "world_of"),
    "shardwise.parallel.part_values": ("full_tensor",),
    "shardwise.parallel.start": ("init",),
    "shardwise.techniques": ("Parallel",),
    "shardwise.techniques.compile.options": ("Compile",),
    "shardwise.techniques.data.options": ("DDP", "Prefetch", "Sharding"),
    "shardwise.techniques.precision.options": ("Precision",),
    "shardwise.techniques.remat.options": ("Remat",),
    "shardwise.techniques.tp.by_hand": (
        "column_parallel_linear", "parallel_embedding", "row_parallel_linear", "tp_copy", "tp_gather", "tp_reduce",
        "tp_scatter",
    ),
    "shardwise.techniques.tp.options": ("TensorParallel", "register_tp_plan"),
    "shardwise.techniques.transforms.options": ("transform",),
    "shardwise.recipe": ("Recipe",),
    "shardwise.state": (
        "LoadReport", "StateDictType", "full_optimizer_state_dict", "full_state_dict", "gathered",
        "load_full_optimizer_state_dict", "load_full_state_dict", "load_state_dict", "load_weights",
        "save_weights", "state_dict",
    ),
    "shardwise.state.checkpoint": ("CheckpointManager",),
    "shardwise.data.batch": ("MicroBatch", "default_collate"),
    "shardwise.step.clip": ("clip_grad_norm_", "clip_grad_value_"),
    "shardwise.data.loader": ("Loader",),
    "shardwise.step.evaluate": ("evaluate",),
    "shardwise.step.parameter_groups": ("parameter_groups",),
    "shardwise.step.parameter_norms": ("parameter_norms",),
    "shardwise.step.penalty": ("parameter_penalty",),
    "shardwise.data.labels": ("make_labels", "shift_labels"),
    "shardwise.data.padding": ("pad_collate",),
    "shardwise.data.sft.dataset": ("SFTDataset",),
    "shardwise.step.linear_loss": ("linear_cross_entropy",),
    "shardwise.step.loss": ("TaskModel", "next_token_loss"),
    "shardwise.step.model_loss": ("model_loss",),
    "shardwise.step.local_optimizer": ("local_optimizer",),
    "shardwise.step.scale": ("unscale_gradients_",),
    "shardwise.step.step_state": ("StepState",),
    "shardwise.step.step": ("StepOutput", "TrainStep"),
    "shardwise.step.own_loop": ("accumulate", "count_tokens"),
    "shardwise.step.window": ("window",),
    "shardwise.verify": ("verify",),
    "shardwise.world": ("Axis", "World"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "DDP",
    "Axis",
    "CheckpointError",
    "CheckpointManager",
    "Compile",
    "ConfigError",
    "Layout",
    "LayoutError",
    "LoadReport",
    "Loader",
    "MicroBatch",
    "NonFiniteError",
    "Options",
    "Parallel",
    "PlanError",
    "Precision",
    "Prefetch",
    "RankError",
    "Recipe",
    "Remat",
    "SFTDataset",
    "Sharding",
    "ShardwiseError",
    "StateDictType",
    "StepOutput",
    "StepState",
    "Stopped",
    "TaskModel",
    "TensorParallel",
    "TrainStep",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "World",
    "accumulate",
    "clip_grad_norm_",
    "clip_grad_value_",
    "column_parallel_linear",
    "count_tokens",
    "default_collate",
    "describe",
    "evaluate",
    "from_fsdp1",
    "full_optimizer_state_dict",
    "full_state_dict",
    "full_tensor",
    "gathered",
    "init",
    "linear_cross_entropy",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_state_dict",
    "load_weights",
    "local_optimizer",
    "make_labels",
    "model_loss",
    "next_token_loss",
    "pad_collate",
    "parallel_embedding",
    "parallelize",
    "parameter_groups",
    "parameter_norms",
    "parameter_penalty",
    "recipe_of",
    "register_tp_plan",
    "row_parallel_linear",
    "save_weights",
    "shift_labels",
    "state_dict",
    "tp_copy",
    "tp_gather",
    "tp_reduce",
    "tp_scatter",
    "transform",
    "unscale_gradients_",
    "verify",
    "window",
    "world_of",
]


def __getattr__(name: str) -> "Any":
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch" or "torch" not in modules:
            raise
        raise _unknown_torch(error) from error
    globals()[name] = value
    return value


def _unknown_torch(error: ImportError) -> Exception:
    """The error for a torch version that lacks a private name which Shardwise uses."""
    from shardwise.errors import UnsupportedError

    return UnsupportedError(
        f"torch {modules['torch'].__version__}",
        why=f"something that Shardwise uses of it is not there: {error}",
        fix='pip install "torch>=2.11,<2.15", the versions that its tests ran on, or a newer Shardwise',
    )


def __dir__() -> list[str]:
    return sorted(__all__)
