"""What a plan costs: bytes of weights, gradients, optimizer state and activations. Nothing runs."""
