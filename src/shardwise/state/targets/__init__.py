"""Writers for weight file formats, one file each: they plan the files, and the place of every value in them."""

from shardwise.state.targets.checkpoint import plan_checkpoint
from shardwise.state.targets.dcp import plan_dcp
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece
from shardwise.state.targets.safetensors import plan_folder, plan_safetensors
from shardwise.state.targets.torch_file import plan_torch_file

__all__ = [
    "ConversionPlan",
    "Fact",
    "Fixed",
    "Piece",
    "plan_checkpoint",
    "plan_dcp",
    "plan_folder",
    "plan_safetensors",
    "plan_torch_file",
]
