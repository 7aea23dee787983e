"""The job of ``shardwise train``: its parts built from a configuration, the run, what it writes and how it resumes.

Nothing is imported here: the command line looks at some of these files before it knows torch.
"""
