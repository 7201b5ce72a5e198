"""Weights in the formats of DeepSpeed's ZeRO, torchtitan and llama.cpp (GGUF)."""

from ...extensions import Extension

_HERE = "hfscale.extras.other_formats"
EXTENSION = Extension(
    name="other formats",
    sources={
        "names of files": f"{_HERE}.recognized:OTHERS",
        "GGUF": f"{_HERE}.gguf_source:GGUF",
        "torchtitan": f"{_HERE}.other_trainers:TITAN",
        "ZeRO": f"{_HERE}.other_trainers:ZERO",
    },
)
