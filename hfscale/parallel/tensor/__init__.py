"""Tensor parallelism: blocks of ordinary local modules, with collectives at their edges."""
