"""Rows of the part on checkpoints."""
