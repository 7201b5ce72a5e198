"""Plan and install weights in 4 and 8 bits over shards: the only folder that uses bitsandbytes' layers."""
