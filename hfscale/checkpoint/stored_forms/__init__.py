"""Read and dequantize weights that checkpoints store quantized, and quantize them again for a save."""
