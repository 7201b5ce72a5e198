"""Make a plan from a model and a layout, without process groups, weights or a GPU."""
