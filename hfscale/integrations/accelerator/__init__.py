"""Connect hfscale to Accelerate, so that an ordinary Accelerate loop gives the right numbers in every layout."""

from .accelerator import Accelerator
