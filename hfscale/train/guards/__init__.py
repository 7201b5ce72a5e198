"""Checks for ordinary code around a parallelized model that would silently compute wrong numbers."""

from .changes import refuse_changes
from .empty import without_gaps
from .packed_rows import check_packed_rows
from .part import as_built, check_model
from .replicas import check_replicas
from .steps import before_step
from .stock_loops import refuse_stock_accelerator, refuse_stock_clipping

__all__ = [
    "as_built",
    "before_step",
    "check_model",
    "check_packed_rows",
    "check_replicas",
    "refuse_changes",
    "refuse_stock_accelerator",
    "refuse_stock_clipping",
    "without_gaps",
]
