#!/usr/bin/env bash
# torch.func.jvp, and any other use of forward-mode differentiation, of torch 2.14.1, seen on CPUs on 2026-11-28.
# Expected: a public function does not warn of what torch itself does inside.
# Seen: the first call in a process raises a FutureWarning that torch.jit.script is deprecated and that one should switch
# to torch.compile or torch.export; torch's own decompositions call it as they are imported. With torch 2.13 it is a
# DeprecationWarning, which is not shown by default. Programs that make warnings errors fail in their first jvp.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch

x = torch.ones(2)
seen = []
for _ in range(2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.func.jvp(torch.sin, (x,), (x,))
    seen.append([f"{each.category.__name__}: {each.message}" for each in caught])
print("first jvp:", {*seen[0]})
print("second jvp:", {*seen[1]})
sys.exit(not any("FutureWarning: `torch.jit.script`" in each for each in seen[0]) or bool(seen[1]))
PYTHON
