"""Memory of a rank, as predicted and as it is."""
