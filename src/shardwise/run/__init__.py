"""The training run of ``shardwise train``: built from a configuration, run, its files written, and resumed.

Nothing is imported here: the command line uses some of these files before it imports torch.
"""
