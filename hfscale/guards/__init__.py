"""What is silently wrong in ordinary code around a parallelized model, seen and refused in words."""

from .stock_loops import refuse_stock_accelerator

__all__ = ["refuse_stock_accelerator"]
