"""Features in addition to parallel axes: adapters, precision, fp8, memory, quantization, prediction of further
tokens, and towers (of vision, for example); a folder each.
"""
