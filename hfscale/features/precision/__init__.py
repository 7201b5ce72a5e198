"""Precision of forward passes: autocast, loss scaling, fp8 projections, and Liger's kernels."""
