"""Run collectives, and operators whose tensors are sharded over ranks; those that training needs are differentiable."""
