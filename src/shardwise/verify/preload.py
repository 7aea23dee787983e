"""Imports what every rank of ``shardwise train`` needs for training and comparison, for
``launch_local(preload=...)``."""

import torch

import shardwise.run.job
import shardwise.verify  # noqa: F401

# Imports torch's compiler too (some seconds), which every optimizer's constructor imports.
torch.compiler.disable(lambda: None)
