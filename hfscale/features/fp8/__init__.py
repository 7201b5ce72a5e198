"""Products of weights in 8 bits: their plan, scales, operators, and gathers of rounded weights."""
