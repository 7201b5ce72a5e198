"""Shard and replicate a model over the data axes, after all other axes: FSDP2 over ``dp_shard``, HSDP with replicas."""
