#!/bin/sh
# One would expect: gather_for_metrics drops the rows that were repeated to fill the last batch, also those of an
# IterableDataset ("potentially drops duplicates in the last batch if on a distributed system").
# What happens: with dispatch_batches=True (the default for an IterableDataset) it does. With dispatch_batches=False each
# process fills its last batch with the stream's first rows, and gather_for_metrics returns them: over two processes,
# with batches of 4, 30 rows give 32 and 3 rows give 8. Metrics count them twice; only a log at level INFO says so.
# Versions: torch 2.13.0, accelerate 1.15.0; CPU, two processes over gloo.
# Seen: the gathered rows themselves, 0, 1, 2, ..., in one process and in two.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.13.0 accelerate==1.15.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(self.count))


found = {}
for dispatch in (True, False):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    for count in (30, 3):
        loader = accelerator.prepare(DataLoader(Stream(count), batch_size=4))
        seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
        found[dispatch, count] = len(seen)
        if accelerator.is_main_process:
            print(f"{accelerator.num_processes} process(es), dispatch_batches={dispatch}: {count} rows give", len(seen))
            print(seen)
alone = {(True, 30): 30, (True, 3): 3, (False, 30): 30, (False, 3): 3}
expected = alone if accelerator.num_processes == 1 else alone | {(False, 30): 32, (False, 3): 8}
accelerator.end_training()
sys.exit(0 if found == expected else 1)
END
"$python" "$work/script.py"
"$python" -m torch.distributed.run --nproc-per-node 2 "$work/script.py"
