"""hfscale's own table of families, where Hugging Face has no tensor-parallel plan or one that cannot be used.

A new family is an entry here; ``scripts/family_sweep.py --only FAMILY`` proves it.
"""

from ..blueprint import Blueprint
from .decoders import DECODERS
from .encoders import ENCODERS

FAMILIES: dict[str, Blueprint] = {**DECODERS, **ENCODERS}

__all__ = ["FAMILIES"]
