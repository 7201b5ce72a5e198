"""Collectives and operators over ranks, differentiable where training needs it."""
