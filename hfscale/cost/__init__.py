"""Estimate the cost of a run: models of bytes and seconds, and tools that use these models."""
