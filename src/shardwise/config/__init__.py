"""Option records and the strict reader of configuration files. Torch-free."""
