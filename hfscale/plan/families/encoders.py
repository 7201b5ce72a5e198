"""Encoders, and the decoder halves of encoder-decoders."""

from ..blueprint import Block, Blueprint  # noqa: F401

ENCODERS: dict[str, Blueprint] = {}
