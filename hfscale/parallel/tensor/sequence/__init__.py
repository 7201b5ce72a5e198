"""Sequence parallelism: hidden states between blocks are sharded along the sequence over the tensor ranks."""
