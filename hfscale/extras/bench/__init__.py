"""Measure collectives over this machine's links, by message size."""

from ...extensions import Extension

EXTENSION = Extension(name="bench", commands={"bench": "hfscale.extras.bench.command"})
