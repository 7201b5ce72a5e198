"""Weights in 4 and 8 bits over shards: the only room that knows bitsandbytes' layers."""
