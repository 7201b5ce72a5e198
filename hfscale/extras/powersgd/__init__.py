"""Average gradients between replicas as low-rank factors: PowerSGD (Vogels et al. 2019)."""

from ...extensions import Extension

EXTENSION = Extension(
    name="PowerSGD",
    gradient_compressions={"powersgd": "hfscale.extras.powersgd.low_rank:PowerSGD"},
)
