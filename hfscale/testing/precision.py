"""Keep float64 models in float64; made in :mod:`hfscale.plan.precision`, which inference reads too."""

from ..plan.precision import keep_float64

__all__ = ["keep_float64"]
