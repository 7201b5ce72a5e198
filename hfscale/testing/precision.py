"""Keep float64 models in float64; made in :mod:`hfscale.families.precision`, which inference reads too."""

from ..families.precision import keep_float64

__all__ = ["keep_float64"]
