"""What every rank of ``shardwise train`` imports to train and to prove, for ``launch_local(preload=...)``."""

import torch

import shardwise.run.job
import shardwise.verify  # noqa: F401

__all__: list[str] = []

# Its compiler too, some seconds more: making any optimizer imports it.
torch.compiler.disable(lambda: None)
