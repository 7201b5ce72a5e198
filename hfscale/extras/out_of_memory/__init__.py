"""Explain, when a process ends because memory ran out, what held the memory and what would need less."""

from ...extensions import Extension

EXTENSION = Extension(
    name="out of memory",
    explanations={"memory": "hfscale.extras.out_of_memory.explain:explain"},
)
