"""Define hfscale's own table of blueprints, for families without a usable tensor-parallel plan in transformers.

To add a family, add an entry; ``scripts/family_sweep.py --only FAMILY`` checks it against one process.
"""

from .blueprint import Blueprint
from .decoders import DECODERS
from .encoders import ENCODER_DECODERS, ENCODERS
from .family_limits import SEQUENCE_UNFIT
from .gpt_decoders import GPT_DECODERS

FAMILIES: dict[str, Blueprint] = {**DECODERS, **GPT_DECODERS, **ENCODERS, **ENCODER_DECODERS}
