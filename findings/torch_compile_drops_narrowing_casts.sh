#!/usr/bin/env bash
# torch.compile of torch 2.14.1 with its default backend, seen on CPUs on 2026-11-29.
# Expected: `x - x.to(torch.bfloat16).to(torch.float32)`, the part of a float32 number that bfloat16 cannot hold, is what it
# is in eager code; splitting numbers into a sum of narrower ones (compensated products, error feedback) rests on it.
# Seen: compiled, the difference is 0 everywhere. Inside one kernel the compiler computes narrow types in float32 and leaves
# both casts out. The narrow result itself, where it is returned beside the difference, is rounded. Nothing warns, and
# `torch._inductor.config.emulate_precision_casts`, which keeps the casts, is off.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$place/cache" "$place/venv/bin/python" - <<'PYTHON'
import sys

import torch


def split(x):
    narrow = x.to(torch.bfloat16)
    return narrow, x - narrow.to(torch.float32)


torch.manual_seed(0)
x = torch.randn(64, 48)
narrow, rest = split(x)
compiled_narrow, compiled_rest = torch.compile(split)(x)
print("narrow results are equal:", torch.equal(narrow, compiled_narrow))
print("largest difference, eager:", float(rest.abs().max()))
print("largest difference, compiled:", float(compiled_rest.abs().max()))
as_seen = torch.equal(narrow, compiled_narrow) and bool(rest.any()) and not compiled_rest.any()
sys.exit(not as_seen)
PYTHON
