"""Activation checkpointing, offload, 8-bit activations, and reports of a rank's memory, predicted and measured."""
