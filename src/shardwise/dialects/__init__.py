"""Translates the options of other libraries into Shardwise's, one file per library."""
