"""Load, save and resume: each rank reads its shards from a Hugging Face checkpoint, and rank 0 writes a plain one."""
