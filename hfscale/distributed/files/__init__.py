"""Read safetensors files in slices, write them tensor by tensor, and replace directories atomically."""
