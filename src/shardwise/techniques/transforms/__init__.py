"""Your own changes of a module, made before it is read and sharded."""
