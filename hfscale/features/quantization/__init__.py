"""Plan and install sharded weights in 4 and 8 bits. Only this folder uses bitsandbytes' layers."""
