"""Load, save and resume: each rank reads its slices of a Hugging Face checkpoint, and rank 0 writes a plain one."""
