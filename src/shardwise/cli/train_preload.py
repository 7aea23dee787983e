"""What every rank of ``shardwise train`` imports, for ``launch_local(preload=("shardwise.cli.train_preload",))``."""

import torch

import shardwise.cli.train_proof
import shardwise.train.job  # noqa: F401

__all__: list[str] = []

# Its compiler too, some seconds more: making any optimizer imports it.
torch.compiler.disable(lambda: None)
