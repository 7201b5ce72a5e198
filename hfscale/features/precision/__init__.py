"""Precision of forward passes: autocast, loss scaling, and Liger's kernels."""
