"""Verify layouts of models of pictures and text: small configs of them, and cases with pictures in their batches."""

from ...extensions import Extension

EXTENSION = Extension(
    name="pictures",
    parity_cases={"AutoModelForImageTextToText": "hfscale.extras.pictures.verified:CASES"},
)
