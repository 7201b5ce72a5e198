"""Connect hfscale to Accelerate: a stock-looking loop gives the right numbers on every layout."""

from .accelerator import Accelerator
