"""Make a plan from a model and a layout: one file per part; no process group, no weights, no GPU."""
