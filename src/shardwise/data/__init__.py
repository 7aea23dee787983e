"""Samples on their way to a step: files of tokens, the global order of samples, windows of micro-batches, labels.

Nothing is imported here: the command line looks at some of these files before it knows torch.
"""
