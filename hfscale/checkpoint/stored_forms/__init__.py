"""Checkpoints whose weights are stored quantized, read as plain values."""
