"""Check ordinary code around a parallelized model for silently wrong numbers."""

from .part import as_built, before_step, check_model
from .replicas import check_replicas
