"""Explain an out-of-memory error that ends a process: which kinds of tensors held the memory, and which settings need
less.
"""

from ...extensions import Extension

EXTENSION = Extension(
    name="out of memory",
    explanations={"memory": "hfscale.extras.out_of_memory.explain:explain"},
)
