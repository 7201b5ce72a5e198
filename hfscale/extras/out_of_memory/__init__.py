"""Explain, as a process ends because memory ran out, what held it and what would need less."""

from ...extensions import Extension

EXTENSION = Extension(
    name="out of memory",
    explanations={"memory": "hfscale.extras.out_of_memory.explain:explain"},
)
