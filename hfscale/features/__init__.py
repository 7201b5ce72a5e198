"""Features in addition to parallel axes: adapters, precision, fp8, memory, quantization, MTP, towers; a folder each."""
