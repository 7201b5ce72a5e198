"""What this machine's links carry: collectives by message size, measured; no model is involved."""

from .collectives import COLLECTIVES, Measured, measure, suggested_bucket

__all__ = ["COLLECTIVES", "Measured", "measure", "suggested_bucket"]
