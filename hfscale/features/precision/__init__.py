"""Precision of forward passes: autocast, casts of parameters, loss scaling, and Liger's kernels."""
