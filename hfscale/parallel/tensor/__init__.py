"""Tensor parallelism: stock modules with local sizes inside the blocks, and collectives at their inputs and outputs."""
