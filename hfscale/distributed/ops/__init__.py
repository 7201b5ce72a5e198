"""Run collectives and operators over ranks; those that training needs are differentiable."""
