"""Keep a checkpoint's quantized weights in the bytes that it stores, under adapters; and write weights quantized again,
like the checkpoint that they were loaded from.
"""

from ...extensions import Extension

EXTENSION = Extension(
    name="as stored",
    quantizations={"as_stored": "hfscale.extras.as_stored.kept:plan_as_stored"},
    written_forms={"as_stored": "hfscale.extras.as_stored.encoding:QuantizedAgain"},
)
