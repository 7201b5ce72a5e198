"""Whole runs driven by a recipe: its schema, data, the training loop, and what a run leaves behind."""
