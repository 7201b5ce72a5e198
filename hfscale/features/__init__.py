"""Features in addition to parallel axes: adapters, precision, fp8, memory, quantization, multi-token prediction, and
towers (of vision, for example); a folder each.
"""
