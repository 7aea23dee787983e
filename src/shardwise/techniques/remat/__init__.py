"""Activation checkpointing (gradient checkpointing): a block runs again in backward and keeps less in between."""
