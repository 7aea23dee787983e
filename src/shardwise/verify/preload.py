"""What ranks that train or compare import, for ``launch_local(preload=("shardwise.verify.preload",))``: once for all of them."""

import torch

import shardwise.train.job
import shardwise.verify  # noqa: F401

__all__: list[str] = []

# Its compiler too, some seconds more: making any optimizer imports it.
torch.compiler.disable(lambda: None)
