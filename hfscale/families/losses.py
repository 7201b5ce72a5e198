"""The losses that hfscale knows, by the host's names (``model.loss_type``)."""

LOSSES = {"ForCausalLM": 1}
"""Losses over the vocabulary that can run on cut logits -> how many positions the labels are shifted by."""
