"""The bridges to Accelerate and to transformers' Trainer."""
