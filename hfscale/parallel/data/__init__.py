"""Shard and replicate a model over the data axes: FSDP2 over ``dp_shard``, HSDP with ``dp_replicate``, applied last."""
