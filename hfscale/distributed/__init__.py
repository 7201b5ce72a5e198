"""Processes, the device mesh and its groups, differentiable collectives, and files."""
