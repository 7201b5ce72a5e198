"""Connect hfscale to Accelerate and to transformers' Trainer."""
