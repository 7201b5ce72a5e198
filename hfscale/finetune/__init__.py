"""Adapters (PEFT), quantized weights and optimizers (bitsandbytes) over shards; third-party libraries on use."""

import logging

# Importing PEFT imports bitsandbytes, which on a CPU recommends a package that it can do without, in every process.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
