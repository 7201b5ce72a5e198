"""Estimate, search layouts, dry-run, calibrate and report, by the cost models."""
