"""What a checkpoint says of its own files, and reading by it: whoever reads weights uses this, and saving builds on
it."""
