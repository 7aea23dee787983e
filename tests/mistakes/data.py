"""Rows of the part on data."""
