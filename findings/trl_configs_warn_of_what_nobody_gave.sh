#!/bin/sh
# One would expect: a config of TRL's made with its defaults is quiet, or warns of something that its user gave.
# What happens: TRL's configs set gradient_checkpointing=True as their default, by the name that transformers gives up
# since 5.23, so each of them, SFTConfig, GRPOConfig and the others, warns "`gradient_checkpointing` is deprecated" when
# nobody gave it, and cannot be made where warnings are errors. Giving it by the old name, False as well, warns too; who
# gives activation_checkpointing, either way, hears nothing.
# Versions: torch 2.14.1, transformers 5.24.0, trl 1.16.0, datasets 5.2.0, accelerate 1.15.0; CPU.
# Seen: the FutureWarnings as SFTConfig and GRPOConfig are made with nothing, the old name, and the new one.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 trl==1.16.0 datasets==5.2.0 accelerate==1.15.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys
import warnings

from trl import GRPOConfig, SFTConfig

expected = {"nothing": 1, "gradient_checkpointing": 1, "activation_checkpointing": 0}
right = True
for kind in (SFTConfig, GRPOConfig):
    for given, number in expected.items():
        fields = {} if given == "nothing" else {given: False}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            made = kind(sys.argv[1], use_cpu=True, bf16=False, report_to=[], **fields)
        told = [str(each.message) for each in heard if each.category is FutureWarning]
        print(f"{kind.__name__}({given}): recomputes {made.activation_checkpointing}, warnings: {told}")
        right = right and len(told) == number
raise SystemExit(0 if right else 1)
END
"$python" "$work/script.py" "$work/out" 2> "$work/errors" || { cat "$work/errors"; exit 1; }
