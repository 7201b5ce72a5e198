"""Verify layouts of vision-language models: tiny configs, and parity cases whose batches have pictures."""

from ...extensions import Extension

EXTENSION = Extension(
    name="pictures",
    parity_cases={"AutoModelForImageTextToText": "hfscale.extras.pictures.verified:CASES"},
)
