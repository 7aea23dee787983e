"""Mixed precision: which dtypes a model is stored, computed and reduced in, and where tensors are cast."""
