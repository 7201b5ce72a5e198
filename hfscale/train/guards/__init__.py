"""Check ordinary code around a parallelized model for silently wrong numbers."""
