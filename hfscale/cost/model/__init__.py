"""Compute, from a model's plan alone, the bytes that a rank holds (weights, gradients, activations ...) and the seconds
of a step (products, communication ...).
"""
