"""Measure this machine's constants, to be used in estimates with ``--hardware FILE``."""

from ...extensions import Extension

EXTENSION = Extension(name="calibrate", commands={"calibrate": "hfscale.extras.calibrate.command"})
