"""Shard a model with FSDP2 over ``dp_shard``, and replicate it over ``dp_replicate`` (HSDP), after it is sharded over
all other axes.
"""
