"""A dense model made a mixture of experts."""
