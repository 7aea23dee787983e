"""Private names of torch, a file for each subject; checked against torch 2.13. Nothing else in the package touches such names,
but for ``_compat.py``, which holds the older ones."""
