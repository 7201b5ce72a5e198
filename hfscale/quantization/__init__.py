"""Weights in 4 and 8 bits over shards: the one room that knows bitsandbytes' layers."""
