"""Features beside the axes: adapters, precision, products in 8 bits, memory, quantization; a folder each."""
