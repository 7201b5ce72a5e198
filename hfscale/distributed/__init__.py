"""Set up processes and the device mesh, run differentiable collectives, and read and write files."""
