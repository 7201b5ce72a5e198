"""Measure this machine's links: collectives by message size, without a model."""

from .collectives import COLLECTIVES, Measured, measure, suggested_bucket

__all__ = ["COLLECTIVES", "Measured", "measure", "suggested_bucket"]
