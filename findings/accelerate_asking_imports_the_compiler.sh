#!/bin/sh
# One would expect: to ask whether a module was compiled costs nothing where nothing is compiled.
# What happens: accelerate's is_compiled_module first asks hasattr(torch, "_dynamo"), and torch answers by importing its
# compiler: hundreds of modules and seconds of the first call. Accelerator.unwrap_model asks it, so does every save of a
# Trainer.
# Versions: torch 2.14.1, accelerate 1.15.0; CPU.
# Seen: modules that the first unwrap_model(nn.Linear(1, 1)) imports, and its seconds (2 to 4 on two cores).
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 accelerate==1.15.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys
import time

from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
before = set(sys.modules)
start = time.perf_counter()
accelerator.unwrap_model(nn.Linear(1, 1))
seconds = time.perf_counter() - start
imported = sys.modules.keys() - before
compiler = [name for name in imported if name.startswith("torch._dynamo")]
print(f"the compiler was imported before: {'torch._dynamo' in before}")
print(f"the first unwrap_model imported {len(imported)} modules, {len(compiler)} of the compiler, in {seconds:.1f} s")
raise SystemExit(0 if "torch._dynamo" not in before and len(compiler) > 50 else 1)
END
"$python" "$work/script.py"
