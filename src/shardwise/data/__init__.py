"""Data loading: files of tokens, the shuffled order of samples, micro-batches of each optimizer step, labels.

Nothing is imported here: the command line uses some of these files before it imports torch.
"""
