"""Estimate, search layouts, dry-run and report, by the cost models."""
