"""Measure this machine's constants, for estimates with ``--hardware FILE``."""

from ...extensions import Extension

EXTENSION = Extension(name="calibrate", commands={"calibrate": "hfscale.extras.calibrate.command"})
