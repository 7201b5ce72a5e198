"""Adapters (PEFT), quantized weights and optimizers (bitsandbytes) over shards; third-party libraries on use."""
