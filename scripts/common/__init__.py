"""What the launched scripts share: recipes, data, the training loop, and what a run leaves behind."""
