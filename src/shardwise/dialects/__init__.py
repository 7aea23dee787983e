"""Options of other libraries in Shardwise's words, one file each."""
