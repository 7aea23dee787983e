"""Readers for weight file formats, one file each: the tensors in a file, the places of their bytes, and what is refused."""
