"""Bytes on disk: safetensors read in slices and written tensor by tensor."""
