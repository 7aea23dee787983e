"""The manifest and checksums of a checkpoint, and verified reads: used by all code that reads weights, and by
saving."""
