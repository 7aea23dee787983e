"""Rows of the part on options."""
