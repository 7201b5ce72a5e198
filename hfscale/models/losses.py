"""List the losses that hfscale knows, by transformers' names (``model.loss_type``)."""

SHIFTED = "ForCausalLM"
"""That of causal language models: position ``i`` predicts the label of ``i + 1``."""

LOSSES = {SHIFTED: 1}
"""Losses over the vocabulary that can run on cut logits -> how many positions the labels are shifted by."""
