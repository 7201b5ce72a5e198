"""Define hfscale's own table of families, for those without a usable tensor-parallel plan from Hugging Face.

A new family is an entry here; ``scripts/family_sweep.py --only FAMILY`` proves it.
"""

from .blueprint import Blueprint
from .decoders import DECODERS
from .encoders import ENCODER_DECODERS, ENCODERS
from .family_limits import SEQUENCE_UNFIT
from .gpt_decoders import GPT_DECODERS

FAMILIES: dict[str, Blueprint] = {**DECODERS, **GPT_DECODERS, **ENCODERS, **ENCODER_DECODERS}
