"""Tensor parallelism: stock modules with local sizes inside the blocks, and collectives at the blocks' edges."""
