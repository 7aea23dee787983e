"""``torch.compile`` of single blocks."""
