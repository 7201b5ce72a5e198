"""Detect mistakes in user code that would make a parallelized model compute wrong numbers without an error."""
