"""File formats and file systems: safetensors read in slices and written tensor by tensor, and atomic directories."""
