#!/usr/bin/env bash
# Run what a GPU has to show, one step after the other, and write each result as it comes.
#
#   bash scripts/gpu_evidence.sh OUT [PART ...]     PART: versions tests speed LoRA QLoRA; the first three by default
#
# OUT/steps.jsonl gets one line a step: its name, exit status and seconds. Beside it are each step's output (NAME.log) and
# the tests' reports (NAME.xml), whose skips are listed in the log. Files of tests run beside each other, and the ranks that
# share the GPU in STAGED_WORKERS (1) processes; what is timed runs alone. A step has a process of its own, so a crash of one
# leaves the others alone; none is started later than DEADLINE seconds (540) after the first. Needs python with torch,
# transformers, accelerate, peft and pytest; what is missing besides (bitsandbytes, Liger, flash_attn) is skipped by name.
# Without a GPU, tests are skipped and benchmarks run tiny models: a rehearsal.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "${1:?a directory for the results}" && cd "$1" && pwd)
shift
PARTS=${*:-versions tests speed}
PYTHON=${PYTHON:-python3}
DEADLINE=${DEADLINE:-540}
export PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1
tiny=$("$PYTHON" -c "import torch; print('' if torch.cuda.is_available() else 'yes')")
failed=0

step() { # step NAME LIMIT COMMAND...: run the command for at most LIMIT seconds
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    if ((SECONDS >= DEADLINE)); then
        printf '{"step": "%s", "status": "not started"}\n' "$name" | tee -a "$OUT/steps.jsonl"
        return
    fi
    ((limit > DEADLINE - SECONDS)) && limit=$((DEADLINE - SECONDS))
    timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    ((status)) && failed=1
    printf '{"step": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - begin)) | tee -a "$OUT/steps.jsonl"
    return $status
}

for part in $PARTS; do
    case $part in
    versions)
        step versions 120 "$PYTHON" -c "
import importlib, platform, torch
print('python', platform.python_version())
for name in ('torch', 'transformers', 'accelerate', 'peft', 'triton', 'bitsandbytes', 'liger_kernel', 'flash_attn', 'trl', 'pytest'):
    try:
        print(name, getattr(importlib.import_module(name), '__version__', 'of unknown version'))
    except Exception as error:
        print(name, 'is missing:', error)
print('CUDA', torch.version.cuda, *(torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())))
"
        ;;
    tests)
        for file in tests/gpu/test_*.py; do # all at once: nothing is timed
            name=$(basename "$file" .py)
            step "$name" "${TEST_LIMIT:-240}" "$PYTHON" -m pytest -m gpu -W default -p no:cacheprovider -ra --timeout=110 \
                $([ "$name" = test_staged ] && echo "--numprocesses ${STAGED_WORKERS:-1} --dist load") \
                --junitxml="$OUT/$name.xml" "$file" &
        done
        for job in $(jobs -p); do wait "$job" || failed=1; done
        ;;
    speed)
        step one_gpu 150 "$PYTHON" scripts/bench/one_gpu.py --out "$OUT/one_gpu.json"
        [ -n "$tiny" ] || step experts 150 "$PYTHON" scripts/bench/experts.py --gpu --out "$OUT/experts_gpu.json"
        step finetune_gpu 240 "$PYTHON" scripts/bench/finetune_gpu.py ${tiny:+--tiny} --recipes LoRA --seconds 180 \
            --sides 'stock, plain' hfscale --out "$OUT/finetune_gpu.json"
        ;;
    LoRA | QLoRA) # every side over three baselines and three sizes of batch, as long as one command may take
        step "finetune_gpu_$part" "$DEADLINE" "$PYTHON" scripts/bench/finetune_gpu.py ${tiny:+--tiny} --recipes "$part" \
            --seconds $((DEADLINE - 90)) --directory "$OUT" --out "$OUT/finetune_gpu_$part.json"
        ;;
    *)
        echo "PART must be versions, tests, speed, LoRA or QLoRA, got $part" >&2
        exit 2
        ;;
    esac
done
exit $failed
